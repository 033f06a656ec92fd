"""CCD++ on the CPU: against the float64 reference and ALS's minimum, its laws, and the services of a fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Factors, Objective, State
from hybridmf.core.validate import as_csr
from hybridmf.cpu.ccd import CpuCCD, by_column, by_row
from hybridmf.device.cuda import DeviceSpec
from hybridmf.errors import DeviceMemoryError, ModelFileError, NonFiniteError
from hybridmf.formats import transpose
from hybridmf.native import _als, _ccd
from hybridmf.native.arguments import Change, ResidualRows
from hybridmf.plan.als import ALS, for_fold_in
from hybridmf.plan.ccd import CcdMethod
from hybridmf.plan.machine import CpuRates, Machine
from hybridmf.plan.make import make_plan
from hybridmf.plan.start import initial_state
from hybridmf.plan.types import Settings
from support import reference
from support.marks import exhaustive, mostly_exhaustive
from support.ratings import planted
from support.solvers import iterate
from support.states import grown

GPU = DeviceSpec("H200", 0, (9, 0), 132, 227 << 10, 60 << 20, 140 << 30, 140 << 30)
OBJECTIVES = {
    "count": Objective("explicit", 0.05, 1.0),
    "none": Objective("explicit", 0.3, 0.0),
    "half-count": Objective("explicit", 0.1, 0.5),
    "unpenalized": Objective("explicit", 0.0, 1.0),
}
BIASED = {
    f"biased, {lambda_b} n^{nu}": Objective("explicit", 0.1, nu, biases=True, bias_regularization=lambda_b)
    for lambda_b in (0.0, 0.3)
    for nu in (0.0, 0.5, 1.0)
}
ALL_OBJECTIVES = OBJECTIVES | BIASED


def start_of(matrix: sp.csr_array, rank: int, objective: Objective, seed: int = 0) -> State:
    """Where a fit starts; biases that are not zero, so that old ones count too."""
    degrees = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    rng, mean = np.random.default_rng(seed), float(matrix.data.mean())
    state = initial_state(*degrees, rank, matrix.dtype.type, objective, mean, seed).on_host()
    for side in SIDES if objective.biases else ():
        bias = state.side(side).bias
        bias[:] = 0.3 * rng.standard_normal(len(bias))
    return state


def solver_of(matrix, objective, rank, *, threads=2, inner=1, nonnegative=False, **changes) -> CpuCCD:
    method = CcdMethod.check(inner_iterations=inner, nonnegative=nonnegative)
    given = Settings.check(
        factors=rank, dtype=matrix.dtype, num_threads=threads, device="cpu", iterations=1, method=method
    )
    plan = make_plan(objective, given, matrix.shape, matrix.nnz).changed(**changes)
    return CpuCCD(matrix, transpose(matrix), objective, plan, start_of(matrix, rank, objective))


def run(solver: CpuCCD, iterations: int) -> State:
    iterate(solver, iterations)
    return solver.state


def arrays_of(state: State) -> list[np.ndarray]:
    """Factors and biases."""
    sides = [state.side(side) for side in SIDES]
    return [side.matrix for side in sides] + [side.bias for side in sides if side.bias is not None]


def relative_error(state: State, expected: State) -> float:
    assert state.mean == expected.mean
    return max(
        float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        for ours, theirs in zip(arrays_of(state), arrays_of(expected), strict=True)
    )


def assert_same_bits(state: State, other: State) -> None:
    assert state.mean == other.mean
    for one, two in zip(arrays_of(state), arrays_of(other), strict=True):
        np.testing.assert_array_equal(one, two)


def row_of_entries(entries: int, dtype) -> sp.csr_array:
    """A row with the given number of entries between two short ones, and no other entry in most columns."""
    rng = np.random.default_rng(entries)
    dense = np.zeros((4, entries + 3), dtype=dtype)
    dense[0, 2::7], dense[1, :entries], dense[3, :5] = 2.0, rng.uniform(1, 5, entries), 3.0
    return as_csr(sp.csr_array(dense), dtype=dtype)


# ------------------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("name", ALL_OBJECTIVES)
@pytest.mark.parametrize(
    ("inner", "nonnegative"),
    [(2, False), (2, True), (1, False), (5, True), exhaustive(1, True), exhaustive(5, False)],
)
def test_fit_is_the_references(name, inner, nonnegative):
    objective = ALL_OBJECTIVES[name]
    # without a penalty some coordinates are quotients of tiny numbers; where the mean is taken off, residuals and hence
    # coordinates are smaller than the ratings whose rounding they carry
    in_float32 = 1e-3 if name == "unpenalized" else 5e-4 if objective.biases else 1e-4
    for dtype, tolerance in (("float64", 1e-10), ("float32", in_float32)):
        matrix = as_csr(planted(), dtype=dtype)
        solver = solver_of(matrix, objective, 5, inner=inner, nonnegative=nonnegative)
        expected = reference.ccd(matrix, solver.state, objective, 2, inner, nonnegative)
        state = run(solver, 2)
        assert relative_error(state, expected) < tolerance
        assert state.user.matrix.flags.c_contiguous and state.user.matrix.dtype == dtype


@pytest.mark.parametrize("rank", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.parametrize("name", ["count", "biased, 0.3 n^1.0"])
def test_ranks(rank, name):
    matrix = as_csr(planted(), dtype=np.float64)
    solver = solver_of(matrix, ALL_OBJECTIVES[name], rank)
    expected = reference.ccd(matrix, solver.state, solver.objective, 2)
    assert relative_error(run(solver, 2), expected) < 1e-10


@pytest.mark.parametrize("entries", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 511, 512, 513, 520, 1030])
def test_row_lengths_around_vectors_and_blocks(entries):
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        matrix = row_of_entries(entries, dtype)
        solver = solver_of(matrix, OBJECTIVES["none"], 3)
        expected = reference.ccd(matrix, solver.state, solver.objective, 2)
        assert relative_error(run(solver, 2), expected) < tolerance


LONG_ROWS = list(product((16383, 16384, 16385, 32768, 32769), ("user", "item"), ("none", "biased, 0.3 n^0.0")))


@pytest.mark.parametrize(
    ("entries", "side", "name"),
    mostly_exhaustive(LONG_ROWS, [case for case in LONG_ROWS if case[1:] == LONG_ROWS[1][1:] or case[0] == 16385]),
)
def test_long_rows_are_shared_by_threads(entries, side, name):
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-4)):
        matrix = row_of_entries(entries, dtype)
        matrix = matrix if side == "user" else transpose(matrix)
        first = solver_of(matrix, ALL_OBJECTIVES[name], 2, threads=1, inner=2)
        assert len(first.halves[side].rows.segments) == (0 if entries <= _ccd.LONG_ROW else -(-entries // _ccd.SEGMENT))
        expected = reference.ccd(matrix, first.state, first.objective, 2, 2)
        state = run(first, 2)
        assert relative_error(state, expected) < tolerance
        others = solver_of(matrix, first.objective, 2, threads=3, inner=2)
        assert_same_bits(state, run(others, 2))


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon", "portable"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("objective", ["count", "biased, 0.3 n^0.5"])
def test_each_instruction_set(name, dtype, objective, monkeypatch):
    """Each gives the reference's answer, and keeps both copies of the residual equal to the last bit."""
    if not _als.can_run(name):
        pytest.skip(f"this processor cannot run {name} kernels")
    monkeypatch.setenv("HYBRIDMF_ISA", name)
    matrix = as_csr(planted(300, 200, 0.4), dtype=dtype)
    solver = solver_of(matrix, ALL_OBJECTIVES[objective], 6, inner=2)
    assert solver.plan.instruction_set == name
    expected = reference.ccd(matrix, solver.state, solver.objective, 2, 2)
    state = run(solver, 2)
    assert relative_error(state, expected) < (1e-10 if dtype == "float64" else 1e-4)

    items = solver.halves["item"]
    # the product of the last factor is still pending in the columns: coordinates of zero add nothing back
    catch_up = np.zeros(len(items.degrees), dtype=dtype)
    pairs = np.ascontiguousarray(np.column_stack([state.user.matrix[:, -1], state.user.matrix[:, 0]]))
    own, pending = np.zeros((len(catch_up), 2), dtype=dtype), np.ascontiguousarray(state.item.matrix[:, -1])
    change, workspace = Change(_ccd.CATCH_UP, pending, pending[:0]), np.zeros((1, _ccd.LONG_ROW), dtype=dtype)
    _ccd.update(catch_up, own, pairs, items.rows, change, items.ridges[0], False, workspace)
    by_columns = sp.csr_array((items.rows.residual, items.rows.indices, items.rows.indptr), shape=matrix.shape[::-1])
    np.testing.assert_array_equal(transpose(as_csr(by_columns, dtype=dtype)).data, solver.halves["user"].rows.residual)


@pytest.mark.parametrize("name", ["count", "biased, 0.3 n^0.5"])
def test_residual_is_carried_through_an_iteration(name):
    """What the updates leave in the rows is the residual of the new factors."""
    for dtype, tolerance in (("float64", 1e-13), ("float32", 1e-5)):
        matrix = as_csr(planted(), dtype=dtype)
        solver = solver_of(matrix, ALL_OBJECTIVES[name], 8)
        state = run(solver, 1)
        rows = np.repeat(np.arange(60), np.diff(matrix.indptr))
        predicted = (state.user.matrix[rows].astype(np.float64) * state.item.matrix[matrix.indices]).sum(axis=1)
        if state.user.bias is not None:
            predicted += state.mean + state.user.bias[rows] + state.item.bias[matrix.indices]
        np.testing.assert_allclose(solver.halves["user"].rows.residual, matrix.data - predicted, atol=tolerance)


def test_float32_error_is_that_of_sums_in_blocks():
    """The bound that ccd_impl.h states, for a row whose exact sums are known."""
    entries = 12_345
    rng = np.random.default_rng(0)
    b = rng.normal(size=entries).astype(np.float32)
    e = rng.normal(size=entries).astype(np.float32)
    pairs = np.ascontiguousarray(np.column_stack([b, b]))
    coordinates, own = np.zeros(1, np.float32), np.zeros((1, 2), np.float32)
    indptr, indices = np.array([0, entries]), np.arange(entries, dtype=np.int32)
    nothing = np.empty(0, np.float32)
    rows = ResidualRows(indptr, indices, e, *_ccd.schedule(indptr))
    workspace = np.zeros((1, _ccd.LONG_ROW), np.float32)
    _ccd.update(coordinates, own, pairs, rows, Change(_ccd.KEEP, nothing, nothing), np.zeros(1), False, workspace)
    wide = b.astype(np.float64)
    curvature = float(wide @ wide)
    bound = 8e-6 * (np.abs(wide) @ np.abs(e) + abs(wide @ e)) / curvature
    assert abs(coordinates[0] - (wide @ e) / curvature) < bound


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=60))
def test_schedule_covers_every_entry_once(degrees):
    indptr = np.concatenate(([0], np.cumsum(degrees))).astype(np.int64)
    groups, segments = _ccd.schedule(indptr)
    assert groups[0] == 0 and groups[-1] == len(degrees) and (np.diff(groups) > 0).all()
    short = np.array([min(degree, 0 if degree > _ccd.LONG_ROW else degree) for degree in degrees])
    per_group = np.add.reduceat(short, groups[:-1])
    assert per_group.max() <= _ccd.GROUP_ENTRIES + _ccd.LONG_ROW
    expected = [row for row, degree in enumerate(degrees) if degree > _ccd.LONG_ROW]
    assert sorted(set(segments[:, 0].tolist())) == expected
    for row in expected:
        mine = segments[segments[:, 0] == row]
        assert mine[0, 1] == indptr[row] and mine[-1, 2] == indptr[row + 1]
        assert (mine[1:, 1] == mine[:-1, 2]).all() and (mine[:, 2] - mine[:, 1] <= _ccd.SEGMENT).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (700, 3), (513, 17)])
def test_by_column_and_back(shape):
    rows = np.random.default_rng(0).normal(size=shape)
    columns = by_column(rows)
    np.testing.assert_array_equal(columns, rows.T)
    assert columns.flags.c_contiguous
    np.testing.assert_array_equal(by_row(columns), rows)
    after = by_column(rows, 1, np.arange(shape[0]))
    assert (after[0] == 1).all() and np.array_equal(after[1], np.arange(shape[0]))
    np.testing.assert_array_equal(after[2:], columns)


# ---------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("name", ALL_OBJECTIVES)
@pytest.mark.parametrize("options", [{}, {"inner": 3}, {"nonnegative": True}], ids=str)
@pytest.mark.parametrize("dtype", [exhaustive("float32"), "float64"])
def test_objective_never_rises(name, options, dtype):
    matrix = as_csr(planted(), dtype=dtype)
    solver = solver_of(matrix, ALL_OBJECTIVES[name], 6, **options)
    values = [solver.objective_value()]
    for _ in range(12):
        run(solver, 1)
        values.append(solver.objective_value())
    slack = 1e-12 if dtype == "float64" else 1e-6
    assert all(after <= before * (1 + slack) for before, after in pairwise(values))
    assert values[-1] < 0.5 * values[0]


@pytest.mark.parametrize(
    ("seed", "scaling", "lambda_b"),
    [
        *((0, "count", None), (1, "none", 0.3)),
        *(exhaustive(seed, scaling, None) for seed in (1, 2) for scaling in ("count", "none")),
        *(exhaustive(*each) for each in ((0, "none", None), (0, "count", 0.0), (2, 0.5, 0.3))),
    ],
)
def test_minimum_is_that_of_als(seed, scaling, lambda_b):
    """On small dense problems both arrive at the same objective and the same predictions; biases with a lambda_b."""
    dense = 3 + np.random.default_rng(seed).normal(size=(9, 7))
    options = {"factors": 2, "regularization": 0.2, "regularization_scaling": scaling, "dtype": "float64",
               "biases": lambda_b is not None, "bias_regularization": lambda_b, "random_state": seed, "device": "cpu",
               "num_threads": 1}  # fmt: skip
    ccd = hmf.CCD(iterations=400, **options).fit(dense)
    als = hmf.ExplicitALS(iterations=400, **options).fit(dense)
    assert ccd.objective(dense) == pytest.approx(als.objective(dense), rel=1e-8)
    pairs = np.indices(dense.shape).reshape(2, -1)
    np.testing.assert_allclose(ccd.predict(*pairs), als.predict(*pairs), atol=1e-4)


@pytest.mark.parametrize("biases", [False, True])
def test_solution_is_stationary(biases):
    """At a minimum, ALS has nothing left to do."""
    matrix = planted(20, 14, 0.5)
    model = hmf.CCD(
        factors=3, regularization=0.2, biases=biases, bias_regularization=0.1, iterations=400, dtype="float64",
        random_state=0, device="cpu", num_threads=1,
    ).fit(matrix)  # fmt: skip
    state = model._learned.state
    solved = reference.half_sweep(matrix, state.item, state.mean, model._learned.objective)
    np.testing.assert_allclose(model.user_factors_, solved.matrix, atol=1e-6)
    if biases:
        np.testing.assert_allclose(model.user_bias_, solved.bias, atol=1e-6)
        assert model.mean_ == pytest.approx(matrix.data.mean(dtype=np.float64))


def test_biases_alone_are_those_of_the_damped_baseline():
    """Factors that a huge lambda holds at zero leave alternating ridge regressions of the biases."""
    matrix = as_csr(planted(), dtype=np.float64)
    model = hmf.CCD(
        factors=2, regularization=1e12, biases=True, bias_regularization=0.2, iterations=200, dtype="float64",
        random_state=0, device="cpu",
    ).fit(matrix)  # fmt: skip
    coo, n = matrix.tocoo(), sum(matrix.shape)
    design = np.zeros((coo.nnz, n))
    design[np.arange(coo.nnz), coo.row] = design[np.arange(coo.nnz), matrix.shape[0] + coo.col] = 1
    counts = np.maximum(design.sum(axis=0), 1)  # s of each row
    expected = np.linalg.solve(design.T @ design + np.diag(0.2 * counts), design.T @ (coo.data - coo.data.mean()))
    np.testing.assert_allclose(np.concatenate((model.user_bias_, model.item_bias_)), expected, atol=1e-8)


def test_nonnegative_minimum_has_no_better_neighbour():
    """Projected gradients vanish: inside they are zero, at zero they point outside."""
    dense = np.abs(np.random.default_rng(3).normal(size=(8, 6))) + 0.1
    model = hmf.CCD(
        biases=False,
        factors=2, regularization=0.05, nonnegative=True, iterations=500, dtype="float64", random_state=1,
        device="cpu", num_threads=1,
    ).fit(dense)  # fmt: skip
    X, Y = model.user_factors_, model.item_factors_
    gradient = -2 * (dense - X @ Y.T) @ Y + 2 * 0.05 * 6 * X
    assert X.min() >= 0 and Y.min() >= 0 and (X == 0).any()
    assert np.abs(gradient[X > 0]).max() < 1e-5
    assert gradient[X == 0].min() > -1e-5


def test_nonnegative_holds_after_every_iteration():
    matrix = planted()
    matrix.data -= 3  # so that many unconstrained coordinates are negative
    seen = []

    def look(model, record):
        seen.append(min(model.user_factors_.min(), model.item_factors_.min()))

    options = {"factors": 6, "iterations": 4, "random_state": 0, "device": "cpu"}
    hmf.CCD(nonnegative=True, **options).fit(matrix, callback=look)
    assert hmf.CCD(nonnegative=True, biases=True, **options).fit(matrix, callback=look).user_bias_.min() < 0
    assert len(seen) == 8 and min(seen) >= 0
    assert hmf.CCD(**options).fit(matrix).user_factors_.min() < 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("biases", [False, True])
def test_thread_count_changes_no_bit(dtype, inner, biases):
    matrix = planted(900, 300, 0.2)
    models = [
        hmf.CCD(factors=7, iterations=2, inner_iterations=inner, dtype=dtype, random_state=0, device="cpu",
                num_threads=threads, biases=biases).fit(matrix)
        for threads in (1, 2, 5)
    ]  # fmt: skip
    assert len(_ccd.schedule(matrix.indptr.astype(np.int64))[0]) > 3
    for model in models[1:]:
        assert_same_bits(model._learned.state, models[0]._learned.state)


@pytest.mark.parametrize("name", ["count", "biased, 0.3 n^0.5"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("power", [-10, 10])
def test_no_constant_breaks_the_scale_of_the_ratings(name, dtype, power):
    """Ratings and lambda times 4^power, from a start times 2^power: no bit of a factor differs but for that power."""
    matrix = as_csr(planted(), dtype=dtype)
    objective, root = ALL_OBJECTIVES[name], 2.0**power
    scaled = replace(objective, regularization=objective.regularization.user * root**2)
    one = solver_of(matrix, objective, 4, inner=2)
    other = solver_of(as_csr(matrix * np.dtype(dtype).type(root**2), dtype=dtype), scaled, 4, inner=2)

    other.state = grown(one.state, root)
    assert_same_bits(run(other, 3), grown(run(one, 3), root))
    assert other.objective_value() == pytest.approx(one.objective_value() * root**4, rel=1e-12)


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_renaming_users_and_items_renames_the_factors(seed):
    rng = np.random.default_rng(seed)
    matrix = as_csr(planted(30, 20, 0.3, seed=seed), dtype=np.float64)
    objective, rows, columns = OBJECTIVES["count"], rng.permutation(30), rng.permutation(20)
    solver = solver_of(matrix, objective, 3)
    other = solver_of(as_csr(matrix[rows][:, columns], dtype=np.float64), objective, 3)
    other.state = State(solver.state.user.take(rows), solver.state.item.take(columns))
    one, two = run(solver, 2), run(other, 2)
    np.testing.assert_allclose(two.user.matrix, one.user.matrix[rows], rtol=1e-9, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- shapes that hurt


@pytest.mark.parametrize("lam", [0.0, 0.1])
@pytest.mark.parametrize("factors", [1, 3])
def test_a_matrix_of_one_entry(lam, factors):
    model = hmf.CCD(factors=factors, iterations=200, regularization=lam, biases=False, random_state=0, device="cpu",
                    dtype="float64",
                    num_threads=1)  # fmt: skip
    model.fit(sp.csr_array([[4.0]]))
    # the minimum of (4 - xy)^2 + lambda (x^2 + y^2) has xy = 4 - lambda
    assert model.predict(0, 0, clip=False) == pytest.approx(4.0 - lam, abs=1e-6)


def test_coordinates_that_meet_zeros_only_stay_zero():
    """Without penalty such a coordinate has no equation; it must not become 0 / 0."""
    matrix = as_csr(sp.csr_array([[2.0, 0.0], [0.0, 3.0]]), dtype=np.float64)
    solver = solver_of(matrix, OBJECTIVES["unpenalized"], 2)
    users, items = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])
    solver.state = State(Factors(users), Factors(items))
    state = run(solver, 2)
    assert not state.item.matrix[:, 1].any() and not state.user.matrix[:, 1].any()
    np.testing.assert_allclose((state.user.matrix @ state.item.matrix.T).diagonal(), [2.0, 3.0])


def test_explicit_zeros_are_ratings():
    rows, columns = np.array([0, 0, 1]), np.array([0, 1, 0])
    zero = sp.csr_array((np.array([5.0, 0.0, 5.0]), (rows, columns)), shape=(2, 2))
    model = hmf.CCD(factors=2, iterations=200, regularization=1e-3, random_state=0, device="cpu").fit(zero)
    assert abs(model.predict(0, 1)) < 0.05


def test_duplicates_nan_and_bad_values_are_refused():
    twice = sp.coo_array((np.ones(2), ([0, 0], [1, 1])), shape=(2, 2))
    for matrix, message in ((twice, "more than one entry"), (sp.csr_array([[np.nan, 1.0]]), "NaN and inf")):
        with pytest.raises(ValueError, match=message):
            hmf.CCD(device="cpu").fit(matrix)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("factors", 0, ValueError),
        ("factors", 2049, ValueError),
        ("regularization", -1.0, ValueError),
        ("regularization_scaling", "rows", ValueError),
        ("iterations", 0, ValueError),
        ("inner_iterations", 0, ValueError),
        ("inner_iterations", 1001, ValueError),
        ("inner_iterations", 1.5, TypeError),
        ("nonnegative", "yes", TypeError),
        ("biases", "yes", TypeError),
        ("bias_regularization", -0.1, ValueError),
        ("device", "gpu", ValueError),
        ("dtype", "float16", ValueError),
    ],
)
def test_parameters_are_checked_by_name(option, value, error):
    with pytest.raises(error, match=option):
        hmf.CCD(**{option: value}).fit(planted())


def test_overflow_is_reported_and_keeps_the_last_factors():
    matrix = planted()
    matrix.data *= np.float32(2e37)
    model = hmf.CCD(biases=False, factors=3, random_state=0, device="cpu")
    with pytest.raises(NonFiniteError, match=r"factor 0 of item \d+ became infinite or NaN.*use dtype='float64'"):
        model.fit(matrix)
    assert not hasattr(model, "user_factors_")
    wide = hmf.CCD(biases=False, factors=3, random_state=0, device="cpu", dtype="float64").fit(matrix)
    assert np.isfinite(wide.user_factors_).all()


def test_a_bias_that_overflows_is_reported():
    matrix = as_csr(sp.csr_array(np.array([[3e38, -3e38], [3e38, -3e38]], dtype=np.float32)), dtype="float32")
    model = hmf.CCD(factors=1, biases=True, bias_regularization=0.25, random_state=0, device="cpu")
    with pytest.raises(
        NonFiniteError, match=r"bias of item 0 became infinite or NaN.*increase bias_regularization \(now 0\.25\)"
    ):
        model.fit(matrix)


# --------------------------------------------------------------------------------------------------- services of a fit


@pytest.mark.parametrize("biases", [False, True])
def test_a_fit_resumes_the_same_model_only(tmp_path, biases):
    options = {"factors": 5, "random_state": 0, "device": "cpu", "biases": biases}
    hmf.CCD(iterations=2, **options).fit(planted(), checkpoint=tmp_path)
    with pytest.raises(ModelFileError, match="nonnegative=False, this model has nonnegative=True"):
        hmf.CCD(iterations=6, nonnegative=True, **options).fit(planted(), resume_from=tmp_path)
    with pytest.raises(ModelFileError, match=f"biases={biases}, this model has biases={not biases}"):
        hmf.CCD(iterations=6, **options | {"biases": not biases}).fit(planted(), resume_from=tmp_path)


def test_an_interrupted_fit_keeps_the_last_iteration(monkeypatch):
    matrix = planted()
    expected = hmf.CCD(biases=False, factors=5, iterations=2, random_state=0, device="cpu").fit(matrix)
    calls, update = [], _ccd.update

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) > 2 * 2 * 5 + 3:  # in the third iteration
            raise KeyboardInterrupt
        update(*arguments)

    monkeypatch.setattr(_ccd, "update", interrupted)
    model = hmf.CCD(biases=False, factors=5, iterations=9, random_state=0, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        model.fit(matrix)
    assert model.n_iter_ == 2
    assert_same_bits(model._learned.state, expected._learned.state)
    assert model.recommend(0, N=3)[0].shape == (3,)


def test_a_sweep_after_an_interrupted_one_starts_from_the_state(monkeypatch):
    matrix = as_csr(planted(), dtype=np.float64)
    solver = solver_of(matrix, OBJECTIVES["count"], 4)
    before = solver.state
    with monkeypatch.context() as patched:
        patched.setattr(_ccd, "update", lambda *arguments: arguments[0].fill(np.nan))
        with pytest.raises(NonFiniteError):
            run(solver, 1)
    assert solver.state is before
    assert_same_bits(run(solver, 1), run(solver_of(matrix, OBJECTIVES["count"], 4), 1))


def test_the_residual_is_computed_in_pieces(monkeypatch):
    matrix = as_csr(planted(900, 300, 0.2), dtype=np.float32)
    whole = run(solver_of(matrix, OBJECTIVES["count"], 4), 1)
    calls, residual = [], _ccd.residual
    monkeypatch.setattr(_ccd, "residual", lambda *arguments: (calls.append(1), residual(*arguments)))
    assert_same_bits(run(solver_of(matrix, OBJECTIVES["count"], 4, batch_flops=1e6), 1), whole)
    assert len(calls) > 4


@pytest.mark.parametrize("biases", [False, True])
def test_history_callback_and_validation(biases):
    train, test = hmf.split(planted(density=0.5), test_size=0.2, random_state=0)
    seen = []
    model = hmf.CCD(factors=3, iterations=8, regularization=0.1, biases=biases, random_state=0, device="cpu")
    model.fit(train, validation=test, callback=lambda model, record: len(seen) == 4 or seen.append(model.n_iter_))
    assert seen == [1, 2, 3, 4] and model.n_iter_ == 5
    assert [record["iteration"] for record in model.history_] == [1, 2, 3, 4, 5]
    assert model.history_[-1]["rmse"] == pytest.approx(-model.score(test))
    assert model.history_[-1]["objective"] == pytest.approx(model.objective(train))
    assert model.history_[-1]["objective"] == pytest.approx(
        reference.objective_value(train, model._learned.state, model._learned.objective)
    )


@pytest.mark.parametrize("biases", [False, True])
def test_fold_in_is_exact(biases):
    matrix = planted(density=0.5)
    model = hmf.CCD(factors=3, regularization=0.1, biases=biases, random_state=0, device="cpu").fit(matrix)
    exact = reference.half_sweep(matrix, model._learned.state.item, model.mean_, model._learned.objective)
    expected = exact.matrix if exact.bias is None else np.column_stack((exact.matrix, exact.bias))
    np.testing.assert_allclose(model.transform(matrix), expected, rtol=1e-3, atol=1e-4)


def test_a_changed_parameter_changes_the_answer():
    def factors(**options):
        return hmf.CCD(
            **({"factors": 3, "iterations": 2, "biases": False, "random_state": 0, "device": "cpu"} | options)
        ).fit(planted())

    first = factors()
    for change in ({"regularization": 0.4}, {"regularization_scaling": "none"}, {"inner_iterations": 2},
                   {"iterations": 3}, {"random_state": 1}, {"biases": True}):  # fmt: skip
        assert not np.array_equal(factors(**change).user_factors_, first.user_factors_), change
    assert_same_bits(factors()._learned.state, first._learned.state)
    biased = [factors(biases=True, bias_regularization=value).user_bias_ for value in (None, 1.0)]
    assert not np.array_equal(*biased)
    np.testing.assert_allclose(factors(dtype="float64").user_factors_, first.user_factors_, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ the plan


def plan_of(spec: DeviceSpec | None, nnz: int, device: str = "auto", limit=None, **options):
    method = CcdMethod.check(**({"inner_iterations": 1, "nonnegative": False} | options))
    given = Settings.check(
        factors=40, dtype="float32", num_threads=2, device="cpu", iterations=15, method=method, gpu_memory_limit=limit
    )
    base = make_plan(OBJECTIVES["count"], given, (480_189, 17_770), nnz)
    return method.plan(base, replace(given, device=device), OBJECTIVES["count"], spec)


def test_auto_takes_the_gpu_where_it_is_worth_it(caplog):
    assert plan_of(None, 99_072_112).device == "cpu"
    assert plan_of(GPU, 99_072_112).device == "cuda:0"
    with caplog.at_level(logging.INFO, "hybridmf"):
        small = plan_of(GPU, 10_000)
    assert small.device == "cpu" and small.gpu is None
    assert "of them set-up (H200 was found)" in small.reason and "chose the CPU" in caplog.text
    assert plan_of(GPU, 100_000, "cuda").device == "cuda:0"
    full = plan_of(replace(GPU, free_bytes=1 << 30), 99_072_112)
    assert full.device == "cpu" and "are free" in full.reason
    assert plan_of(GPU, 99_072_112, limit=1 << 30).device == "cpu"
    assert plan_of(GPU, 99_072_112, "cuda", limit=1 << 30).gpu.free_bytes == 1 << 30


def test_a_named_gpu_with_too_little_memory_is_refused():
    from hybridmf.plan.make import check_memory

    with pytest.raises(DeviceMemoryError, match="are free"):
        check_memory(plan_of(GPU, 99_072_112, "cuda", limit=1 << 30))


def test_plan_prints_and_counts():
    plan = hmf.plan(planted(), hmf.CCD(biases=False, factors=8, inner_iterations=2, nonnegative=True, device="cpu"))
    text = str(plan)
    assert "ccd++, 2 inner iterations of each rank-one update, non-negative" in text
    assert plan.flops_per_iteration == 2 * planted().nnz * 8 * (4 * 2 + 6)
    assert set(plan.bytes) == {"ratings", "residual", "factors", "vectors", "workspace"}
    assert plan.reorder == "none" and for_fold_in(plan).method == ALS
    assert "1 inner iteration of" in CcdMethod().describe(plan)
    biased = hmf.plan(planted(), hmf.CCD(factors=8, inner_iterations=2, biases=True, device="cpu"))
    assert (biased.factors, biased.rank) == (8, 9)
    assert biased.flops_per_iteration == plan.flops_per_iteration + 2 * planted().nnz * 2 * 10
    assert biased.bytes["factors"] == plan.bytes["factors"] * 10 // 8
    inner = CcdMethod().bytes_per_iteration  # two factors more, each with one inner iteration
    assert biased.method.bytes_per_iteration(biased) == plan.method.bytes_per_iteration(plan) + inner(plan) * 2 / 8


@pytest.mark.parametrize("name", ["count", "biased, 0.3 n^1.0"])
def test_memory_equals_the_plan(name):
    matrix = as_csr(planted(900, 300, 0.2), dtype=np.float32)
    solver = solver_of(matrix, ALL_OBJECTIVES[name], 4, threads=2)
    plan, halves = solver.plan, solver.halves.values()
    assert sum(half.rows.residual.nbytes for half in halves) == plan.bytes["residual"]
    ratings = sum(half.ratings.nbytes + half.rows.indices.nbytes + half.rows.indptr.nbytes for half in halves)
    assert ratings <= plan.bytes["ratings"] + 16
    assert solver._workspace.nbytes == plan.bytes["workspace"]
    vectors = sum(half.ridges.nbytes + 2 * 4 * len(half.degrees) for half in halves)
    assert vectors == plan.bytes["vectors"]
    made = sum(solver._columns(side).nbytes for side in SIDES) + sum(map(np.size, arrays_of(solver.state))) * 2 * 4
    assert made <= plan.bytes["factors"] + 4 * sum(matrix.shape)


def test_biases_are_estimated_to_take_as_long_as_two_factors():
    biased = hmf.plan(planted(), hmf.CCD(8, biases=True, device="cpu"))
    wider = hmf.plan(planted(), hmf.CCD(10, biases=False, device="cpu"))
    works = [plan.method.cpu_work(plan, CpuRates()) for plan in (biased, wider)]
    assert [works[0].seconds, works[0].regions] == pytest.approx([works[1].seconds, works[1].regions])
    iterations = [plan.method.gpu_iteration(plan, Machine()) for plan in (biased, wider)]
    assert iterations[0] == pytest.approx(iterations[1])


# ------------------------------------------------------------------------------------------------------------ real data


@pytest.mark.realdata
def test_biases_on_movielens_100k(data_dir):
    """The held-out error of the exact solver with the same penalties, and no higher an objective."""
    train, test = hmf.split(hmf.Ratings.from_file(data_dir / "ml-100k" / "u.data.gz"), test_size=0.1, random_state=0)
    options = {"factors": 16, "regularization": 0.1, "biases": True, "bias_regularization": 0.05, "random_state": 0,
               "device": "cpu", "num_threads": 1}  # fmt: skip
    ccd = hmf.CCD(iterations=30, **options).fit(train)
    als = hmf.ExplicitALS(iterations=30, **options).fit(train)
    assert ccd.score(test) == pytest.approx(als.score(test), abs=2e-3)
    assert ccd.objective(train) == pytest.approx(als.objective(train), rel=2e-3)


@pytest.mark.exhaustive
@pytest.mark.realdata
def test_movielens_1m(data_dir):
    """f = 32, lambda = 0.065 x entries, 15 iterations: the documented setting. Measured: test RMSE 0.844."""
    ratings = hmf.Ratings.from_file(data_dir / "ml-1m" / "ratings_no_timestamps.dat.gz")
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    # one thread: a machine with other work to do lets two wait for each other after each of 64 updates an iteration
    model = hmf.CCD(factors=32, regularization=0.065, iterations=15, random_state=0, device="cpu", num_threads=1)
    model.fit(train, validation=test)
    assert -model.score(test) <= 0.85
    losses = [record["objective"] for record in model.history_]
    assert losses == sorted(losses, reverse=True)
    default = hmf.CCD(factors=32, random_state=0, device="cpu", num_threads=1).fit(train)
    assert -default.score(test) <= 0.87
