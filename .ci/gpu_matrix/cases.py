"""The cases: which fits run, on which data, and how each is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

RANKS = (
    8,
    16,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    80,
    81,
    95,
    96,
    97,
    100,
    104,
    111,
    112,
    113,
    120,
    126,
    127,
    128,
    129,
    160,
    256,
)
"""Borders of 16 x 16 blocks and of the kernels (64, 80, 96, 128), and both sides of each; a bias adds one unknown."""

FUSED_RANK = 128
"""Unknowns up to which kernels on tensor cores, and so all precisions, serve a fit."""

PRECISIONS = ("float32", "bf16x3", "tf32", "bf16", "float16")
MODELS = ("implicit", "explicit", "biased")
ASSEMBLIES = ("sparse_syrk", "mo_als", "bals")
VARIANTS = ("sparse_syrk_published", "bals_local", "mo_als_global", "mo_als_uncached", "mo_als_plain")
SHAPES = ("ml-20m", "shop")

REGULARIZATION = {"implicit": 0.01, "explicit": 0.05}
BIAS_REGULARIZATION = 0.045
"""Given and not left to the defaults, so that a check knows them without asking the library."""

NOT_REPRODUCIBLE = {"batch_hogwild": "docs/sgd.md: warps update without synchronization"}
"""Schedules whose results differ from run to run, and where that is documented. All else must repeat its bits."""

NOT_ON_A_GPU = {
    "assembly": ("simd", "rank1", "blas3", "blas3_published"),
    "schedule": ("hogwild", "blocks"),
    "rate_schedule": ("rpcs", "adagrad"),
}
"""Choices of the library that run on the CPU only."""


CG_LIMITS = (0.9, 1.15)
SUBSPACE_LIMITS = (0.8, 2.0)
SGD_LIMITS = {"ml-20m": (0.8, 2.0), "shop": (0.8, 5.0)}
CCD_LIMITS = (0.8, 2.0)
"""Objectives relative to the exact solver's after four iterations.

On the CPU, with a quarter of the sides of both shapes: CG 1.00, subspaces 1.00 to 1.5, CCD++ 1.03 to 1.4, SGD 1.2 to
1.6 on ML-20M's shape and 1.8 to 4.0 on the shop's, whose rows of a few entries the exact solver fits at once. A method
that sums wrong rows or skips some ends elsewhere.
"""


@dataclass(frozen=True)
class Case:
    """One fit, run several times.

    Attributes
    ----------
    family : str
        Part of the name; cases of a family differ in data, model, rank and precision.
    data : str
        Name of a data set.
    model : {"implicit", "explicit", "biased", "sgd", "ccd"}
    factors : int
    options : dict
        Other parameters of the model.
    iterations, fits : int
    check : {"exact", "nonnegative", "objective"}
        "exact": residuals of the normal equations; "nonnegative": conditions of the minimum under the constraint;
        "objective": the objective beside that of the exact solver, by `limits`.
    limits : (float, float)
        Smallest and largest objective relative to the exact solver's after as many iterations.
    prepared : bool
        Whether fits share ratings that are on the GPU; otherwise each one uploads its own.
    seconds : float
        After which the case counts as hanging.
    """

    family: str
    data: str
    model: str
    factors: int
    options: dict[str, Any] = field(default_factory=dict)
    iterations: int = 2
    fits: int = 2
    check: str = "exact"
    limits: tuple[float, float] = (0.0, 0.0)
    prepared: bool = True
    seconds: float = 120.0

    @property
    def label(self) -> str:
        """The name without the rank."""
        return " ".join([self.family, self.model, *(f"{k}={v}" for k, v in self.options.items()), self.data])

    @property
    def name(self) -> str:
        """Unique name."""
        return f"{self.label} f={self.factors}"

    @property
    def group(self) -> tuple[str, str, int]:
        """Cases of a group share most kernels, so one process runs them in turn and compiles each kernel once."""
        return (self.family, self.model, self.factors)

    @property
    def upload(self) -> tuple[bool, str, str]:
        """Which ratings on the GPU it uses."""
        return (self.prepared, self.data, self.options.get("dtype", "float32"))

    @property
    def feedback(self) -> str:
        """Kind of ratings that the model takes."""
        return "implicit" if self.model == "implicit" else "explicit"

    @property
    def biases(self) -> bool:
        """Whether the model has biases."""
        return self.model == "biased" or bool(self.options.get("biases"))

    @property
    def reproducible(self) -> bool:
        """Whether every run gives the same bits."""
        return self.options.get("schedule") not in NOT_REPRODUCIBLE

    @property
    def precision(self) -> str:
        """Name of the arithmetic that bounds the residual."""
        return "float64" if self.options.get("dtype") == "float64" else self.options.get("precision", "float32")

    @property
    def cost(self) -> float:
        """Rough relative cost, to balance parts: factor updates, more for methods that need many launches or fits."""
        weight = {"shop": 0.5, "ml-20m": 1.0}.get(self.data, 1.0)
        slow = 3.0 if self.check == "objective" or self.options.get("dtype") == "float64" else 1.0
        return weight * slow * (1.0 + self.factors / 64)

    def parameters(self) -> dict[str, Any]:
        """All parameters of the model, apart from the device."""
        given = {"factors": self.factors, "iterations": self.iterations, "random_state": 0, **self.options}
        given["regularization"] = REGULARIZATION[self.feedback]
        if self.model != "implicit":
            given["biases"] = self.biases
        if self.biases:
            given["bias_regularization"] = BIAS_REGULARIZATION
        return given

    def exact(self) -> Case:
        """The exact fit whose objective this one's is compared with."""
        model = "biased" if self.biases else self.feedback
        return Case("exact", self.data, model, self.factors, iterations=self.iterations)

    def as_json(self) -> dict[str, Any]:
        """Fields, for a pipe."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Case:
        """The case of `as_json`."""
        return cls(**{**found, "limits": tuple(found["limits"])})


def _unknowns(model: str, factors: int) -> int:
    return factors + (model == "biased")


def _exact() -> Iterator[Case]:
    for factors, model, precision, data in product(RANKS, MODELS, PRECISIONS, SHAPES):
        if precision == "float32" or _unknowns(model, factors) <= FUSED_RANK:
            yield Case("exact", data, model, factors, {"precision": precision})


def _forms() -> Iterator[Case]:
    """Rows in one form only, uploads by each fit, objectives with other weights: kernels that defaults leave out."""
    for factors, model, form in product((33, 64, 100, 127), MODELS, ("primal", "dual")):
        yield Case("exact", "shop", model, factors, {"row_form": form})
    for factors, model in product((64, 127), MODELS):
        yield Case("uploaded", "ml-20m", model, factors, prepared=False)
    for factors in (32, 127):
        yield Case("exact", "ml-20m", "implicit", factors, {"unobserved_weight": 2.0})
        yield Case(
            "exact", "ml-20m", "implicit", factors, {"unobserved_weight": 0.1, "regularization_scaling": "count"}
        )
        yield Case("exact", "shop", "biased", factors, {"regularization_scaling": "none"})


def _cg() -> Iterator[Case]:
    """Three steps from the factors before: close to the exact solver once these are."""
    for factors, model, data in product((16, 32, 33, 64, 80, 81, 100, 112, 127, 128, 160), MODELS, SHAPES):
        yield Case("cg", data, model, factors, {"solver": "cg"}, 4, check="objective", limits=CG_LIMITS)
    for factors, model, precision in product((48, 100, 127), MODELS, PRECISIONS[1:]):
        options = {"solver": "cg", "precision": precision}
        yield Case("cg", "ml-20m", model, factors, options, 4, check="objective", limits=CG_LIMITS)


def _subspace() -> Iterator[Case]:
    for factors, block, model, data in product((64, 128, 160, 256), (32, 64), MODELS, SHAPES):
        if block < factors:
            options = {"solver": "subspace", "block_size": block}
            yield Case("subspace", data, model, factors, options, 4, check="objective", limits=SUBSPACE_LIMITS)
    for precision, model in product(PRECISIONS[1:], MODELS):
        options = {"solver": "subspace", "block_size": 32, "precision": precision}
        yield Case("subspace", "ml-20m", model, 128, options, 4, check="objective", limits=SUBSPACE_LIMITS)


def _nonnegative() -> Iterator[Case]:
    for factors, model, data in product((16, 33, 64, 100, 128), MODELS, SHAPES):
        yield Case("exact", data, model, factors, {"nonnegative": True}, check="nonnegative")


def _float64() -> Iterator[Case]:
    for factors, model, data in product((16, 33, 64, 100, 128), MODELS, SHAPES):
        yield Case("exact", data, model, factors, {"dtype": "float64"})
    for factors, model in product((32, 100), MODELS):
        options = {"solver": "cg", "dtype": "float64"}
        yield Case("cg", "shop", model, factors, options, 4, check="objective", limits=CG_LIMITS)
        options = {"solver": "subspace", "block_size": 16, "dtype": "float64"}
        yield Case("subspace", "shop", model, factors, options, 4, check="objective", limits=SUBSPACE_LIMITS)


def _published() -> Iterator[Case]:
    kinds = [*product(ASSEMBLIES, (8, 32, 65, 100)), *product(VARIANTS, (16, 65))]  # variants are slow at high ranks
    for (assembly, factors), model, data in product(kinds, MODELS, SHAPES):
        prepared = not assembly.startswith("bals")  # tiles are cut on the host
        yield Case("exact", data, model, factors, {"assembly": assembly}, prepared=prepared)


def _sgd() -> Iterator[Case]:
    def case(data: str, factors: int, **options: Any) -> Case:
        return Case("sgd", data, "sgd", factors, options, 4, check="objective", limits=SGD_LIMITS[data], prepared=False)

    for factors, biases, data in product((7, 16, 33, 64, 128, 200, 256), (False, True), SHAPES):
        yield case(data, factors, schedule="msgd", biases=biases)
    for ordering, biases, factors in product(("user", "item", "crossed"), (False, True), (32, 100)):
        yield case("ml-20m", factors, schedule="msgd", ordering=ordering, biases=biases)
    for factors, biases in product((32, 100, 128), (False, True)):
        yield case("ml-20m", factors, schedule="msgd", precision="float16", biases=biases)
    for factors, precision, biases in product((32, 128), ("float32", "float16"), (False, True)):
        yield case("ml-20m", factors, schedule="batch_hogwild", precision=precision, biases=biases)
    for rates in ("geometric", "constant"):
        yield case("ml-20m", 32, schedule="msgd", rate_schedule=rates)
        yield case("ml-20m", 32, schedule="batch_hogwild", rate_schedule=rates)
    for biases in (False, True):
        yield case("ml-20m", 64, schedule="msgd", dtype="float64", biases=biases)


def _ccd() -> Iterator[Case]:
    for factors, biases, data in product((8, 32, 65), (False, True), SHAPES):
        yield _ccd_case(data, factors, biases=biases)
    for biases in (False, True):
        yield _ccd_case("ml-20m", 16, inner_iterations=2, biases=biases)
        yield _ccd_case("ml-20m", 16, nonnegative=True, biases=biases)
        yield _ccd_case("ml-20m", 16, dtype="float64", biases=biases)


def _ccd_case(data: str, factors: int, **options: Any) -> Case:
    return Case("ccd", data, "ccd", factors, options, 4, check="objective", limits=CCD_LIMITS, prepared=False)


def matrix() -> list[Case]:
    """All kinds of fits on ML-20M's shape and the shop's."""
    families = (_exact, _forms, _cg, _subspace, _nonnegative, _float64, _published, _sgd, _ccd)
    return [case for family in families for case in family()]


def netflix() -> list[Case]:
    """The warpgroup kernel at its borders and one rank below, ten fits of ten iterations each; ranks of the systems."""
    return [
        Case("exact", "netflix", model, rank - (model == "biased"), {"precision": precision}, 10, 10, seconds=300.0)
        for rank, model, precision in product(
            (96, 97, 112, 113, 127, 128), ("implicit", "biased"), ("float32", "bf16x3")
        )
    ]


SETS = {"matrix": matrix, "netflix": netflix}


def groups_of(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases by group, the most expensive group first; those that share ratings on the GPU come together."""
    found: dict[tuple[str, str, int], list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    ordered = [sorted(group, key=lambda case: case.upload) for group in found.values()]
    return sorted(ordered, key=lambda group: -sum(case.cost for case in group))


def part_of(cases: Sequence[Case], number: int, parts: int) -> list[Case]:
    """Part `number` (from 1) of `parts` of about equal cost; groups stay together."""
    return [case for group in groups_of(cases)[number - 1 :: parts] for case in group]
