"""Rows in the dual form on a GPU beside the primal form and float64, on shapes that hurt."""

from __future__ import annotations

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.objective import Objective
from hybridmf.errors import NonFiniteError, NotPositiveDefiniteError
from hybridmf.gpu import dual
from hybridmf.gpu.factors import to_device
from hybridmf.plan.row_forms import GPU_SIZES
from support.devices import on_a_gpu, serve_cuda
from support.half_sweeps import OBJECTIVES, Problem, check_solution, joined, row_errors
from support.marks import exhaustive
from support.ratings import planted, rows_of

DUAL = {
    "explicit": OBJECTIVES["explicit"],
    "explicit-damped-ridge": OBJECTIVES["explicit-damped-ridge"],
    "implicit": OBJECTIVES["implicit"],
    "light": OBJECTIVES["implicit-light"],
    "nothing unobserved": OBJECTIVES["implicit-unweighted"],
    "zero weights": Objective("implicit", 0.05, alpha=0.0),
    "small weights": Objective("implicit", 0.05, alpha=1e-4),
    "mixed weights": Objective("implicit", 0.05, alpha=0.3),
    "huge alpha": Objective("implicit", 0.05, alpha=1e5),
}

LENGTHS = (0, 1, 2, 3, 4, 5, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 0, 3)
"""Rows around the sizes of the systems; those with more entries than factors are primal."""


def solved_by(device, problem: Problem, form: str) -> np.ndarray:
    return joined(problem.solve(device, row_form=form))


@pytest.mark.parametrize("name", DUAL)
@pytest.mark.parametrize("rank", [32, exhaustive(70)])
def test_short_rows_are_solved_in_the_dual_form(device, name, rank):
    objective = DUAL[name]
    problem = Problem(rows_of(LENGTHS, 100), objective, rank - objective.biases)
    solved = problem.solve(device, row_form="dual")
    if name == "huge alpha":  # float32 loses all digits of primal systems; those of the dual form are well conditioned
        limit = min(rank, GPU_SIZES[-1])
        short = np.array([0 < length <= limit for length in LENGTHS if length])
        errors = row_errors(solved, problem.exact())[short]
        assert np.median(errors) < 1e-6 and errors.max() < 2e-4
    else:
        check_solution(problem, solved)
    dual, primal = joined(solved), solved_by(device, problem, "primal")
    lengths = np.array(LENGTHS)
    short = (lengths > 1) & (lengths <= min(rank, GPU_SIZES[-1]))
    assert (dual[short] != primal[short]).any(axis=1).all()
    np.testing.assert_array_equal(dual[lengths > rank], primal[lengths > rank])
    np.testing.assert_array_equal(dual, solved_by(device, problem, "dual"))


def test_auto_takes_the_dual_form_up_to_a_share_of_the_rank(device):
    problem = Problem(rows_of((3, 16, 17, 32), 40), DUAL["explicit"], 32)
    auto, dual, primal = (solved_by(device, problem, form) for form in ("auto", "dual", "primal"))
    np.testing.assert_array_equal(auto[:2], dual[:2])
    np.testing.assert_array_equal(auto[2:], primal[2:])
    assert (auto[0] != primal[0]).any()
    assert (dual[3] != primal[3]).any()


def test_auto_takes_the_dual_form_up_to_64_entries_where_systems_are_solved_apart(device):
    problem = Problem(rows_of((48, 49, 64, 65), 80), DUAL["implicit"], 90)
    auto, dual, primal = (solved_by(device, problem, form) for form in ("auto", "dual", "primal"))
    np.testing.assert_array_equal(auto, dual)
    assert (auto[:3] != primal[:3]).any(axis=1).all()
    np.testing.assert_array_equal(auto[3], primal[3])


@pytest.mark.parametrize("count", [1, 3])
def test_solutions_change_back_in_parts(device, count, monkeypatch):
    problem = Problem(rows_of((5, 4, 3, 2, 1), 30), DUAL["implicit"], 32)
    whole = solved_by(device, problem, "dual")
    monkeypatch.setattr(dual, "ROWS_AT_ONCE", count)
    np.testing.assert_allclose(solved_by(device, problem, "dual"), whole, rtol=1e-6)


def test_the_basis_turns_the_matrix_into_the_unit_matrix(device):
    rank = 20
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(50, rank)).astype(np.float32)
    gram = np.zeros((32, 32), np.float32)
    gram[:rank, :rank] = factors.T @ factors
    ridge = np.full(rank, 0.25, np.float32)
    inverse, failed = dual.inverse_root(device, device.upload(gram), device.upload(ridge), 1e-6)
    found = device.download(inverse).astype(float)
    assert device.download(failed)[0] == 0
    unit = found @ (gram[:rank, :rank] + np.diag(ridge)) @ found.T
    np.testing.assert_allclose(unit, np.eye(rank), atol=1e-5)
    assert not np.triu(found, 1).any()
    gram[3, 3] = -1.0
    assert device.download(dual.inverse_root(device, device.upload(gram), device.upload(ridge), 1e-6)[1])[0] == 4
    gram[3, 3] = np.nan
    assert device.download(dual.inverse_root(device, device.upload(gram), device.upload(ridge), 1e-6)[1])[0] == -1


def test_failures_name_the_row(device):
    """A basis that does not exist, and values that are not finite."""
    matrix = rows_of((0, 2, 3), 30)
    flat = Problem(matrix, Objective("implicit", 1e-30, alpha=1.0), 32)
    flat.fixed.matrix[:] = flat.fixed.matrix[:, :1]  # all columns alike
    with pytest.raises(NotPositiveDefiniteError, match="user 1 "):
        flat.solve(device, row_form="dual")
    for name in ("explicit", "implicit"):
        broken = Problem(matrix, DUAL[name], 32)
        broken.fixed.matrix[broken.matrix.indices[-1]] = np.inf
        with pytest.raises(NonFiniteError, match="user "):
            broken.solve(device, row_form="dual")


@pytest.mark.parametrize("name", ["explicit", "implicit"])
def test_arrays_are_checked_once_for_all_sizes(device, name):
    problem = Problem(rows_of((5, 4, 3, 2, 1), 30), DUAL[name], 32)
    half = problem.half(device, row_form="dual")
    half.indptr = half.indptr[1:]
    with pytest.raises(TypeError, match=r"indptr must be int64, C order, shape \(6,\); got int64, shape \(5,\)"):
        half.solve(to_device(device, problem.fixed, half.width), problem.mean)


# with biases one more is solved for: kernels as above, which need not be compiled again
@pytest.mark.parametrize(("model", "factors"), [(hmf.ImplicitALS, 32), (hmf.ExplicitALS, 31)])
def test_fits_and_fold_in_of_all_forms_agree(device, model, factors, monkeypatch):
    serve_cuda(device, monkeypatch)
    matrix = planted(30, 40, 0.2)
    options = {"iterations": 2, "random_state": 0, "device": "cuda", "factors": factors, "regularization": 0.1}
    forms = {form: model(row_form=form, **options).fit(matrix) for form in ("auto", "primal", "dual")}
    assert forms["dual"].plan_.dual_sides == forms["auto"].plan_.dual_sides == ("user", "item")
    assert forms["primal"].plan_.dual_sides == ()
    for form in ("auto", "dual"):
        np.testing.assert_allclose(forms[form].user_factors, forms["primal"].user_factors, rtol=2e-3, atol=1e-4)
        assert (forms[form].user_factors != forms["primal"].user_factors).any()
    folded = [forms[form].transform(matrix) for form in ("primal", "dual")]
    np.testing.assert_allclose(*folded, rtol=2e-3, atol=1e-4)
    assert (folded[0] != folded[1]).any()


@on_a_gpu
def test_many_rows(device):
    """More rows than fit on the device at a time, so that a warp solves several."""
    rng = np.random.default_rng(0)
    problem = Problem(rows_of(tuple(rng.integers(1, 70, 6000)), 500), DUAL["implicit"], 96)
    check_solution(problem, problem.solve(device, row_form="dual"))


@pytest.mark.parametrize("rank", [1, 8, 20, exhaustive(33), exhaustive(100), 128])
def test_rows_change_their_basis(device, rank):
    """By a triangular matrix or its transpose, to their own or other places; tiles of 16 rows, the last one partial."""
    n, width = 37, -(-rank // 4) * 4
    rng = np.random.default_rng(rank)
    inverse = np.zeros((width, width), np.float32)
    inverse[:rank, :rank] = np.tril(rng.normal(size=(rank, rank)))
    rows = np.zeros((n, width), np.float32)
    rows[:, :rank] = rng.normal(size=(n, rank))
    places = rng.permutation(50)[:n].astype(np.int32)
    to, back = device.upload(np.full((n, width), 7, np.float32)), device.upload(np.full((50, width), 7, np.float32))
    operands = (device.upload(rows), device.upload(inverse), rank)
    dual.multiply_rows(device, "to_basis", to, *operands)
    dual.multiply_rows(device, "from_basis", back, *operands, device.upload(places))
    exact, scale = rows.astype(float) @ inverse.T.astype(float), np.sqrt(rank)
    np.testing.assert_allclose(device.download(to), exact, rtol=0, atol=3e-6 * scale)
    found = device.download(back)
    np.testing.assert_allclose(found[places], rows.astype(float) @ inverse.astype(float), rtol=0, atol=3e-6 * scale)
    np.testing.assert_array_equal(np.delete(found, places, axis=0), 7)
