"""Rows in the dual form beside rows in the primal form and the float64 references, on shapes that hurt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective
from hybridmf.core.validate import as_csr
from hybridmf.cpu.als import HalfSweep, WeightedGram
from hybridmf.errors import NonFiniteError, NotPositiveDefiniteError
from hybridmf.native import _als
from hybridmf.plan.row_forms import DUAL_SHARE
from support import reference
from support.half_sweeps import OBJECTIVES, plan_for, random_factors, relative_error

DUAL = {
    "explicit": OBJECTIVES["explicit-ridge"],
    "explicit, count": OBJECTIVES["explicit"],
    "explicit, biases": Objective("explicit", 0.05, 1.0, biases=True, bias_regularization=0.002),
    "explicit, damped biases": Objective("explicit", 0.05, 0.5, biases=True, bias_regularization=50.0),
    "implicit": OBJECTIVES["implicit"],
    "zero weights": Objective("implicit", 0.05, alpha=0.0),
    "small weights": Objective("implicit", 0.05, alpha=1e-4),
    "mixed weights": Objective("implicit", 0.05, alpha=0.3),
    "huge alpha": Objective("implicit", 0.05, alpha=1e6),
    "light": OBJECTIVES["implicit-light"],
    "nothing unobserved": OBJECTIVES["implicit-unweighted"],
}


def rows_of(degrees, n_columns=80):
    """One row for each degree; three in ten values are dislikes."""
    rng = np.random.default_rng(0)
    dense = np.zeros((len(degrees), n_columns), dtype=np.float32)
    for row, degree in enumerate(degrees):
        columns = rng.choice(n_columns, degree, replace=False)
        dense[row, columns] = rng.integers(1, 6, degree) * np.where(rng.random(degree) < 0.3, -1, 1)
    return dense


def given_of(dense, objective, rank, dtype):
    """Entries, factors of the other side, mean."""
    matrix = as_csr(dense, dtype=dtype)
    return matrix, random_factors(matrix.shape[1], rank, dtype, objective.biases), 0.7 if objective.biases else 0.0


def solve(dense, objective, rank, dtype="float32", **given):
    matrix, fixed, mean = given_of(dense, objective, rank, dtype)
    plan = plan_for(objective, matrix.shape, matrix.nnz, rank=rank, dtype=dtype, **given)
    return HalfSweep("user", matrix, objective, plan).solve(fixed, mean)


def exact_of(dense, objective, rank, dtype):
    matrix, fixed, mean = given_of(dense, objective, rank, dtype)
    return reference.half_sweep(matrix.astype(np.float64), fixed, mean, objective)


def row_errors(solved, expected):
    """Relative error of each row."""
    length = np.linalg.norm(expected, axis=1)
    return np.linalg.norm(solved - expected, axis=1) / np.maximum(length, 1e-3 * length.max())


@pytest.mark.parametrize("name", DUAL)
@pytest.mark.parametrize("rank", [1, 7, 33])
def test_both_forms_have_the_references_answer(name, rank):
    """In float32 the dual form is as accurate as the primal, and near it where large weights spoil the primal form."""
    objective = DUAL[name]
    dense = rows_of([0, 1, 2, max(3, rank // 2), rank - 1, rank, rank + 1, 2 * rank])
    for dtype, tolerance in (("float64", 2e-9), ("float32", 1e-4)):
        expected = exact_of(dense, objective, rank, dtype)
        dual, primal = (solve(dense, objective, rank, dtype, row_form=form) for form in ("dual", "primal"))
        hard = name == "huge alpha" and dtype == "float32"
        assert row_errors(dual.matrix, expected.matrix).max() < (1e-3 if hard else tolerance)
        assert row_errors(primal.matrix, expected.matrix).max() < (1.0 if hard else tolerance)
        if objective.biases:
            assert relative_error(dual.bias, expected.bias) < tolerance
        assert not dual.matrix[0].any()
        assert rank == 1 or (dual.matrix[1:6] != primal.matrix[1:6]).any()


@pytest.mark.parametrize("name", DUAL)
def test_the_references_agree(name):
    objective, matrix = DUAL[name], as_csr(rows_of([0, 1, 4, 9, 30]), dtype=np.float64)
    fixed = random_factors(80, 9, np.float64, objective.biases)
    for row in range(5):
        span = slice(*matrix.indptr[row : row + 2])
        given = (matrix.indices[span], matrix.data[span], fixed, 0.3, objective)
        for one, other in zip(reference.solve_row(*given), reference.solve_row_dual(*given), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "neon", "portable"])
def test_each_instruction_set_solves_the_dual_form(isa, monkeypatch):
    if not _als.can_run(isa):
        pytest.skip(f"this processor cannot run {isa} kernels")
    monkeypatch.setenv("HYBRIDMF_ISA", isa)
    for name in ("explicit, biases", "mixed weights"):
        for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-4)):
            given = rows_of([1, 3, 8, 9, 15, 16, 17, 33, 34, 60]), DUAL[name], 35, dtype
            assert row_errors(solve(*given).matrix, exact_of(*given).matrix).max() < tolerance


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("rank", [5, 32, 64, 66])
def test_rows_solved_together_change_no_bit(rank, form, dtype):
    """Small systems are solved in the lanes of vectors, larger ones in pairs: a row's bits depend on no other row."""
    dense = rows_of([0, 1, 2, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33, 40, 63, 64, 65, 70])
    for objective in (DUAL["explicit"], DUAL["implicit"]):
        together = solve(dense, objective, rank, dtype, row_form=form).matrix
        for row in range(1, len(dense)):
            alone = solve(dense[[row]], objective, rank, dtype, row_form=form).matrix
            np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("rank", [12, 32])
def test_a_singular_row_is_named_among_those_solved_with_it(rank):
    dense = rows_of([40, 50, 60, 40, 7, 45, 55, 60, 44])
    with pytest.raises(NotPositiveDefiniteError, match=r"user 4 .*leading minor 8"):
        solve(dense, Objective("explicit", 0.0), rank)


def test_auto_takes_the_dual_form_up_to_a_share_of_the_rank():
    objective, rank = DUAL["explicit"], 16
    longest = int(DUAL_SHARE * rank)
    dense = rows_of([longest, longest + 1])
    solved = {form: solve(dense, objective, rank, row_form=form).matrix for form in ("auto", "primal", "dual")}
    np.testing.assert_array_equal(solved["auto"][0], solved["dual"][0])
    np.testing.assert_array_equal(solved["auto"][1], solved["primal"][1])
    assert (solved["auto"][0] != solved["primal"][0]).any()
    assert (solved["auto"][1] != solved["dual"][1]).any()


def shop(users=300, items=200, entries=1500):
    """Few entries a row, some rows long, some empty."""
    rng = np.random.default_rng(0)
    dense = np.zeros((users, items), np.float32)
    popular = 1 / np.arange(1, items + 1) ** 0.7
    columns = rng.choice(items, entries, p=popular / popular.sum())
    dense[rng.integers(0, users, entries) ** 2 // users, columns] = rng.integers(1, 6, entries)
    return as_csr(dense, dtype=np.float32)


MODELS = {
    "implicit": lambda **options: hmf.ImplicitALS(20, **options),
    "explicit": lambda **options: hmf.ExplicitALS(20, **options),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_ranks_and_slabs_change_no_bit(name, dtype, tmp_path):
    options = {"iterations": 3, "random_state": 0, "dtype": dtype, "row_form": "dual", "device": "cpu"}
    one = MODELS[name](num_threads=1, **options).fit(shop())
    assert one.plan_.dual_sides == ("user", "item")
    store = hmf.convert(shop(), tmp_path / "store", slab_bytes="8KiB")
    for data, other in (
        (shop(), {"num_threads": 3}),
        (shop(), {"num_threads": 1, "device": ["cpu", "cpu"]}),
        (store, {"num_threads": 2}),
    ):
        fitted = MODELS[name](**(options | other)).fit(data)
        np.testing.assert_array_equal(fitted.user_factors_, one.user_factors_)
        np.testing.assert_array_equal(fitted.item_factors_, one.item_factors_)


@pytest.mark.parametrize("name", MODELS)
def test_new_rows_take_the_same_path(name):
    matrix = shop()
    model = MODELS[name](iterations=2, random_state=0, row_form="dual", device="cpu").fit(matrix)
    factors = model.user_factors_
    if name == "explicit":
        factors = np.column_stack((factors, model.user_bias_))
    np.testing.assert_array_equal(model.transform(matrix), factors)
    np.testing.assert_array_equal(model.transform(matrix[5:8]), factors[5:8])
    model.partial_fit_users([7], matrix[9:10])
    np.testing.assert_array_equal(model.user_factors_[7], model.user_factors_[9])


def test_fits_of_both_forms_agree():
    for name, make in MODELS.items():
        forms = {form: make(iterations=4, random_state=0, row_form=form, device="cpu", dtype="float64") for form in
                 ("auto", "primal", "dual")}  # fmt: skip
        values = [model.fit(shop()).objective(shop()) for model in forms.values()]
        np.testing.assert_allclose(values, values[0], rtol=1e-9)
        assert forms["primal"].plan_.dual_sides == (), name


# ------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (hmf.ExplicitALS(4, regularization=0.0, row_form="dual"), "regularization=0"),
        (hmf.ExplicitALS(4, bias_regularization=0.0, row_form="dual"), "bias_regularization=0"),
        (hmf.ImplicitALS(4, regularization_scaling="count", row_form="dual"), "another ridge"),
        (hmf.ImplicitALS(4, unobserved_weight=1.5, row_form="dual"), "unobserved_weight > 1"),
        (hmf.ImplicitALS(4, solver="cg", row_form="dual"), "solver='cg'"),
        (hmf.ImplicitALS(4, assembly="bals", row_form="dual"), "assembly='bals'"),
    ],
)
def test_dual_is_refused_where_it_does_not_apply(model, message):
    with pytest.raises(ValueError, match=rf'row_form="dual" does not apply: .*{message}.*use row_form="auto"'):
        model.set_params(device="cpu").fit(shop())
    automatic = model.set_params(row_form="auto", bias_regularization=None) if "bias" in message else model
    if message != "regularization=0":
        fitted = automatic.set_params(row_form="auto", iterations=1).fit(shop())
        assert np.isfinite(fitted.user_factors_).all()


def test_row_form_is_one_of_three():
    with pytest.raises(ValueError, match="row_form must be"):
        hmf.ImplicitALS(4, row_form="both").fit(shop())


def test_no_ridge_takes_the_primal_form_which_names_the_row():
    with pytest.raises(NotPositiveDefiniteError, match="leading minor"):
        hmf.ExplicitALS(20, regularization=0.0, biases=False, device="cpu").fit(shop())


def test_a_basis_that_does_not_exist_leaves_the_primal_form():
    """Two equal columns of fixed factors, and a ridge that rounding loses."""
    objective = Objective("implicit", 1e-30, alpha=1.0)
    matrix = as_csr(rows_of([1, 3]), dtype=np.float64)
    fixed = Factors(np.repeat(random_factors(80, 4, np.float64).matrix, 2, axis=1))
    assert WeightedGram("user", fixed.matrix, objective, 1).basis is None
    plan = plan_for(objective, matrix.shape, matrix.nnz, rank=8, dtype="float64", row_form="dual")
    with pytest.raises(NotPositiveDefiniteError, match=r"user 0 .*leading minor"):
        HalfSweep("user", matrix, objective, plan).solve(fixed, 0.0)


def test_values_beyond_the_range_are_reported():
    for objective in (DUAL["explicit"], DUAL["implicit"]):
        matrix = as_csr(rows_of([0, 1, 3]), dtype=np.float32).copy()
        matrix.data[-1] = 3e38
        plan = plan_for(objective, matrix.shape, matrix.nnz, rank=8, row_form="dual")
        fixed = random_factors(80, 8, np.float32)
        with pytest.raises(NonFiniteError, match="user 2"):
            HalfSweep("user", matrix, replace(objective, alpha=3.0), plan).solve(Factors(fixed.matrix / 100), 0.0)


# ------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("rank", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_with_triangles(rank, dtype):
    rng = np.random.default_rng(rank)
    rows, lower = rng.normal(size=(101, rank)).astype(dtype), np.tril(rng.normal(size=(rank, rank))).astype(dtype)
    for matrix in (lower, np.ascontiguousarray(lower.T), np.zeros_like(lower)):
        out, status = np.empty_like(rows), np.zeros(101, np.int32)
        _als.times_panels(out, rows, *_als.panels(matrix), status, 2)
        np.testing.assert_allclose(out, rows @ matrix, rtol=1e-4, atol=1e-4)
        again = rows.copy()
        _als.times_panels(again, again, *_als.panels(matrix), status, 1)
        np.testing.assert_array_equal(again, out)
        assert not status.any()
    rows[7] = np.inf
    _als.times_panels(out, rows, *_als.panels(lower), status, 2)
    assert np.flatnonzero(status).tolist() == [7]
    assert status[7] == _als.NON_FINITE


def test_inverse_root():
    rows = np.random.default_rng(0).normal(size=(50, 20))
    matrix = rows.T @ rows
    inverse = _als.inverse_root(matrix, 1e-15)
    np.testing.assert_allclose(inverse @ matrix @ inverse.T, np.eye(20), atol=1e-12)
    assert not np.triu(inverse, 1).any()
    assert _als.inverse_root(-matrix, 1e-15) is None
    assert _als.inverse_root(np.ones((2, 2)), 1e-15) is None
