"""The contract of `hybridmf.testing` for our estimators, on every device."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import pytest

import hybridmf as hmf
from hybridmf.testing import EstimatorContract


class OnEveryDevice(EstimatorContract):
    known: ClassVar[dict[Any, Any]] = {}

    @pytest.fixture(autouse=True)
    def _device(self, request, backend):
        self.device = backend
        variant = request.node.callspec.params["backend"]  # the emulated device and a GPU are both "cuda"
        self.key = type(self), variant

    def fitted(self, **options):
        """One fit without options for all tests that ask it something: emulated, it takes a tenth of a second."""
        if options:
            return super().fitted(**options)
        if self.key not in self.known:
            self.known[self.key] = super().fitted()
        return copy.deepcopy(self.known[self.key])

    def test_a_seed_repeats_the_bits(self):
        # the fits that it compares are its own, and two iterations have all that is drawn or has an order
        self.fitted = functools.partial(super().fitted, iterations=2)
        super().test_a_seed_repeats_the_bits()

    def test_scikit_learns_checks(self):
        if self.device == "cpu":  # they are about the interface
            super().test_scikit_learns_checks()

    def test_every_container_gives_the_same_model(self):
        if self.device == "cpu":  # it is converted before a device has it; large matrices are for test_late_check
            super().test_every_container_gives_the_same_model()


class WithOtherOptions(EstimatorContract):
    test_scikit_learns_checks = None  # of the interface, which the class has whatever its options


class TestImplicitALS(OnEveryDevice):
    estimator = hmf.ImplicitALS


class TestExplicitALS(OnEveryDevice):
    estimator = hmf.ExplicitALS


class TestPlainExplicitALS(WithOtherOptions):
    estimator = hmf.ExplicitALS
    options = {"biases": False, "dtype": "float64"}


class TestOtherSolvers(WithOtherOptions):
    estimator = hmf.ImplicitALS
    options = {"solver": "subspace", "regularization_scaling": "count", "reorder": "both"}
    exact = False


class TestSGD(OnEveryDevice):
    estimator = hmf.SGD
    exact = False


class TestCCD(OnEveryDevice):
    estimator = hmf.CCD
    options = {"biases": True}
    exact = False

    @pytest.mark.exhaustive  # its interface is that of the other classes
    def test_scikit_learns_checks(self):
        super().test_scikit_learns_checks()


class TestNonnegativeCCD(WithOtherOptions):
    estimator = hmf.CCD
    options = {"nonnegative": True, "dtype": "float64"}
    exact = False
