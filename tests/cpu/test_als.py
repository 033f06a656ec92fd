"""Half sweeps and fits against the float64 reference, over shapes that hurt, and the laws every solver keeps."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import cython_blas, cython_lapack

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective, State
from hybridmf.core.validate import as_csr, seed_of
from hybridmf.cpu.als import HalfSweep, WeightedGram, objective_value
from hybridmf.errors import NonFiniteError, NotPositiveDefiniteError
from hybridmf.model.learned import scale_of
from hybridmf.native import _als
from hybridmf.native.status import check_status
from hybridmf.plan.start import initial_state
from support import reference
from support.half_sweeps import OBJECTIVES, dense_system, plan_for, random_factors, relative_error
from support.marks import exhaustive, mostly_exhaustive
from support.ratings import planted

EXACT = ("simd", "rank1", "blas3", "blas3_published", "bals")


def given_of(matrix, objective, rank, dtype):
    """What a half sweep starts from: entries, factors of the other side, mean."""
    matrix = as_csr(matrix, dtype=dtype, drop_zeros=objective.is_implicit)
    fixed = random_factors(matrix.shape[1], rank, dtype, objective.biases)
    return matrix, fixed, float(matrix.data.mean()) if objective.biases and matrix.nnz else 0.0


def solved_by(matrix, objective, rank, dtype="float32", start=None, **given):
    matrix, fixed, mean = given_of(matrix, objective, rank, dtype)
    plan = plan_for(objective, matrix.shape, matrix.nnz, rank=rank, dtype=dtype, **given)
    return HalfSweep("user", matrix, objective, plan).solve(fixed, mean, start)


def exact_of(matrix, objective, rank, dtype="float32"):
    """The reference's answer, row by row in Python: for all assemblies once."""
    matrix, fixed, mean = given_of(matrix, objective, rank, dtype)
    return reference.half_sweep(matrix.astype(np.float64), fixed, mean, objective)


def solve(matrix, objective, rank, dtype="float32", start=None, **given):
    return solved_by(matrix, objective, rank, dtype, start, **given), exact_of(matrix, objective, rank, dtype)


# --------------------------------------------------------------------------------------------------- half sweeps


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_half_sweep_is_the_references(name, dtype):
    expected = exact_of(planted(), OBJECTIVES[name], 7, dtype)
    tolerance = 2e-4 if dtype == "float32" else 1e-11
    for assembly in EXACT:
        solved = solved_by(planted(), OBJECTIVES[name], 7, dtype, assembly=assembly)
        assert relative_error(solved.matrix, expected.matrix) < tolerance, assembly
        if expected.bias is not None:
            assert relative_error(solved.bias, expected.bias) < tolerance, assembly
        assert solved.matrix.dtype == dtype
        assert solved.matrix.flags.c_contiguous


@pytest.mark.parametrize(
    "rank", mostly_exhaustive((1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128), (1, 15, 16, 17, 33, 65))
)
@pytest.mark.parametrize("name", ["explicit", "implicit"])
def test_ranks(rank, name):
    expected = exact_of(planted(30, 50), OBJECTIVES[name], rank, "float64")
    for assembly in EXACT:
        solved = solved_by(planted(30, 50), OBJECTIVES[name], rank, "float64", assembly=assembly)
        assert relative_error(solved.matrix, expected.matrix) < 1e-9, assembly


@pytest.mark.parametrize("entries", [1, 3, 4, 5, 255, 256, 257, 511, 512, 513])
def test_row_lengths_around_the_gather_buffer(entries):
    """One row of each length beside short ones: GATHER_ROWS minus one, exact, plus one."""
    assert _als.GATHER_ROWS == 256
    rng = np.random.default_rng(entries)
    dense = np.zeros((4, 600))
    dense[0, :entries] = rng.integers(1, 6, entries)
    dense[2, [1, 599]] = 4
    for name in ("explicit", "implicit-heavy"):
        expected = exact_of(dense, OBJECTIVES[name], 6, "float64")
        for assembly in EXACT:
            solved = solved_by(dense, OBJECTIVES[name], 6, "float64", assembly=assembly)
            assert relative_error(solved.matrix, expected.matrix) < 1e-9, assembly
            assert not solved.matrix[[1, 3]].any()


LONG_ROWS = list(
    product(("explicit", "explicit-biases", "implicit", "implicit-heavy"), (32768, 32769, 40961, 524288, 524289))
)


@pytest.mark.parametrize(
    ("name", "entries"),
    mostly_exhaustive(LONG_ROWS, [case for case in LONG_ROWS if case[0] == "explicit-biases" or case[1] == 32769]),
)
def test_long_rows_are_shared_by_threads(name, entries):
    """Rows around LONG_ROW and around the longest with segments of the usual size, beside an empty and a short one."""
    assert _als.LONG_ROW == 32768
    rng = np.random.default_rng(entries)
    columns = np.concatenate([np.arange(entries), [3], np.arange(0, entries, 2)])
    matrix = sp.csr_array(
        (
            rng.integers(1, 6, len(columns)).astype(np.float64),
            columns,
            [0, entries, entries, entries + 1, len(columns)],
        ),
        shape=(4, entries + 1),
    )
    objective = OBJECTIVES[name]
    plan = plan_for(objective, matrix.shape, matrix.nnz, rank=3, dtype="float64", num_threads=2)
    fixed = random_factors(entries + 1, 3, np.float64, objective.biases)
    half = HalfSweep("user", as_csr(matrix, dtype=np.float64), objective, plan)
    solved = half.solve(fixed, 3.0 if objective.biases else 0.0)
    expected = reference.half_sweep(matrix, fixed, 3.0 if objective.biases else 0.0, objective)
    assert relative_error(solved.matrix, expected.matrix) < 1e-9
    one = HalfSweep("user", as_csr(matrix, dtype=np.float64), objective, plan.changed(num_threads=1))
    np.testing.assert_array_equal(one.solve(fixed, 3.0 if objective.biases else 0.0).matrix, solved.matrix)


def test_waves_of_long_rows_cover_every_entry_once():
    lengths = np.array([8192 * 63, 40_000, 33_000, 8192 * 200, 32_769])
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    waves = _als.long_row_waves(indptr, np.arange(5))
    assert all(len(wave) <= _als.SEGMENTS for wave in waves)
    segments = np.concatenate(waves)
    assert segments[:, 2].sum() == lengths.sum()
    np.testing.assert_array_equal(segments[1:, 1], (segments[:, 1] + segments[:, 2])[:-1])
    for wave, later in pairwise(waves):
        assert wave[-1, 0] != later[0, 0]  # whole rows in a wave
    assert _als.long_row_waves(indptr, np.empty(0, dtype=np.int64)) == []


@pytest.mark.parametrize("rank", [exhaustive(511), exhaustive(512), 513])
def test_ranks_around_the_switch_to_lapack(rank):
    assert _als.OWN_CHOLESKY_RANK == 512
    for dtype, tolerance in (("float64", 1e-8), ("float32", 1e-2)):
        solved, expected = solve(planted(6, 40, 0.5), OBJECTIVES["implicit-count"], rank, dtype)
        assert relative_error(solved.matrix, expected.matrix) < tolerance
    singular = replace(OBJECTIVES["explicit"], regularization=0.0)
    with pytest.raises(NotPositiveDefiniteError):
        solve(planted(6, 40, 0.5), singular, rank, "float64")


def test_level_3_blas_as_printed():
    """Rows longer than a workspace, 200 of a thread at a time, in the given order; weights of both signs."""
    matrix = planted(450, 400, 0.6, seed=2)
    for name in ("explicit", "implicit-heavy"):
        solved, expected = solve(matrix, OBJECTIVES[name], 9, "float64", assembly="blas3_published")
        assert relative_error(solved.matrix, expected.matrix) < 1e-11
        negative = replace(OBJECTIVES[name], unobserved_weight=1.2) if name != "explicit" else OBJECTIVES[name]
        solved, expected = solve(matrix, negative, 9, "float64", assembly="blas3_published")
        assert relative_error(solved.matrix, expected.matrix) < 1e-9
    objective = OBJECTIVES["explicit"]
    orders = {}
    for assembly in ("blas3", "blas3_published"):
        plan = plan_for(objective, matrix.shape, matrix.nnz, rank=9, assembly=assembly)
        assert f"assembly {assembly}" in str(plan)
        orders[assembly] = HalfSweep("user", as_csr(matrix), objective, plan)._order()[0]
    np.testing.assert_array_equal(orders["blas3_published"], np.arange(450))
    assert not np.array_equal(orders["blas3"], orders["blas3_published"])


def test_another_blas():
    """Each of the functions is called, and SciPy's are back afterwards."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    libraries = {"syrk": cython_blas, "gemm": cython_blas, "potrf": cython_lapack, "potrs": cython_lapack}
    addresses = {}
    for name, library in libraries.items():
        for kind in "sd":
            capsule = library.__pyx_capi__[kind + name]
            addresses[kind + name] = pointer(capsule, name_of(capsule))
    sizes = {"syrk": 10, "gemm": 13, "potrf": 5, "potrs": 8}
    matrix, objective = planted(), OBJECTIVES["explicit"]
    expected = {}
    for assembly, dtype in product(("blas3", "blas3_published"), ("float32", "float64")):
        expected[assembly, dtype] = solved_by(matrix, objective, 7, dtype, assembly=assembly).matrix
    try:
        for assembly, dtype in expected:
            called = set()

            def spy(name, called=called):
                real = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * sizes[name[1:]])(addresses[name])

                def through(*arguments):
                    called.add(name)
                    real(*arguments)

                return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * sizes[name[1:]])(through)

            spies = {name: spy(name) for name in addresses}
            _als.use_blas({name: ctypes.cast(each, ctypes.c_void_p).value for name, each in spies.items()})
            got = solved_by(matrix, objective, 7, dtype, assembly=assembly, num_threads=1).matrix
            np.testing.assert_array_equal(got, expected[assembly, dtype])
            kind, multiplied = "s" if dtype == "float32" else "d", "syrk" if assembly == "blas3" else "gemm"
            assert called == {kind + name for name in (multiplied, "potrf", "potrs")}
    finally:
        _als.use_blas(None)
    np.testing.assert_array_equal(
        solved_by(matrix, objective, 7, assembly="blas3").matrix, expected["blas3", "float32"]
    )


@pytest.mark.parametrize("tiles", [(1, 1), (1, 1000), (3, 7), (59, 39), (60, 40), (61, 41), (1000, 1)])
@pytest.mark.parametrize("name", ["explicit-biases", "implicit"])
def test_bals_tile_sizes_do_not_matter(tiles, name):
    solved, expected = solve(planted(), OBJECTIVES[name], 5, "float64", assembly="bals", tiles=tiles)
    assert relative_error(solved.matrix, expected.matrix) < 1e-10


@pytest.mark.parametrize("name", ["explicit", "explicit-biases", "explicit-damped", "implicit", "implicit-heavy"])
def test_float32_error_is_near_plain_numpys(name):
    """Tolerance is earned: within a few times of float32 NumPy solving the same systems."""
    objective = OBJECTIVES[name]
    matrix = planted(80, 120, 0.4)
    solved, expected = solve(matrix, objective, 16, assembly="blas3")
    # NumPy in float32: A and b summed and solved as they come
    fixed = random_factors(matrix.shape[1], 16, np.float32, objective.biases)
    mean = float(matrix.data.mean()) if objective.biases else 0.0
    plain = np.zeros_like(solved.matrix)
    for row in range(matrix.shape[0]):
        columns, values = (
            matrix.indices[slice(*matrix.indptr[row : row + 2])],
            matrix.data[slice(*matrix.indptr[row : row + 2])],
        )
        if not len(columns):
            continue
        design = (
            fixed.matrix if not objective.biases else np.column_stack([fixed.matrix, np.ones(len(fixed), np.float32)])
        )
        confidence, target = reference._weights(objective, values)
        if objective.biases:
            target = target - np.float32(mean) - fixed.bias[columns]
        weight = np.full(len(design), objective.unobserved_weight if objective.is_implicit else 0, np.float32)
        weight[columns] = confidence
        ridge = np.full(
            design.shape[1], objective.regularization.user * len(columns) ** objective.scaling.user, np.float32
        )
        ridge[16:] = objective.bias_regularization.user * len(columns) ** objective.scaling.user
        A = design.T @ (weight[:, None] * design) + np.diag(ridge)
        plain[row] = np.linalg.solve(A, design[columns].T @ (confidence * target).astype(np.float32))[:16]
    assert relative_error(solved.matrix, expected.matrix) < 8 * relative_error(plain, expected.matrix) + 1e-7


def test_large_values_keep_their_accuracy():
    """Play counts up to 350,000 beside 1: weights over six orders of magnitude."""
    rng = np.random.default_rng(0)
    matrix = planted(40, 30, 0.3)
    matrix.data = np.ceil(10 ** rng.uniform(0, 5.5, matrix.nnz)).astype(np.float32)
    solved, expected = solve(matrix, replace(OBJECTIVES["implicit"], alpha=1.0), 8)
    assert relative_error(solved.matrix, expected.matrix) < 1e-3


def test_rows_without_entries_get_zeros_and_zero_bias():
    for name in OBJECTIVES:
        for assembly in EXACT:
            solved = solved_by(planted(), OBJECTIVES[name], 4, assembly=assembly)
            assert not solved.matrix[30].any()
            assert solved.bias is None or solved.bias[30] == 0
    solved = solved_by(planted(), OBJECTIVES["implicit"], 4, solver="cg", start=random_factors(60, 4, np.float32))
    assert not solved.matrix[30].any()


def test_explicit_zeros_are_ratings_but_not_feedback():
    dense = planted().toarray()
    matrix = sp.csr_array(dense)
    matrix.data[:20] = 0
    solved, expected = solve(matrix, OBJECTIVES["explicit"], 4, "float64")
    assert relative_error(solved.matrix, expected.matrix) < 1e-10
    dropped = sp.csr_array(matrix.toarray())
    assert dropped.nnz == matrix.nnz - 20
    kept = solved_by(matrix, OBJECTIVES["implicit"], 4)
    without = solved_by(dropped, OBJECTIVES["implicit"], 4)
    np.testing.assert_array_equal(kept.matrix, without.matrix)


def test_negative_feedback_is_a_confident_dislike():
    matrix = planted()
    matrix.data[::3] *= -1
    solved, expected = solve(matrix, OBJECTIVES["implicit"], 6, "float64")
    assert relative_error(solved.matrix, expected.matrix) < 1e-10


@pytest.mark.parametrize("name", ["explicit", "explicit-biases", "implicit", "implicit-light"])
@pytest.mark.parametrize(("steps", "warm"), [(1, True), (2, False), (3, True), (8, False), (8, True)])
@pytest.mark.parametrize("forms", [0, 100])
@pytest.mark.parametrize("rank", [6, 32])
def test_cg_is_textbook_conjugate_gradients(name, steps, warm, forms, rank, monkeypatch):
    monkeypatch.setattr("hybridmf.cpu.als.CG_FORMS_PER_STEP", forms)  # A never formed; formed for rows beyond the rank
    objective, matrix = OBJECTIVES[name], planted()
    width = rank + objective.biases
    start = random_factors(60, rank, np.float64, objective.biases, seed=5) if warm else None
    solved = solved_by(matrix, objective, rank, "float64", solver="cg", cg_steps=steps, start=start)
    fixed = random_factors(40, rank, np.float64, objective.biases)
    mean = float(as_csr(matrix, dtype=np.float64).data.mean()) if objective.biases else 0.0
    for row in (0, 7, 59):
        A, b = dense_system(matrix, row, fixed, mean, objective)
        first = np.zeros(width)
        if start is not None:
            first = np.append(start.matrix[row], start.bias[row : row + 1] if objective.biases else [])
        expected = reference.conjugate_gradient(A, b, first, steps)
        np.testing.assert_allclose(solved.matrix[row], expected[:rank], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("rank", [1, 8, 16, 19, 64])
def test_cg_with_and_without_the_matrix_of_a_row(name, rank, monkeypatch):
    solved = []
    for forms in (0, 100):
        monkeypatch.setattr("hybridmf.cpu.als.CG_FORMS_PER_STEP", forms)
        solved.append(solved_by(planted(), OBJECTIVES[name], rank, solver="cg", cg_steps=4).matrix)
    assert relative_error(solved[0], solved[1]) < 2e-4
    filled = np.diff(planted().indptr)
    if (filled > rank + OBJECTIVES[name].biases).any() and rank > 1:
        assert (solved[0] != solved[1]).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cg_rows_do_not_depend_on_rows_beside_them(dtype):
    """Rows share products with the Gram matrix, also one that ends at once, since its start is its solution."""
    matrix, rank = planted(), 33
    matrix.data[matrix.indptr[3] : matrix.indptr[4]] *= -1  # disliked items alone: the solution is zero
    start = random_factors(60, rank, dtype, seed=5)
    start.matrix[3] = 0
    together = solved_by(matrix, OBJECTIVES["implicit"], rank, dtype, solver="cg", start=start)
    for row in range(60):
        alone = as_csr(matrix, dtype=np.dtype(dtype))[[row]]
        solved = solved_by(alone, OBJECTIVES["implicit"], rank, dtype, solver="cg", start=start.take(np.array([row])))
        np.testing.assert_array_equal(solved.matrix[0], together.matrix[row])
    assert not together.matrix[3].any()


def test_cg_steps_matter_and_converge_to_the_exact_solution():
    errors = []
    for steps in (1, 2, 4, 40):
        solved, expected = solve(planted(), OBJECTIVES["implicit"], 6, "float64", solver="cg", cg_steps=steps)
        errors.append(relative_error(solved.matrix, expected.matrix))
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-8


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("block", "dtype"), [*((block, "float64") for block in (1, 3, 8, 9, 20)), (3, "float32"), (20, "float32")]
)
def test_subspaces_are_minimized_one_after_another(name, block, dtype):
    """Each block of coordinates is set to its exact minimizer given the others (iALS++), in float64 NumPy."""
    objective, rank = OBJECTIVES[name], 9
    width = rank + objective.biases
    matrix = as_csr(planted(), dtype=dtype)
    start = random_factors(60, rank, dtype, objective.biases, seed=5)
    solved = solved_by(matrix, objective, rank, dtype, solver="subspace", block_size=block, start=start)
    fixed = random_factors(40, rank, dtype, objective.biases)
    mean = float(matrix.data.mean()) if objective.biases else 0.0
    for row in (0, 7, 59):
        A, b = dense_system(matrix, row, fixed, mean, objective)
        x = np.append(start.matrix[row], start.bias[row : row + 1] if objective.biases else []).astype(float)
        for first in range(0, width, block):
            part = slice(first, first + block)
            x[part] += np.linalg.solve(A[part, part], (b - A @ x)[part])
        tolerance = 1e-3 if dtype == "float32" else 1e-8
        np.testing.assert_allclose(solved.matrix[row], x[:rank], rtol=tolerance, atol=tolerance)
    if block >= width:
        exact = exact_of(matrix, objective, rank, dtype)
        np.testing.assert_allclose(solved.matrix, exact.matrix, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cls", [hmf.ImplicitALS, hmf.ExplicitALS])
def test_subspace_fit_lowers_the_loss_every_iteration_towards_the_exact_ones(cls):
    fits = {}
    for solver in ("subspace", "cholesky"):
        model = cls(factors=8, solver=solver, block_size=3, iterations=40, random_state=0, dtype="float64")
        model.fit(planted(), callback=lambda model, record: None)
        fits[solver] = [record["objective"] for record in model.history_]
        assert all(b <= a * (1 + 1e-12) for a, b in pairwise(fits[solver]))
    assert fits["subspace"][-1] == pytest.approx(fits["cholesky"][-1], rel=0.05)


# ------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("cls", [hmf.ImplicitALS, hmf.ExplicitALS])
@pytest.mark.parametrize(
    "options",
    [{}, {"assembly": "rank1"}, {"assembly": "bals"}, {"solver": "cg"}, {"solver": "subspace", "block_size": 4}],
)
def test_thread_count_changes_no_bit(cls, options):
    matrix = planted(300, 200, 0.1)
    fits = [
        cls(factors=9, iterations=3, random_state=0, num_threads=threads, device="cpu", **options).fit(matrix)
        for threads in (1, 2, 5)
    ]
    for other in fits[1:]:
        np.testing.assert_array_equal(fits[0].user_factors_, other.user_factors_)
        np.testing.assert_array_equal(fits[0].item_factors_, other.item_factors_)
        assert fits[0].objective(matrix) == other.objective(matrix)


def test_gram_is_exact_and_the_same_for_any_thread_count():
    factors = np.random.default_rng(0).normal(size=(5000, 33)).astype(np.float32)
    exact = factors.T.astype(np.float64) @ factors.astype(np.float64)
    one, three = _als.gram(factors, 1), _als.gram(factors, 3)
    np.testing.assert_array_equal(one, three)
    np.testing.assert_allclose(one, exact, rtol=1e-13, atol=1e-11)
    np.testing.assert_array_equal(one, one.T)
    assert WeightedGram("user", factors, OBJECTIVES["explicit"], 1).matrix.shape == (0, 0)
    weighted = WeightedGram("user", factors, OBJECTIVES["implicit-heavy"], 1).matrix
    np.testing.assert_allclose(weighted, 3 * exact, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "assembly"),
    [
        (pytest.param if assembly == "simd" or name in ("explicit-biases", "implicit") else exhaustive)(name, assembly)
        for name in OBJECTIVES
        for assembly in EXACT
    ],
)
def test_fit_follows_the_reference_and_the_loss_never_rises(name, assembly):
    objective = OBJECTIVES[name]
    matrix = planted()
    cls = hmf.ImplicitALS if objective.is_implicit else hmf.ExplicitALS
    extra = (
        {"alpha": objective.alpha, "unobserved_weight": objective.unobserved_weight}
        if objective.is_implicit
        else {"biases": objective.biases, "bias_regularization": objective.bias_regularization}
    )
    model = cls(
        factors=4, regularization=objective.regularization, regularization_scaling=objective.scaling, iterations=4,
        assembly=assembly, dtype="float64", random_state=3, device="cpu", **extra,
    )  # fmt: skip
    model.fit(matrix, callback=lambda model, record: None)
    losses = [record["objective"] for record in model.history_]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(losses))
    exact = as_csr(matrix, dtype=np.float64)
    start = initial_state(
        np.diff(exact.indptr), np.bincount(exact.indices, minlength=40), 4, np.float64, objective,
        float(exact.data.mean()), seed_of(3), model._start(objective, scale_of(exact, objective)),
    )  # fmt: skip
    expected = reference.fit(exact, start, objective, 4)
    assert relative_error(model.user_factors_, expected.user.matrix) < 1e-7
    assert relative_error(model.item_factors_, expected.item.matrix) < 1e-7
    np.testing.assert_allclose(losses[-1], reference.objective_value(exact, expected, objective), rtol=1e-10)
    assert model.objective(matrix) == pytest.approx(losses[-1], rel=1e-12)  # bals sums rows in another order


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_is_the_sum_over_all_cells(name):
    objective = OBJECTIVES[name]
    matrix = as_csr(planted(), dtype=np.float32).copy()
    matrix.data[::4] *= -1
    state = State(
        random_factors(60, 5, np.float32, objective.biases, 1), random_factors(40, 5, np.float32, objective.biases, 2),
        0.7 if objective.biases else 0.0,
    )  # fmt: skip
    value = objective_value(
        objective, (matrix.indptr.astype(np.int64), matrix.indices, matrix.data), state,
        np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=40), 2,
    )  # fmt: skip
    np.testing.assert_allclose(value, reference.objective_value(matrix, state, objective), rtol=1e-12)


@pytest.mark.parametrize("cls", [hmf.ImplicitALS, functools.partial(hmf.ExplicitALS, biases=False)])
@pytest.mark.parametrize("assembly", EXACT)
def test_normal_equations_hold_to_rounding(cls, assembly):
    """The gradient of the objective with respect to every user is zero, relative to its terms."""
    matrix = as_csr(planted(), dtype=np.float64)
    model = cls(factors=6, iterations=2, assembly=assembly, dtype="float64", random_state=0, device="cpu").fit(matrix)
    X = model.user_factors_
    for row in (0, 11, 59):
        A, b = dense_system(matrix, row, Factors(model.item_factors_), 0.0, model._learned.objective)
        residual = np.linalg.norm(A @ X[row] - b)
        assert residual <= 6 * 10 * np.finfo(float).eps * np.linalg.norm(A) * np.linalg.norm(X[row])


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from(EXACT), st.booleans())
def test_renaming_users_and_items_renames_the_factors(seed, assembly, implicit):
    rng = np.random.default_rng(seed)
    matrix = planted(20, 15, 0.3, seed=seed % 1000)
    rows, columns = rng.permutation(20), rng.permutation(15)
    renamed = sp.csr_array(matrix[rows][:, columns])
    renamed.sort_indices()
    objective = OBJECTIVES["implicit" if implicit else "explicit"]
    fixed = random_factors(15, 4, np.float64)
    results = []
    for given_matrix, given_fixed in ((matrix, fixed), (renamed, fixed.take(columns))):
        plan = plan_for(objective, (20, 15), matrix.nnz, rank=4, dtype="float64", assembly=assembly)
        half = HalfSweep("user", as_csr(given_matrix, dtype=np.float64), objective, plan)
        results.append(half.solve(given_fixed, 0.0).matrix)
    np.testing.assert_allclose(results[1], results[0][rows], rtol=1e-8, atol=1e-10)


def test_entry_order_within_a_row_is_irrelevant():
    matrix = planted()
    shuffled = matrix.copy()
    rng = np.random.default_rng(0)
    for row in range(60):
        span = slice(*shuffled.indptr[row : row + 2])
        order = rng.permutation(span.stop - span.start)
        shuffled.indices[span], shuffled.data[span] = shuffled.indices[span][order], shuffled.data[span][order]
    shuffled.has_sorted_indices = False
    one, two = (
        hmf.ExplicitALS(biases=False, factors=4, iterations=3, random_state=0).fit(m) for m in (matrix, shuffled)
    )
    np.testing.assert_array_equal(one.user_factors, two.user_factors)


@pytest.mark.parametrize("reorder", ["rows", "columns", "both", True])
@pytest.mark.parametrize("assembly", ["blas3", "bals"])
@pytest.mark.parametrize("biases", [False, True])
def test_reordering_changes_speed_not_results(reorder, assembly, biases):
    options = {"factors": 5, "iterations": 3, "dtype": "float64", "random_state": 0} | {
        "assembly": assembly,
        "biases": biases,
    }
    plain = hmf.ExplicitALS(reorder="none", **options).fit(planted())
    moved = hmf.ExplicitALS(reorder=reorder, **options).fit(planted())
    assert moved.plan_.reorder == ("both" if reorder is True else reorder)
    np.testing.assert_allclose(moved.user_factors_, plain.user_factors_, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(moved.item_factors_, plain.item_factors_, rtol=1e-7, atol=1e-9)
    assert moved.objective(planted()) == pytest.approx(plain.objective(planted()), rel=1e-9)


def test_kernels_can_be_interrupted_between_batches():
    """A plan with small batches solves the same rows in several calls."""
    matrix = as_csr(planted(), dtype=np.float64)
    for assembly in ("blas3", "bals"):
        plan = plan_for(OBJECTIVES["explicit"], matrix.shape, matrix.nnz, rank=4, dtype="float64", assembly=assembly)
        whole = HalfSweep("user", matrix, OBJECTIVES["explicit"], plan)
        pieces = HalfSweep("user", matrix, OBJECTIVES["explicit"], plan.changed(batch_flops=1000.0))
        assert len(list(pieces._batches(pieces.order, pieces.degrees))) > 3
        fixed = random_factors(40, 4, np.float64)
        np.testing.assert_array_equal(whole.solve(fixed, 0.0).matrix, pieces.solve(fixed, 0.0).matrix)


# ------------------------------------------------------------------------------------------------- every parameter


def _fit(cls, **options):
    return cls(**({"factors": 4, "iterations": 3, "random_state": 0, "device": "cpu"} | options)).fit(planted())


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        (hmf.ImplicitALS, {"regularization": 1.0}),
        (hmf.ImplicitALS, {"alpha": 9.0}),
        (hmf.ImplicitALS, {"unobserved_weight": 0.3}),
        (hmf.ImplicitALS, {"regularization_scaling": "count"}),
        (hmf.ImplicitALS, {"regularization_scaling": 0.5}),
        (hmf.ImplicitALS, {"iterations": 4}),
        (hmf.ImplicitALS, {"solver": "cg", "cg_steps": 1}),
        (hmf.ImplicitALS, {"random_state": 1}),
        (hmf.ExplicitALS, {"regularization": 1.0}),
        (hmf.ExplicitALS, {"regularization_scaling": "none"}),
        (hmf.ExplicitALS, {"biases": False}),
        (hmf.ExplicitALS, {"bias_regularization": 5.0}),
        (hmf.ExplicitALS, {"iterations": 4}),
    ],
)
def test_a_changed_parameter_changes_the_answer(cls, change):
    assert relative_error(_fit(cls, **change).item_factors_, _fit(cls).item_factors_) > 1e-3


def test_cg_steps_and_seed_change_the_answer_and_a_seed_repeats_it():
    few, many = (_fit(hmf.ImplicitALS, solver="cg", cg_steps=steps) for steps in (1, 5))
    assert relative_error(few.item_factors_, many.item_factors_) > 1e-3
    np.testing.assert_array_equal(_fit(hmf.ImplicitALS).user_factors, _fit(hmf.ImplicitALS).user_factors)
    free = [_fit(hmf.ImplicitALS, random_state=None).user_factors for _ in range(2)]
    assert not np.array_equal(*free)


def test_float64_starts_from_the_same_bits_and_reports_float32():
    single, double = _fit(hmf.ExplicitALS), _fit(hmf.ExplicitALS, dtype="float64")
    assert single.user_factors_.dtype == np.float32
    assert double.user_factors_.dtype == np.float64
    assert double.user_factors.dtype == np.float32
    assert 0 < relative_error(single.user_factors_, double.user_factors_) < 1e-3


# ------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("assembly", EXACT)
@pytest.mark.parametrize("reorder", ["none", "both"])
def test_a_singular_system_names_side_and_row(assembly, reorder):
    """Item 1 has one entry and two unknowns, so without a penalty its system has a zero second pivot."""
    dense = np.array([[5, 0, 2], [4, 3, 1], [1, 0, 5], [2, 0, 4]], dtype=np.float32)
    model = hmf.ExplicitALS(
        biases=False, factors=2, regularization=0.0, assembly=assembly, reorder=reorder, random_state=0
    )
    with pytest.raises(
        NotPositiveDefiniteError, match=r"item 1 .*leading minor 2.*increase regularization \(now 0\)"
    ) as caught:
        model.fit(dense)
    assert (caught.value.side, caught.value.row, caught.value.minor) == ("item", 1, 2)
    assert isinstance(caught.value, ValueError)
    assert not hasattr(model, "user_factors_")
    model.set_params(regularization=0.01).fit(dense)


def test_cg_reports_negative_curvature():
    """With no penalty and confidence below the unobserved weight's, duplicated factors give an indefinite system."""
    matrix = as_csr(np.ones((3, 3)), dtype=np.float32)
    objective = Objective("implicit", 0.0, alpha=0.0, unobserved_weight=2.0)
    plan = plan_for(objective, matrix.shape, matrix.nnz, rank=2, solver="cg")
    fixed = Factors(np.ones((3, 2), np.float32))
    gram = WeightedGram("user", fixed.matrix, objective, 1)
    gram.matrix = np.full((2, 2), -5.0)
    with pytest.raises(NotPositiveDefiniteError, match=r"user 0 .*negative curvature"):
        HalfSweep("user", matrix, objective, plan).solve(fixed, 0.0, gram=gram)


@pytest.mark.parametrize("scale", [1e-2, 1e-6, 1e-12])
@pytest.mark.parametrize("seed", range(3))
def test_cg_takes_ratings_of_any_scale(scale, seed):
    """Factors may shrink to zero under the penalty; the residual then underflows, which is no negative curvature."""
    matrix = planted()
    matrix.data *= np.float32(scale)
    model = hmf.ExplicitALS(biases=False, factors=4, solver="cg", iterations=30, random_state=seed).fit(matrix)
    assert np.isfinite(model.user_factors).all()


def test_failures_under_reordering_name_the_callers_row():
    matrix = as_csr(planted(), dtype=np.float32)
    plan = plan_for(OBJECTIVES["explicit"], matrix.shape, matrix.nnz, rank=2)
    half = HalfSweep("item", matrix, OBJECTIVES["explicit"], plan, names=np.arange(60)[::-1])
    for code, error in ((_als.NON_FINITE, NonFiniteError), (2, NotPositiveDefiniteError)):
        status = np.zeros(60, dtype=np.int32)
        status[7] = code
        with pytest.raises(error, match="of item 52 "):
            check_status(status, half.side, half.objective, half.names)


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_overflow_is_reported_not_stored(solver):
    matrix = planted()
    matrix.data[:] = 1e38
    model = hmf.ExplicitALS(biases=False, regularization=0.05, factors=3, solver=solver, random_state=0)
    with pytest.raises(NonFiniteError, match=r"infinite or NaN.*scale the ratings down"):
        model.fit(matrix)
    assert not hasattr(model, "user_factors_")
    hmf.ExplicitALS(biases=False, factors=3, solver=solver, random_state=0, dtype="float64").fit(matrix)


# ------------------------------------------------------------------------------------------------ instruction sets


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon", "portable"])
def test_each_instruction_set_gives_the_references_answer(name, monkeypatch):
    if not _als.can_run(name):
        pytest.skip(f"this processor cannot run {name} kernels")
    monkeypatch.setenv("HYBRIDMF_ISA", name)
    assert _als.instruction_set() == name
    for rank in (1, 7, 15, 16, 17, 33):
        expected = exact_of(planted(), OBJECTIVES["implicit-heavy"], rank, "float64")
        for assembly in EXACT:
            solved = solved_by(planted(), OBJECTIVES["implicit-heavy"], rank, "float64", assembly=assembly)
            assert relative_error(solved.matrix, expected.matrix) < 1e-8
        solved, expected = solve(planted(), OBJECTIVES["implicit-count"], rank, "float32")
        assert relative_error(solved.matrix, expected.matrix) < 1e-3
    for solver, options in (("cg", {"cg_steps": 60}), ("subspace", {"block_size": 7})):
        solved, expected = solve(planted(), OBJECTIVES["implicit"], 7, "float64", solver=solver, **options)
        assert relative_error(solved.matrix, expected.matrix) < 1e-6
    model = hmf.ImplicitALS(factors=5, iterations=2, random_state=0).fit(planted())
    assert model.plan_.instruction_set == name


def test_an_unknown_instruction_set_is_noted_and_ignored(monkeypatch):
    best = _als.instruction_set()
    assert not hmf.plan(planted()).notes
    monkeypatch.setenv("HYBRIDMF_ISA", "avx1024")
    assert _als.instruction_set() == best
    assert not _als.can_run("avx1024")
    assert any("HYBRIDMF_ISA='avx1024'" in note and best in note for note in hmf.plan(planted()).notes)
