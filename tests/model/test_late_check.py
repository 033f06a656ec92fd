"""Large matrices that a thread checks and copies while the fit uploads them to a GPU, which checks them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.gpu import intake
from hybridmf.model import late
from support.ratings import planted

MATRIX = planted(60, 40, 0.3)
# SciPy's are int64 in some versions, which are never checked late
MATRIX.indices, MATRIX.indptr = MATRIX.indices.astype(np.int32), MATRIX.indptr.astype(np.int32)


def fit(matrix: Any, kind: Any = hmf.ImplicitALS, **options: Any) -> Any:
    return kind(factors=4, iterations=1, random_state=0, device="cuda").fit(matrix, **options)


def put(part: str, where: Any, value: Any) -> Callable[[sp.csr_array], None]:
    def change(matrix: sp.csr_array) -> None:
        getattr(matrix, part)[where] = value

    return change


CHANGES: dict[str, Callable[[sp.csr_array], None]] = {
    "nothing": put("data", 0, 3.0),
    "index too large": put("indices", 3, 99),
    "negative index": put("indices", 3, -2),
    "not a number": put("data", 4, np.nan),
    "infinite": put("data", -1, -np.inf),
    "repeated pair": lambda matrix: put("indices", 1, matrix.indices[0])(matrix),
    "unsorted": lambda matrix: put("indices", slice(0, 2), matrix.indices[[1, 0]])(matrix),
    "zero": put("data", 4, 0.0),
    "only zeros": put("data", slice(None), 0.0),
    "indptr falls": put("indptr", 3, 0),
    "indptr beyond the entries": put("indptr", -1, 10_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_late_check_finds_what_an_early_one_does(change: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for entries in (1, 1 << 40):
        monkeypatch.setattr(late, "LATE_ENTRIES", entries)
        matrix = MATRIX.copy()
        CHANGES[change](matrix)
        try:
            found.append(fit(matrix))
        except ValueError as error:
            found.append((type(error), str(error)))
    ours, theirs = found
    if isinstance(ours, tuple):
        assert ours == theirs
        return
    for name in ("user_factors", "item_factors"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    ours, theirs = ours._learned, theirs._learned
    np.testing.assert_array_equal(ours.values, theirs.values)
    np.testing.assert_array_equal(ours.seen.toarray(), theirs.seen.toarray())
    assert ours.total == theirs.total


def test_no_kernel_reads_entries_that_failed(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that transpose write where indices say."""
    if gpu.spec.name != "emulated":
        pytest.skip("only an emulated device tells what was launched")
    monkeypatch.setattr(late, "LATE_ENTRIES", 1)
    matrix = MATRIX.copy()
    matrix.indices[3] = 1 << 30
    with pytest.raises(hmf.errors.RatingsError, match="out of range at entry 3"):
        fit(matrix)
    assert gpu.launches == ["count_faults"]


def test_the_check_starts_after_the_upload(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the host's memory, and the GPU waits for the upload only."""
    monkeypatch.setattr(late, "LATE_ENTRIES", 1)
    happened: list[str] = []

    def noting(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def noted(*arguments: Any) -> Any:
            try:
                return plain(*arguments)
            finally:
                happened.append(name)

        monkeypatch.setattr(module, name, noted)

    noting(late, "_checked")
    noting(intake, "uploaded")
    assert fit(MATRIX, hmf.ExplicitALS)._learned.seen.nnz == MATRIX.nnz  # waits for the check
    assert happened == ["uploaded", "_checked"]


def test_later_changes_have_no_effect(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "LATE_ENTRIES", 1)
    matrix = MATRIX.copy()

    def change(model: Any, record: Any) -> None:
        matrix.indices[:], matrix.data[:] = 0, 77

    learned = fit(matrix, hmf.ExplicitALS, callback=change)._learned
    np.testing.assert_array_equal(learned.seen.indices, MATRIX.indices)
    np.testing.assert_array_equal(learned.values, MATRIX.data)


def test_other_fits_wait_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "LATE_ENTRIES", 1)
    assert hmf.ImplicitALS(device="cpu")._late_matrix(MATRIX) is None
    model = hmf.ImplicitALS(device="auto", factors=7, iterations=1, random_state=0)
    assert model._late_matrix(MATRIX.astype(np.float64)) is None
    assert model._late_matrix(MATRIX.tocoo()) is None
    assert model._late_matrix(hmf.Ratings.from_matrix(MATRIX)).nnz == MATRIX.nnz
    alone = hmf.ImplicitALS(device="cpu", factors=7, iterations=1, random_state=0).fit(MATRIX)
    np.testing.assert_array_equal(model.fit(MATRIX).user_factors, alone.user_factors)  # "auto" takes the CPU
