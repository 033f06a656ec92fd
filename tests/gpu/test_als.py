"""Half sweeps and fits on a GPU against the float64 reference and the CPU; the same bodies on the emulated device."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective, State
from hybridmf.core.validate import as_csr, seed_of
from hybridmf.cpu import als as cpu
from hybridmf.errors import DeviceMemoryError, NonFiniteError, NotPositiveDefiniteError
from hybridmf.gpu import cholesky_any, fused, launch
from hybridmf.gpu.engine import GpuEngine
from hybridmf.gpu.factors import DeviceFactors, to_device
from hybridmf.gpu.gram import gram_sum
from hybridmf.gpu.half import Batch, HalfSweep, SegmentedRows
from hybridmf.model.engine import engine_for
from hybridmf.model.learned import scale_of
from hybridmf.plan import als_gpu, half_sweep
from hybridmf.plan import fused as plan_gram
from hybridmf.plan.fused import FusedConfig, table_width
from hybridmf.plan.start import initial_state
from support import reference
from support.builds import FUSED_KERNELS
from support.devices import limit_memory, on_a_gpu
from support.half_sweeps import (
    BACKWARD_ERROR,
    FITS,
    OBJECTIVES,
    RANK,
    SMALL,
    Problem,
    check_solution,
    dense_system,
    joined,
    plan_on,
    random_factors,
    relative_error,
    row_errors,
)
from support.marks import exhaustive, mostly_exhaustive
from support.ratings import planted, rows_of

ASSEMBLIES = ("fused", "sparse_syrk", "mo_als", "bals")

SEGMENT = 17
"""Entries above which rows are cut here: one beyond a chunk of the fused kernels."""

LENGTHS = (0, 1, 15, 16, 17, 18, 31, 32, 33, 34, 35, 0, 2, 52)
"""Rows around chunks (16) and segments (17) beside a long one and empty ones."""


def residuals(problem: Problem, solved: Factors) -> np.ndarray:
    """``|A x - b| / (|A| |x|)`` of each row with entries: what arithmetic lost, whatever the condition."""
    found = []
    for row in np.flatnonzero(np.diff(problem.matrix.indptr)):
        A, b = dense_system(problem.matrix, row, problem.fixed, problem.mean, problem.objective)
        x = joined(solved)[row]
        found.append(np.linalg.norm(A @ x - b) / (np.linalg.norm(A, 2) * np.linalg.norm(x)))
    return np.array(found)


# ---------------------------------------------------------------------------------------------------- half sweeps

CASES = [
    ("fused", 7, "float32", "implicit"),
    ("fused", 6, "float32", "explicit-biases"),
    ("fused", 32, "float32", "explicit-biases"),
    ("fused", 6, "float32", "explicit-damped"),
    ("fused", 6, "float32", "explicit-damped-half-count"),
    ("fused", 32, "float32", "explicit-damped-ridge"),
    ("sparse_syrk", 1, "float64", "explicit"),
    ("sparse_syrk", 7, "float32", "implicit-heavy"),
    ("sparse_syrk", 31, "float64", "implicit"),
    ("sparse_syrk", 32, "float32", "explicit-damped"),
    ("mo_als", 7, "float32", "implicit-light"),
    ("mo_als", 31, "float64", "implicit"),
    ("mo_als", 32, "float32", "explicit-damped-half-count"),
    ("bals", 1, "float64", "explicit-ridge"),
    ("bals", 7, "float32", "implicit-unweighted"),
    ("bals", 32, "float32", "explicit-damped-ridge"),
]

LARGE_CASES = [
    (assembly, rank, dtype, name)
    for assembly, dtype in zip(ASSEMBLIES, ("float32", "float32", "float64", "float32"), strict=True)
    for rank, name in (
        (33, "explicit"), (63, "explicit-biases"), (64, "implicit"), (65, "explicit"), (96, "implicit-count"),
        (97, "explicit"), (100, "implicit"), (112, "explicit"), (127, "explicit-biases"), (128, "implicit"),
        (200, "implicit"), (512, "explicit"),
    )
    if (assembly != "fused" or rank <= 128) and (assembly == "fused" or rank not in (97, 112))
]  # fmt: skip


def check_half_sweep(device, assembly, rank, dtype, name, matrix, **changes):
    problem = Problem(matrix, OBJECTIVES[name], rank, dtype)
    solved = problem.solve(device, assembly=assembly, **changes)
    check_solution(problem, solved)
    assert solved.matrix.dtype == dtype
    assert solved.matrix.shape == (matrix.shape[0], rank)
    assert solved.matrix.flags.c_contiguous
    return solved


@pytest.mark.parametrize(
    ("assembly", "rank", "dtype", "name"), mostly_exhaustive(CASES, [case for case in CASES if case[1] in (6, 7, 31)])
)
def test_half_sweep_is_the_references(device, assembly, rank, dtype, name):
    check_half_sweep(device, assembly, rank, dtype, name, rows_of(LENGTHS, 60), segment=SEGMENT, batch_slots=3)


@pytest.mark.parametrize(
    ("rank", "name"),
    [exhaustive(1, "explicit"), exhaustive(31, "implicit-count"), (32, "explicit"), exhaustive(65, "implicit"),
     (90, "implicit"), exhaustive(97, "explicit"), exhaustive(100, "implicit-count"), exhaustive(112, "implicit"),
     exhaustive(120, "implicit-count")],
)  # fmt: skip
def test_rows_that_are_not_cut(device, rank, name):
    """By the fused kernels; beyond rank 64 several warps share a system, beyond 80 another kernel solves them."""
    check_half_sweep(device, "fused", rank, "float32", name, rows_of(LENGTHS, 60))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_by_the_default_assembly(device, name):
    """Ours, and for weights that it cannot serve sparse-syrk; rows are not cut."""
    rank = RANK - OBJECTIVES[name].biases
    check_half_sweep(device, "auto", rank, "float32", name, rows_of(LENGTHS, 60))


@on_a_gpu
@pytest.mark.parametrize(("assembly", "rank", "dtype", "name"), LARGE_CASES)
def test_half_sweep_of_large_systems(device, assembly, rank, dtype, name):
    matrix = rows_of((*LENGTHS, 127, 128, 129, 700), 900)
    check_half_sweep(device, assembly, rank, dtype, name, matrix, segment=SEGMENT, batch_slots=3)


@on_a_gpu
@pytest.mark.parametrize("name", ["explicit", "implicit-count"])
@pytest.mark.parametrize(("assembly", "rank"), [("fused", 7), ("fused", 64), ("fused", 128), ("sparse_syrk", 64)])
def test_giant_rows(device, assembly, rank, name):
    """Around the segments of the default plan, 4,096 and 16,384 entries."""
    lengths = (40_000, 4095, 4096, 4097, 8193, 16383, 16384, 16385, 3, 0)
    check_half_sweep(device, assembly, rank, "float32", name, rows_of(lengths, 50_000))


def test_rows_are_cut_into_segments_and_batches():
    indptr = np.concatenate(([0], np.cumsum([5, 0, 1, 4, 8])))
    pieces = SegmentedRows.cut(indptr, np.array([4, 0, 3, 2, 1]), 4)
    assert pieces.slots.tolist() == [0, 2, 4, 5, 6, 7]
    assert pieces.segments.tolist() == [
        [0, 10, 14], [1, 14, 18], [2, 0, 4], [3, 4, 5], [4, 6, 10], [5, 5, 6], [6, 5, 5],
    ]  # fmt: skip
    for slots in (1, 2, 3, 100):
        batches = list(pieces.batches(slots))
        assert [row for batch in batches for row in batch.rows] == [4, 0, 3, 2, 1]
        in_order = [batch.segments[np.argsort(batch.segments[:, 0])] for batch in batches]
        assert np.vstack(in_order)[:, 1:].tolist() == pieces.segments[:, 1:].tolist()
        for batch, segments in zip(batches, in_order, strict=True):
            assert segments[:, 0].tolist() == list(range(batch.slots[-1]))
            assert (np.diff(batch.segments[:, 2] - batch.segments[:, 1]) <= 0).all()  # longest first
            assert len(batch.rows) == 1 or batch.slots[-1] <= slots


def test_equally_long_segments_are_processed_by_their_place_in_the_row():
    """Then those that are processed together read neighbouring factors."""
    pieces = SegmentedRows.cut(np.array([0, 14, 22]), np.array([0, 1]), 4)
    (batch,) = pieces.batches(100)
    assert batch.segments[:, 1].tolist() == [0, 14, 4, 8, 18, 12]  # places 0, 0, 1/4, 1/2, 1/2; the last one is short


@pytest.mark.parametrize(("rows", "width"), [(0, 8), (3, 8), (50, 68), (700, 8), (300, 132)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gram_matrix(device, monkeypatch, rows, width, dtype):
    """Several pieces and tiles, ends of both, and no more memory than allowed."""
    monkeypatch.setattr(plan_gram, "GRAM_SUMS_BYTES", 1 << 20)
    table = np.random.default_rng(2).standard_normal((rows, width)).astype(dtype)
    found = device.download(gram_sum(device, device.upload(table)))
    exact = table.T.astype(np.float64) @ table.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=1e-5 if dtype == "float32" else 1e-13, atol=1e-4)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, found.T)


def test_negative_and_zero_feedback(device):
    matrix = rows_of(LENGTHS, 60)
    matrix.data[::7] = 0
    for name in ("implicit", "explicit"):
        problem = Problem(matrix, OBJECTIVES[name])
        check_solution(problem, problem.solve(device))


@pytest.mark.parametrize(
    ("assembly", "name", "rank"),
    [("fused", "explicit", RANK), ("fused", "explicit-biases", RANK), ("fused", "implicit", RANK),
     exhaustive("fused", "explicit", 100), ("fused", "explicit", 65), exhaustive("fused", "implicit", 70),
     ("sparse_syrk", "implicit", RANK)],
)  # fmt: skip
@pytest.mark.parametrize("warm", [False, True])
def test_cg_is_textbook_conjugate_gradients(device, assembly, name, rank, warm):
    rank -= OBJECTIVES[name].biases
    problem = Problem(planted()[[0, 7, 30, 59]], OBJECTIVES[name], rank)
    start = random_factors(4, rank, np.float32, problem.objective.biases, seed=5)
    for steps in (1, 3, 8):
        solved = problem.solve(device, start if warm else None, assembly=assembly, solver="cg", cg_steps=steps)
        assert not joined(solved)[2].any()  # the row without entries
        for row in (0, 1, 3):
            A, b = dense_system(problem.matrix, row, problem.fixed, problem.mean, problem.objective)
            first = joined(start)[row] if warm else np.zeros(len(b))
            expected = reference.conjugate_gradient(A, b, first, steps)
            np.testing.assert_allclose(joined(solved)[row], expected, rtol=2e-3, atol=2e-4)


# ---------------------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("name", ["explicit", "explicit-biases", "implicit", "implicit-light"])
def test_float32_error_is_near_plain_numpys(device, name):
    problem = Problem(planted(90, 120, 0.4), OBJECTIVES[name], RANK - OBJECTIVES[name].biases)
    errors, plain = (row_errors(solved, problem.exact()) for solved in (problem.solve(device), problem.plain()))
    assert np.median(errors) < 4 * np.median(plain)
    assert errors.max() < 4 * plain.max()


@pytest.mark.parametrize(
    ("spread", "smallest", "precision"), [(2.0, -3, "float32"), (5.5, -3, "float32"), (5.5, -6, "float32_wide")]
)
def test_values_over_many_orders_of_magnitude(device, spread, smallest, precision):
    """Play counts up to 350,000 beside 1, and factors from 1 to 0.001: float16 parts; to 0.000001: tf32 parts."""
    rng = np.random.default_rng(0)
    matrix = planted(90, 60, 0.3)
    matrix.data = np.ceil(10 ** rng.uniform(0, spread, matrix.nnz)).astype(np.float32)
    fixed = random_factors(60, RANK, np.float32).matrix * 10 ** rng.uniform(smallest, 0, (60, 1)).astype(np.float32)
    problem = Problem(matrix, replace(OBJECTIVES["implicit"], alpha=1.0), fixed=Factors(fixed))
    half = problem.half(device)
    assert half.kernels_for(to_device(device, problem.fixed, half.width)).precision == precision
    errors, plain = (row_errors(solved, problem.exact()) for solved in (problem.solve(device), problem.plain()))
    assert np.median(errors) < 4 * np.median(plain)
    assert errors.max() < 4 * plain.max()


@pytest.mark.parametrize("rank", [exhaustive(64), 65, exhaustive(100)])
def test_the_largest_weight_of_a_row_may_be_anywhere(device, rank):
    """Each warp of a team looks for it among its own entries; float16 parts of the others would overflow."""
    matrix = rows_of((130,) * 5, 150)
    matrix.data[:] = 1
    matrix.data[[130 * row + place for row, place in enumerate((0, 40, 70, 100, 129))]] = 3e5
    problem = Problem(matrix, OBJECTIVES["implicit"], rank)
    errors, plain = (row_errors(solved, problem.exact()) for solved in (problem.solve(device), problem.plain()))
    assert errors.max() < 8 * plain.max()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_factors_of_any_scale(device, scale):
    """Float16 parts are of factors scaled to their range."""
    fixed = Factors(random_factors(40, RANK, np.float32).matrix * np.float32(scale))
    objective = replace(OBJECTIVES["explicit"], regularization=0.05 * scale**2)
    problem = Problem(planted(), objective, fixed=fixed)
    check_solution(problem, problem.solve(device))


def test_lower_precisions_have_their_documented_errors(device):
    problem = Problem(planted(40, 120, 0.4), OBJECTIVES["implicit"])
    worst = {}
    for precision, bound in BACKWARD_ERROR.items():
        worst[precision] = residuals(problem, problem.solve(device, precision=precision)).max()
        assert worst[precision] < bound, precision
    # each is really what computes
    assert worst["float32"] < worst["bf16x3"] / 4 < worst["tf32"] / 16 < worst["bf16"] / 16
    assert worst["bf16x3"] / 4 < worst["float16"] / 16 < worst["bf16"] / 16


@pytest.mark.parametrize(("name", "assembly"), [("implicit", "fused"), ("explicit", "fused"), ("implicit", "mo_als")])
def test_cpu_and_gpu_agree_after_one_half_sweep(device, name, assembly):
    problem = Problem(planted(), OBJECTIVES[name])
    gpu, cpu_ = problem.solve(device, assembly=assembly), problem.on_cpu()
    assert relative_error(gpu.matrix, cpu_.matrix) < 1e-5


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_reruns_and_batches_of_any_size_give_the_same_bits(device, assembly):
    problem = Problem(rows_of(LENGTHS, 60), OBJECTIVES["implicit"])
    sizes = {"segment": SEGMENT, "assembly": assembly} | ({"tile_rows": 4} if assembly == "bals" else {})
    first = problem.solve(device, batch_slots=1000, **sizes).matrix
    for slots in (1000, 1, 2, 3, 5):
        np.testing.assert_array_equal(problem.solve(device, batch_slots=slots, **sizes).matrix, first)


def test_solving_a_row_does_not_depend_on_the_others(device):
    matrix = rows_of(LENGTHS, 60)
    whole = Problem(matrix, OBJECTIVES["explicit"])
    first = whole.solve(device).matrix
    some = np.array([13, 2, 0, 9])
    np.testing.assert_array_equal(Problem(matrix[some], OBJECTIVES["explicit"]).solve(device).matrix, first[some])


# ---------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_batches_are_halved_until_they_fit(device, assembly, monkeypatch, caplog):
    problem = Problem(rows_of([20 + k % 30 for k in range(60)], 60), OBJECTIVES["explicit"])
    sizes = {"segment": SEGMENT, "assembly": assembly} | ({"tile_rows": 4} if assembly == "bals" else {})
    expected = problem.solve(device, batch_slots=1000, **sizes).matrix
    half = problem.half(device, batch_slots=1000, **sizes)
    fixed = to_device(device, problem.fixed, half.width)
    limit_memory(device, monkeypatch, 8000)
    with caplog.at_level(logging.WARNING, logger="hybridmf"):
        np.testing.assert_array_equal(half.solve(fixed, problem.mean).matrix, expected)
        assert "out of memory: batches of" in caplog.text
        warned = len(caplog.records)
        np.testing.assert_array_equal(half.solve(fixed, problem.mean).matrix, expected)
    assert half.batches.slots < 60
    assert len(caplog.records) == warned  # the smaller size stays


@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_not_even_one_system_fits(device, assembly, monkeypatch):
    problem = Problem(rows_of((40, 50), 60), OBJECTIVES["implicit"])
    sizes = {"segment": SEGMENT, "assembly": assembly} | ({"tile_rows": 4} if assembly == "bals" else {})
    half = problem.half(device, batch_slots=4, **sizes)
    fixed = to_device(device, problem.fixed, half.width)
    limit_memory(device, monkeypatch, 100)
    with pytest.raises(DeviceMemoryError):
        half.solve(fixed, problem.mean)


def test_a_fit_that_runs_out_of_memory_keeps_the_last_factors(gpu, monkeypatch):
    kept = {}

    def fill_memory(model, record):
        kept.update(user=model.user_factors.copy(), item=model.item_factors.copy())
        limit_memory(gpu, monkeypatch, 64)

    model = hmf.ImplicitALS(factors=RANK, iterations=5, device="cuda", random_state=0)
    with pytest.raises(DeviceMemoryError):
        model.fit(SMALL, callback=fill_memory)
    assert model.n_iter_ == 1
    np.testing.assert_array_equal(model.user_factors, kept["user"])
    np.testing.assert_array_equal(model.item_factors, kept["item"])


def test_a_fit_that_cannot_fit_is_refused_before_it_starts(gpu):
    model = hmf.ImplicitALS(factors=RANK, device="cuda", gpu_memory_limit=1000)
    with pytest.raises(DeviceMemoryError, match=r"needs about .* and .* are free \(ratings .*fewer factors"):
        model.fit(SMALL)
    assert not hasattr(model, "plan_")


# ---------------------------------------------------------------------------------------------------- whole fits


def fit(kind: str, device: str, *, fit_options=None, **options):
    cls, given = FITS[kind]
    model = cls(**({"iterations": 3, "random_state": 3, "device": device} | given | options))
    return model.fit(SMALL, **(fit_options or {}))


@pytest.mark.parametrize("kind", FITS)
def test_a_user_switches_the_device_and_nothing_else(gpu, kind):
    on_cpu, on_gpu = (fit(kind, name, fit_options={"callback": lambda m, r: None}) for name in ("cpu", "cuda"))
    assert on_gpu.device_.startswith("cuda")
    assert on_gpu.get_params() == on_cpu.get_params() | {"device": "cuda"}
    for side in ("user_factors", "item_factors"):
        ours, theirs = getattr(on_gpu, side), getattr(on_cpu, side)
        assert type(ours) is np.ndarray
        assert ours.dtype == np.float32
        assert ours.flags.c_contiguous
        assert relative_error(ours, theirs) < 1e-4
    for ours, theirs in zip(on_gpu.history_, on_cpu.history_, strict=True):
        assert ours["objective"] == pytest.approx(theirs["objective"], rel=1e-5)
    assert on_gpu.objective(SMALL) == pytest.approx(on_gpu.history_[-1]["objective"], rel=1e-6)
    np.testing.assert_allclose(on_gpu.predict([0, 7], [3, 4]), on_cpu.predict([0, 7], [3, 4]), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(fit(kind, "cuda").user_factors, on_gpu.user_factors)


@pytest.mark.parametrize(("kind", "scaling"), [("implicit", "count"), ("explicit", "none"), ("biases", 0.5)])
def test_fit_follows_the_reference_and_the_loss_never_rises(backend, kind, scaling):
    matrix, iterations = as_csr(SMALL, dtype=np.float32), 4
    model = fit(
        kind, backend, iterations=iterations, regularization_scaling=scaling,
        fit_options={"callback": lambda m, r: None},
    )  # fmt: skip
    objective = model._learned.objective
    losses = [record["objective"] for record in model.history_]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(losses))
    start = initial_state(
        np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=16), model.factors, np.float32, objective,
        float(matrix.data.mean()), seed_of(3), model._start(objective, scale_of(matrix, objective)),
    )  # fmt: skip
    expected = reference.fit(matrix.astype(np.float64), start, objective, iterations)
    assert relative_error(model.user_factors, expected.user.matrix) < 1e-3
    assert relative_error(model.item_factors, expected.item.matrix) < 1e-3
    np.testing.assert_allclose(losses[-1], reference.objective_value(matrix, expected, objective), rtol=5e-5)


def test_float64_and_low_unobserved_weight(backend):
    """Where float32 cannot blur a wrong weight."""
    options = {"dtype": "float64", "unobserved_weight": 0.3, "regularization_scaling": 0.5}
    model = fit("implicit", backend, **options)
    assert model.user_factors_.dtype == np.float64
    matrix = as_csr(SMALL, dtype=np.float64)
    start = initial_state(
        np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=16), RANK, np.float64, model._objective(), 0.0,
        seed_of(3), model._start(model._objective(), 1.0),
    )  # fmt: skip
    expected = reference.fit(matrix, start, model._objective(), 3)
    assert relative_error(model.user_factors_, expected.user.matrix) < 1e-8
    value = reference.objective_value(matrix, expected, model._objective())
    assert model.objective(matrix) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_is_the_sum_over_all_cells(device, name):
    matrix = rows_of(LENGTHS, 60)
    objective = OBJECTIVES[name]
    problem = Problem(matrix, objective, RANK - objective.biases)
    users = random_factors(len(LENGTHS), problem.rank, np.float32, objective.biases, seed=2)
    state = State(users, problem.fixed, np.float32(problem.mean))
    plan = plan_on(device, objective, problem.matrix, problem.rank)
    value = GpuEngine(device, plan).objective_value(objective, problem.matrix, state)
    expected = reference.objective_value(problem.matrix.astype(np.float64), state, objective)
    assert value == pytest.approx(expected, rel=1e-6 if objective.biases else 1e-9)


@pytest.mark.parametrize(("kind", "reorder"), [("implicit", "both"), ("explicit", "rows"), ("biases", "columns")])
def test_reordering_changes_speed_not_results(backend, kind, reorder):
    plain, moved = (fit(kind, backend, reorder=order) for order in ("none", reorder))
    assert moved.plan_.reorder == reorder
    assert relative_error(moved.user_factors, plain.user_factors) < 1e-4
    assert relative_error(moved.item_factors, plain.item_factors) < 1e-4
    assert moved.objective(SMALL) == pytest.approx(plain.objective(SMALL), rel=1e-5)


@pytest.mark.parametrize("kind", FITS)
def test_training_rows_fold_to_their_training_factors(backend, kind):
    model = fit(kind, backend)
    folded = model.transform(SMALL)
    expected = model.user_factors if kind != "biases" else np.column_stack((model.user_factors, model.user_bias_))
    np.testing.assert_allclose(folded, expected, rtol=1e-4, atol=1e-5)
    assert not folded[12].any()


@pytest.mark.parametrize("kind", ["implicit", "biases"])
def test_rows_without_factors_are_served_alike_on_every_engine(gpu, kind, monkeypatch):
    model = fit(kind, "cuda")
    answers = []
    for least in (np.inf, 0):  # scores from which the GPU serves
        monkeypatch.setattr("hybridmf.model.engine.GPU_SCORES", least)
        model._learn(replace(model._learned))  # nothing is cached
        assert engine_for(model.plan_, 1.0).name == ("cpu" if least else model.plan_.device)
        everybody, everything = np.arange(24), np.arange(16)
        answers.append(
            [
                model.recommend(everybody, N=16),
                model.recommend(everybody, N=5, cold_users="mask"),
                model.recommend(everybody, N=5, items=everything[2:9]),
                model.similar_items(everything, N=16),
                model.similar_users([12, 3], N=5),
                model.recommend_new(SMALL, N=5),
                model.recommend(everybody, SMALL, N=5, recalculate_user=True),
            ]
        )
    for on_cpu, on_gpu in zip(*answers, strict=True):
        np.testing.assert_array_equal(on_gpu[0], on_cpu[0])
        np.testing.assert_allclose(on_gpu[1], on_cpu[1], rtol=1e-4, atol=1e-5)
    (top, _), (masked, _), _, (items, scores), (users, _), *new = answers[1]
    assert 5 not in top and set(masked[12]) == {-1} and set(users[0]) == {-1}
    assert set(items[5]) == {-1} and np.all(np.isneginf(scores[5])) and 5 not in items
    for folded, _ in new:
        np.testing.assert_array_equal(folded, top[:, :5])
    counts = np.count_nonzero(SMALL.toarray(), axis=0)
    if kind == "implicit":
        np.testing.assert_array_equal(top[12, :15], np.argsort(-counts, kind="stable")[:15])


VARIANTS = {
    "mo_als": {"READ_ONLY": True, "REGISTERS": True},
    "mo_als_global": {"READ_ONLY": True, "REGISTERS": False},
    "mo_als_uncached": {"READ_ONLY": False, "REGISTERS": True},
    "mo_als_plain": {"READ_ONLY": False, "REGISTERS": False},
    "bals": {"ACCUMULATORS": "chip"},
    "bals_local": {"ACCUMULATORS": "local"},
    "sparse_syrk_published": {"KB": 8},
}


@pytest.mark.parametrize(
    ("assembly", "kind"),
    [
        *((assembly, "implicit") for assembly in VARIANTS),
        *((assembly, "explicit") for assembly in ("mo_als_plain", "bals", "sparse_syrk_published")),
    ],
)
def test_a_fit_takes_published_kernels_by_name(kind, assembly, gpu, monkeypatch):
    launched, get_kernel = [], launch.get_kernel

    def recorded(device, file, name, **constants):
        if name.startswith(("mo_als", "bals", "sparse_syrk")):
            launched.append({"name": name, **constants})
        return get_kernel(device, file, name, **constants)

    for name in ("assembly", "bals"):
        monkeypatch.setattr(f"hybridmf.gpu.{name}.get_kernel", recorded)
    model = fit(kind, "cuda", assembly=assembly, iterations=1)
    kernel = assembly if "syrk" in assembly else "bals" if "bals" in assembly else "mo_als"
    wanted = {"name": kernel} | VARIANTS[assembly]
    assert launched and all(wanted.items() <= one.items() for one in launched)
    assert f"assembly {assembly}" in str(model.plan_) and model.plan_.estimates[0].assembly == assembly
    fixed = Factors(model.item_factors.astype(np.float64))
    exact = reference.half_sweep(SMALL, fixed, 0.0, model._learned.objective)
    assert relative_error(model.user_factors, exact.matrix) < 1e-4


def test_gates_kernels_as_printed(gpu, monkeypatch):
    """Batches in the order of the rows, which are not cut, and a Cholesky without tensor cores."""
    batches, solvers = [], []
    upload, solve = Batch.upload.__func__, cholesky_any.cholesky_solve

    def uploaded(cls, send, parts):
        parts = list(parts)
        batches.extend(parts)
        return upload(cls, send, parts)

    def solved(*args):
        solvers.append(args[-1])
        return solve(*args)

    monkeypatch.setattr(Batch, "upload", classmethod(uploaded))
    monkeypatch.setattr(cholesky_any, "cholesky_solve", solved)
    monkeypatch.setattr(half_sweep, "PUBLISHED_BATCH", 10)
    monkeypatch.setattr(als_gpu, "GPU_SEGMENT", 3)
    model = fit("implicit", "cuda", assembly="sparse_syrk_published", iterations=1)
    assert model.plan_.batch_slots == 10 and len(batches) == 5  # of 24 and 16 rows
    for batch in batches:
        assert len(batch.rows) <= 10 and np.all(np.diff(batch.rows) > 0)
        np.testing.assert_array_equal(batch.slots, np.arange(len(batch.rows) + 1))
        np.testing.assert_array_equal(batch.segments[:, 0], np.arange(len(batch.rows)))
    assert solvers and all(isinstance(solver, cholesky_any.CholeskyConfig) for solver in solvers)
    with pytest.raises(ValueError, match="assembly='sparse_syrk_published' cannot solve for blocks of coordinates"):
        fit("implicit", "cuda", assembly="sparse_syrk_published", solver="subspace", block_size=2)


@pytest.mark.parametrize("assembly", ["mo_als_plain", "bals_local"])
def test_variants_are_refused_where_there_is_no_gpu(assembly):
    with pytest.raises(ValueError, match=f"assembly='{assembly}' is a GPU's; on device=\"cpu\" use one of simd, rank1"):
        hmf.ExplicitALS(4, assembly=assembly, device="cpu").fit(SMALL)


def test_rows_fold_in_without_tiles_for_weights_that_have_no_root(backend):
    """Confidences below `unobserved_weight`: negative weights, which the fused kernels do not serve."""
    model = fit("implicit", backend, assembly="bals", unobserved_weight=1.5, alpha=0.01)
    np.testing.assert_allclose(model.transform(SMALL), model.user_factors, rtol=1e-4, atol=1e-5)


def test_callbacks_and_validation_observe_and_stop(backend):
    seen = []

    def stop_after_two(model, record):
        assert type(model.user_factors) is np.ndarray
        assert np.isfinite(model.user_factors).all()
        seen.append(record)
        return len(seen) == 2

    model = fit(
        "explicit",
        backend,
        iterations=9,
        fit_options={"callback": stop_after_two, "validation": planted(24, 16, 0.4, seed=1)},
    )
    assert model.n_iter_ == len(seen) == 2
    assert all(np.isfinite([record["objective"], record["rmse"], record["seconds"]]).all() for record in seen)


def test_a_loaded_model_has_its_factors_on_the_host(backend, tmp_path):
    model = fit("biases", backend)
    model.save(tmp_path / "model.safetensors")
    for copied in (hmf.load(tmp_path / "model.safetensors"), pickle.loads(pickle.dumps(model))):
        state = copied._learned.state
        assert not any(isinstance(side, DeviceFactors) for side in (state.user, state.item))


def test_a_pickle_holds_numpy_arrays_of_the_right_shape():
    """Padding of the table stays on the device; this process has no need of one to read the pickle."""

    class Device:
        def download(self, array, **options):
            return array.copy()

    table = np.zeros((3, table_width(5, np.float32)), np.float32)
    table[:, :5] = np.arange(15).reshape(3, 5)
    restored = pickle.loads(pickle.dumps(DeviceFactors(Device(), table, 5, np.arange(3, dtype=np.float32))))
    assert type(restored) is Factors
    np.testing.assert_array_equal(restored.matrix, table[:, :5])
    np.testing.assert_array_equal(restored.bias, [0, 1, 2])


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("reorder", ["none", "both"])
@pytest.mark.parametrize("side", ["item", "user"])
def test_a_singular_system_names_side_row_and_minor(backend, reorder, side):
    """Row 1 has one entry and two unknowns, so without a penalty its system has a zero second pivot."""
    dense = np.array([[5, 0, 2], [4, 3, 1], [1, 0, 5], [2, 0, 4]], dtype=np.float32)
    model = hmf.ExplicitALS(
        biases=False, factors=2, regularization=0.0, reorder=reorder, random_state=0, device=backend
    )
    with pytest.raises(
        NotPositiveDefiniteError, match=rf"{side} 1 .*leading minor 2.*increase regularization \(now 0\)"
    ) as caught:
        model.fit(dense if side == "item" else dense.T)
    assert (caught.value.side, caught.value.row, caught.value.minor) == (side, 1, 2)
    # items come first: where users fail, the model has the items of this iteration
    assert hasattr(model, "item_factors_") == (side == "user")


@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_each_assembly_finds_singular_systems(device, assembly):
    problem = Problem(rows_of((20, 1, 30), 60), Objective("implicit", 0.0, unobserved_weight=0.0))
    with pytest.raises(NotPositiveDefiniteError) as caught:
        problem.solve(device, assembly=assembly)
    assert (caught.value.side, caught.value.row, caught.value.minor) == ("user", 1, 2)


def test_a_failure_in_the_second_half_sweep_keeps_the_state_before_it(backend, monkeypatch):
    """Items are solved, users fail: the users of the iteration before stay, and the model works."""
    kept = {}

    def keep(model, record):
        kept.update(user=model.user_factors.copy(), item=model.item_factors.copy())
        if record["iteration"] == 2:
            half = halves["user"]
            monkeypatch.setattr(half, "steps", fail)

    def fail(*args, **options):
        raise NonFiniteError("factors of user 3 became infinite or NaN")

    halves = {}
    name = "hybridmf.cpu.als.HalfSweep" if backend == "cpu" else "hybridmf.ranks.gpu_rank.HalfSweep"
    original = cpu.HalfSweep if backend == "cpu" else HalfSweep

    class Recorded(original):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            halves[self.side] = self

    monkeypatch.setattr(name, Recorded)
    model = hmf.ExplicitALS(biases=False, factors=RANK, iterations=5, device=backend, random_state=0)
    with pytest.raises(NonFiniteError):
        model.fit(SMALL, callback=keep)
    assert model.n_iter_ == 2
    np.testing.assert_array_equal(model.user_factors, kept["user"])
    assert relative_error(model.item_factors, kept["item"]) > 1e-6
    assert len(model.recommend(3)[0]) == 10


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_overflow_is_reported_not_stored(backend, solver):
    matrix = SMALL.copy()
    matrix.data[:] = 1e38
    model = hmf.ExplicitALS(biases=False, factors=RANK, solver=solver, random_state=0, device=backend)
    with pytest.raises(NonFiniteError, match=r"of item .*infinite or NaN.*scale the ratings down"):
        model.fit(matrix)
    assert not hasattr(model, "user_factors_")


@pytest.mark.parametrize(
    ("assembly", "value"),
    [(assembly, value) for assembly in ("fused", "sparse_syrk") for value in (np.nan, np.inf, 1e25)],
)
def test_overflow_in_a_system_is_no_lack_of_regularization(device, assembly, value):
    fixed = random_factors(60, RANK, np.float32)
    fixed.matrix[3] = value
    problem = Problem(rows_of((60, 60), 60), OBJECTIVES["explicit"], fixed=fixed)
    with pytest.raises(NonFiniteError, match=r"of user 0 .*infinite or NaN"):
        problem.solve(device, assembly=assembly)


@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_factors_of_another_device_are_refused(device, assembly, monkeypatch):
    problem = Problem(rows_of(LENGTHS, 60), OBJECTIVES["explicit"])
    half = problem.half(device, assembly=assembly)
    table = np.zeros((60, half.width), np.float32)
    if device.spec.name == "emulated":  # where every array is NumPy's
        monkeypatch.setattr(device, "owns", lambda array: array is not table)
    with pytest.raises(TypeError, match=r"(factors|table) is a numpy\.ndarray, not an array on"):
        half.solve(DeviceFactors(device, table, RANK, None), 0.0)
    with pytest.raises(TypeError, match=r"shape|columns"):
        half.solve(DeviceFactors(device, device.upload(table[:, :4]), 4, None), 0.0)


def test_factors_move_to_the_device_that_asks(device):
    """The width of a table and its device are what a half sweep takes; what fits is passed on as it is."""
    factors = random_factors(5, 6, np.float32, biases=True)
    moved = to_device(device, factors, 8)
    table = device.download(moved.table)
    np.testing.assert_array_equal(table[:, :6], factors.matrix)
    assert (table[:, 6] == 1).all()
    assert not table[:, 7].any()
    assert to_device(device, moved, 8) is moved
    wider = to_device(device, moved, 12)
    np.testing.assert_array_equal(wider.matrix, factors.matrix)
    np.testing.assert_array_equal(wider.bias, factors.bias)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (hmf.ImplicitALS, {"factors": 7}),
        (hmf.ExplicitALS, {"factors": 6}),  # and a bias: kernels that other tests compile as well
        (hmf.ImplicitALS, {"factors": 7, "solver": "cg"}),
        (hmf.ImplicitALS, {"factors": 7, "precision": "bf16x3"}),
        exhaustive(hmf.ExplicitALS, {"factors": 3, "precision": "bf16x3"}),
        (hmf.ImplicitALS, {"factors": 7, "dtype": "float64"}),
        (hmf.ExplicitALS, {"factors": 7, "assembly": "sparse_syrk", "solver": "cg"}),
        (hmf.ImplicitALS, {"factors": 90}),  # which are solved apart, by kernels that other tests compile as well
        exhaustive(hmf.ExplicitALS, {"factors": 120}),
    ],
)
def test_the_kernels_of_a_fit_are_compiled_ahead(gpu, monkeypatch, kind, options):
    ahead, used = [], []
    compile_ahead, kernel = gpu.compile_ahead, gpu.kernel

    def noted(programs, later=False):
        ahead.extend(programs)
        compile_ahead(ahead)

    monkeypatch.setattr(gpu, "compile_ahead", noted)
    monkeypatch.setattr(gpu, "kernel", lambda *key: used.append(key) or kernel(*key))
    kind(iterations=1, device="cuda", random_state=0, **options).fit(SMALL)
    assert used and set(used) <= set(ahead)


@pytest.mark.parametrize(("kind", "options"), [(hmf.ImplicitALS, {}), (hmf.ExplicitALS, {"biases": False})])
def test_kernels_for_factors_of_a_wide_range_are_compiled_before_they_are_needed(gpu, monkeypatch, kind, options):
    # entries that share no user and no item with others: their factors decay
    matrix = sp.block_diag((sp.random_array((20, 15), density=0.5, rng=0), np.full((1, 1), 1e-3)), format="csr")
    ahead, used = [], []
    compile_ahead, kernel = gpu.compile_ahead, gpu.kernel

    def noted(programs, later=False):
        ahead.extend(list(programs) if not used else [])
        compile_ahead(ahead)

    monkeypatch.setattr(gpu, "compile_ahead", noted)
    monkeypatch.setattr(gpu, "kernel", lambda *key: used.append(key) or kernel(*key))
    kind(7, iterations=10, regularization=0.3, device="cuda", random_state=0, **options).fit(matrix.astype(np.float32))
    wide = [key for key in used if f"ARITHMETIC={fused.PRECISION_CODES['float32_wide']}" in key[2]]
    assert wide and set(wide) <= set(ahead)


def test_one_program_solves_sums_of_all_kinds(device):
    config = FusedConfig.rule(64)
    programs = {name: set() for name in (*FUSED_KERNELS, "split_table")}
    for precision in ("float32", "float32_wide", "tf32"):
        for implicit, offsets in ((True, False), (False, True)):
            for program in fused.FusedKernels(device, config, precision).programs(implicit, offsets):
                programs[program[1]].add(program)
    assert {name: len(found) for name, found in programs.items()} == {
        "solve_rows": 6, "assemble_segments": 6, "solve_partials": 1, "split_table": 1,
    }  # fmt: skip
