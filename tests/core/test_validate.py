"""Validation of scalars, names, positions and hyperparameters."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.core.validate import (
    MAX_FACTORS,
    MAX_N,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_real,
    check_rng,
    check_threads,
)
from hybridmf.errors import RatingsError
from hybridmf.plan.types import ASSEMBLIES, PRECISIONS, REORDERINGS, SOLVERS
from support.messages import says
from support.ratings import planted

INF, NAN = float("inf"), float("nan")


def test_says_finds_the_parts_in_order_only():
    assert re.search(says("a(", "b"), "x a( y\n b")
    assert not re.search(says("b", "a("), "x a( y b")


# ------------------------------------------------------------------------------------------------ scalars and names


@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float32(2), "2", None, [2], np.array(2.5), 1 + 0j])
def test_check_int_requires_integers(value):
    with pytest.raises(TypeError, match=says("factors must be an integer", repr(value), type(value).__name__)):
        check_int("factors", value, 1)


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_check_int_returns_python_ints(value):
    result = check_int("N", value, 1, 3)
    assert result == 3
    assert type(result) is int


def test_check_int_bounds():
    with pytest.raises(ValueError, match=says("N must satisfy N >= 1, got 0")):
        check_int("N", 0, 1)
    for value in (0, 11, 10**30):
        with pytest.raises(ValueError, match=says(f"N must satisfy 1 <= N <= 10, got {value}")):
            check_int("N", value, 1, 10)


@pytest.mark.parametrize("value", [True, np.False_, "0.1", None, 1j, np.array([0.1]), [0.1]])
def test_check_real_requires_real_numbers(value):
    with pytest.raises(TypeError, match=says("alpha must be a real number", repr(value), type(value).__name__)):
        check_real("alpha", value)


@pytest.mark.parametrize("value", [NAN, INF, -INF, np.float32("nan")])
def test_check_real_requires_finite_numbers(value):
    with pytest.raises(ValueError, match=says("alpha must be finite, got", str(float(value)))):
        check_real("alpha", value)


def test_check_real_bounds():
    assert check_real("alpha", 0, 0.0) == 0.0
    assert type(check_real("alpha", np.float32(0.5))) is float
    assert check_real("alpha", Fraction(1, 4)) == 0.25
    with pytest.raises(ValueError, match=says("alpha must be >= 0, got -1e-09")):
        check_real("alpha", -1e-9, 0.0)
    with pytest.raises(ValueError, match=says("alpha must be > 0, got 0")):
        check_real("alpha", 0, 0.0, strict=True)


@pytest.mark.parametrize("value", [10**400, -(10**9999), Fraction(10**400)], ids=["400", "9999", "fraction"])
def test_check_real_refuses_numbers_beyond_floats(value):
    with pytest.raises(ValueError, match=says("alpha must be finite, got", type(value).__name__, "beyond the largest")):
        check_real("alpha", value)


def test_check_int_names_the_argument_of_numbers_that_python_does_not_print():
    with pytest.raises(ValueError, match=says("1 <= N <= 10, got an integer of 33216 bits")):
        check_int("N", 10**9999, 1, 10)
    with pytest.raises(ValueError, match=says(f"1 <= N <= {2**31 - 1}, got {2**31}")):
        check_int("N", 2**31, 1, MAX_N)


@pytest.mark.parametrize("value", [0, 1, "True", None, np.array([True])])
def test_check_bool_requires_booleans(value):
    with pytest.raises(TypeError, match=says("biases must be True or False", repr(value), type(value).__name__)):
        check_bool("biases", value)


def test_check_bool_returns_python_bools():
    assert check_bool("biases", np.True_) is True
    assert check_bool("biases", False) is False


@pytest.mark.parametrize("value", ["lu", "Cholesky", None, 1, True, ["cg"], b"cg"])
def test_check_choice_lists_known_values(value):
    with pytest.raises(ValueError, match=says("solver must be one of 'cholesky', 'cg'; got", repr(value))):
        check_choice("solver", value, ("cholesky", "cg"))


def test_check_choice_distinguishes_equal_values_of_other_types():
    assert check_choice("x", 1, (0, 1)) == 1
    for value in (True, 1.0):
        with pytest.raises(ValueError, match=says("x must be one of 0, 1")):
            check_choice("x", value, (0, 1))


def test_check_choice_takes_numpy_scalars():
    """What a parameter grid made of NumPy arrays holds."""
    for value, known in ((np.str_("cg"), ("lu", "cg")), (np.True_, (0, True)), (np.int8(1), (1,))):
        found = check_choice("x", value, known)
        assert found == value
        assert type(found) is type(known[-1])
    with pytest.raises(ValueError, match=says("x must be one of 0, 1; got True")):
        check_choice("x", np.True_, (0, 1))


def test_check_rng():
    generator = np.random.default_rng(3)
    assert check_rng(generator) is generator
    expected = np.random.default_rng(3).random(4)
    for seed in (3, np.int32(3), np.random.SeedSequence(3)):
        np.testing.assert_array_equal(check_rng(seed).random(4), expected)
    legacy = [check_rng(np.random.RandomState(0)).random(4) for _ in range(2)]
    np.testing.assert_array_equal(*legacy)
    assert not np.array_equal(check_rng(None).random(4), check_rng(None).random(4))
    with pytest.raises(ValueError, match=says("random_state must be >= 0, got -1")):
        check_rng(-1)
    for value in (True, np.True_, 1.5, "0", [1]):
        with pytest.raises(TypeError, match=says("random_state must be None, an integer", repr(value))):
            check_rng(value)


def test_check_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert check_threads(None) == system.available_cores() >= 1
    for text, expected in (("3", 3), ("3,2", 3), (" 5 ", 5), ("0", None), ("-2", None), ("many", None), ("", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert check_threads(None) == (expected or system.available_cores())
    assert check_threads(7) == 7
    for value in (0, -1, 4097):
        with pytest.raises(ValueError, match=says(f"1 <= num_threads <= 4096, got {value}")):
            check_threads(value)
    with pytest.raises(TypeError, match=says("num_threads must be an integer", "2.0")):
        check_threads(2.0)


@pytest.mark.parametrize("text", ["1000000", "²", "9" * 5000], ids=["million", "square", "nines"])
def test_omp_num_threads_stays_in_the_range_of_num_threads(monkeypatch, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert 1 <= check_threads(None) <= 4096


# --------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize(
    ("ids", "kind", "parts"),
    [
        (5, ValueError, ("userid has 5 at position 0; expected 0 <= id < n_users=5",)),
        ([0, 1, -1], ValueError, ("userid has -1 at position 2", "n_users=5")),
        (np.array([2**63], dtype=np.uint64), ValueError, ("userid has 9223372036854775808 at position 0",)),
        (1.0, TypeError, ("userid must be integers", "dtype float64", "Ratings.user_index")),
        ([True, False], TypeError, ("userid must be integers", "dtype bool")),
        (np.True_, TypeError, ("userid must be integers", "dtype bool")),
        (["anna"], TypeError, ("userid must be integers", "dtype <U4", "labels are turned into positions")),
        ([2**70], TypeError, ("userid must be integers", "dtype object")),
        (None, TypeError, ("userid must be integers", "dtype object")),
        ([[0, 1]], ValueError, ("userid must be one position or a vector", "shape (1, 2)")),
        (np.empty((0, 3), dtype=int), ValueError, ("userid must be one position or a vector", "shape (0, 3)")),
    ],
)
def test_check_ids_refuses(ids, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        check_ids("userid", ids, 5, "n_users")


@pytest.mark.parametrize("ids", [3, [3], (3,), np.uint8(3), np.array([3], dtype=np.int16), [4, 0, 4], range(5)])
def test_check_ids_returns_an_int64_vector(ids):
    result = check_ids("userid", ids, 5, "n_users")
    np.testing.assert_array_equal(result, np.atleast_1d(ids))
    assert result.dtype == np.int64


def test_check_ids_takes_empty_vectors_of_any_type():
    for ids in ([], np.empty(0), np.empty(0, dtype=bool)):
        assert check_ids("userid", ids, 5, "n_users").shape == (0,)
        assert check_ids("userid", ids, 5, "n_users").dtype == np.int64


# ---------------------------------------------------------------------------------------------------- hyperparameters


def known(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


COMMON = [
    ("factors", 0, ValueError, "1 <= factors <= 2048, got 0"),
    ("factors", -5, ValueError, "1 <= factors <= 2048, got -5"),
    ("factors", MAX_FACTORS + 1, ValueError, "1 <= factors <= 2048, got 2049"),
    ("factors", True, TypeError, "factors must be an integer, got True of type bool"),
    ("factors", 8.0, TypeError, "factors must be an integer, got 8.0 of type float"),
    ("factors", "8", TypeError, "factors must be an integer, got '8' of type str"),
    ("iterations", 0, ValueError, "iterations must satisfy iterations >= 1, got 0"),
    ("iterations", 2.5, TypeError, "iterations must be an integer, got 2.5"),
    ("iterations", True, TypeError, "iterations must be an integer, got True"),
    ("regularization", -0.1, ValueError, "regularization must be >= 0, got -0.1"),
    ("regularization", NAN, ValueError, "regularization must be finite, got nan"),
    ("regularization", INF, ValueError, "regularization must be finite, got inf"),
    ("regularization", "0.1", TypeError, "regularization must be a real number, got '0.1'"),
    ("regularization", True, TypeError, "regularization must be a real number, got True"),
    ("regularization_scaling", "degree", ValueError, "one of 'none', 'count'; got 'degree'"),
    ("regularization_scaling", -1.0, ValueError, "regularization_scaling must be >= 0, got -1"),
    ("regularization_scaling", NAN, ValueError, "regularization_scaling must be finite, got nan"),
    ("solver", "lu", ValueError, f"solver must be one of {known(SOLVERS)}; got 'lu'"),
    ("solver", None, ValueError, f"solver must be one of {known(SOLVERS)}; got None"),
    (
        "device",
        "gpu",
        ValueError,
        'or a list such as ["cuda:0", "cuda:1"]; got \'gpu\'',
    ),
    (
        "device",
        "cuda:",
        ValueError,
        'or a list such as ["cuda:0", "cuda:1"]; got \'cuda:\'',
    ),
    ("device", "cuda:-1", ValueError, "\"cuda:1\"]; got 'cuda:-1'"),
    ("device", ["cuda:0", "cpu"], ValueError, "device=['cuda:0', 'cpu'] mixes CPU and GPUs"),
    ("device", 0, TypeError, 'or a list such as ["cuda:0", "cuda:1"], got int 0'),
    ("assembly", "fast", ValueError, f"assembly must be one of {known(ASSEMBLIES)}; got 'fast'"),
    ("assembly", "mo_als", ValueError, "assembly='mo_als' is a GPU's; on device=\"cpu\" use one of simd, rank1"),
    ("assembly", "sparse_syrk", ValueError, "assembly='sparse_syrk' is a GPU's; on device=\"cpu\" use one of"),
    ("assembly", "fused", ValueError, "assembly='fused' is a GPU's; on device=\"cpu\" use one of"),
    ("gpu_memory_limit", "much", ValueError, 'gpu_memory_limit must be a size such as "6GB"'),
    ("gpu_memory_limit", -1, ValueError, "a number of bytes, got -1"),
    ("reorder", "degree", ValueError, f"reorder must be one of {known(REORDERINGS)}; got 'degree'"),
    ("reorder", 1, ValueError, f"reorder must be one of {known(REORDERINGS)}; got 1"),
    ("precision", "fp32", ValueError, f"precision must be one of {known(PRECISIONS)}; got 'fp32'"),
    ("dtype", "float16", ValueError, "dtype must be one of 'float32', 'float64'; got 'float16'"),
    ("dtype", np.int32, ValueError, "dtype must be one of 'float32', 'float64'; got 'int32'"),
    ("cg_steps", 0, ValueError, "1 <= cg_steps <= 10000, got 0"),
    ("cg_steps", 3.0, TypeError, "cg_steps must be an integer, got 3.0"),
    ("block_size", 0, ValueError, "1 <= block_size <= 2048, got 0"),
    ("block_size", 8.0, TypeError, "block_size must be an integer, got 8.0"),
    ("num_threads", 0, ValueError, "1 <= num_threads <= 4096, got 0"),
    ("num_threads", True, TypeError, "num_threads must be an integer, got True"),
    ("random_state", -1, ValueError, "random_state must be >= 0, got -1"),
    ("random_state", 0.5, TypeError, "random_state must be None, an integer"),
]
EXPLICIT = [("biases", 1, TypeError, "biases must be True or False, got 1 of type int")]
IMPLICIT = [
    ("alpha", -1.0, ValueError, "alpha must be >= 0, got -1"),
    ("alpha", NAN, ValueError, "alpha must be finite, got nan"),
    ("unobserved_weight", -0.5, ValueError, "unobserved_weight must be >= 0, got -0.5"),
    ("unobserved_weight", INF, ValueError, "unobserved_weight must be finite, got inf"),
]


@pytest.mark.parametrize(
    ("cls", "name", "value", "kind", "message"),
    [(hmf.ExplicitALS, *case) for case in COMMON + EXPLICIT] + [(hmf.ImplicitALS, *case) for case in COMMON + IMPLICIT],
)
def test_fit_refuses_bad_hyperparameters(cls, name, value, kind, message):
    model = cls(**{"device": "cpu", name: value})  # the constructor only stores
    with pytest.raises(kind, match=says(message)):
        model.fit(planted())
    assert not hasattr(model, "n_iter_")


@pytest.mark.parametrize("dtype", ["float64", np.float64, np.dtype("float64"), float])
def test_dtype_may_be_a_name_or_a_type(dtype):
    model = hmf.ExplicitALS(biases=False, factors=2, iterations=1, dtype=dtype, device="cpu").fit(planted())
    assert model.user_factors_.dtype == np.float64
    assert model.user_factors.dtype == np.float32


ABSTRACT = pytest.param(
    np.floating,
    marks=pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.4.0", reason="a deprecated name of float64"),
)


@pytest.mark.parametrize("dtype", [None, 3.5, [], {"names": 3}, ABSTRACT, list])
def test_dtype_that_is_no_type_is_refused_by_name(dtype):
    with pytest.raises(ValueError, match=says("dtype must be one of 'float32', 'float64'; got")):
        hmf.ExplicitALS(biases=False, factors=2, iterations=1, dtype=dtype, device="cpu").fit(planted())


def test_reorder_takes_numpy_booleans():
    hmf.ExplicitALS(biases=False, factors=2, iterations=1, reorder=np.True_, device="cpu").fit(planted())


def test_cg_steps_beyond_c_int_is_refused():
    with pytest.raises(ValueError, match="cg_steps"):
        hmf.ExplicitALS(biases=False, factors=2, iterations=1, solver="cg", cg_steps=2**31, device="cpu").fit(planted())


@pytest.mark.parametrize(
    ("argument", "kind", "message"),
    [
        ({"callback": 3}, TypeError, "callback must be callable, got int"),
        ({"show_progress": 1}, TypeError, "show_progress must be True or False, got 1 of type int"),
        ({"validation": sp.csr_array((60, 40))}, RatingsError, "validation of shape (60, 40) has no entries"),
        ({"validation": planted().T}, RatingsError, "validation has shape (40, 60); expected (n_users=60, n_items=40)"),
        ({"validation": np.ones(3)}, RatingsError, "validation must be a sparse or dense matrix"),
    ],
)
def test_fit_refuses_bad_arguments(argument, kind, message):
    with pytest.raises(kind, match=says(message)):
        hmf.ExplicitALS(biases=False, factors=2, device="cpu").fit(planted(), **argument)
