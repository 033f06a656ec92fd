"""Rows of matrices."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.core.sparse import RowColumns


def drawn(seed: int, n_rows: int = 9, n_columns: int = 13) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    matrix = sp.csr_array(rng.random((n_rows, n_columns)) < rng.random((n_rows, 1)), dtype=np.int8)
    return matrix


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 8), max_size=12))
def test_columns_of_rows_are_those_of_the_matrix(seed: int, rows: list[int]) -> None:
    matrix, positions = drawn(seed), np.array(rows, dtype=np.int64)
    taken = RowColumns.of(matrix, positions)
    expected = matrix.toarray()[positions]
    assert len(taken) == len(rows) and taken.n_entries == expected.sum()
    np.testing.assert_array_equal(taken.matrix().toarray(), expected)
    np.testing.assert_array_equal(taken.take(np.arange(len(rows))[::2]).matrix().toarray(), expected[::2])
    np.testing.assert_array_equal(RowColumns.of(matrix).matrix().toarray(), matrix.toarray())


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sets(st.integers(0, 12)))
def test_columns_are_added_to_each_row(seed: int, added: set[int]) -> None:
    rows = np.array([4, 0, 4, 8])
    expected = drawn(seed).toarray()[rows]
    expected[:, sorted(added)] = 1
    more = RowColumns.of(drawn(seed), rows).with_columns(np.array(sorted(added), dtype=np.int64))
    assert more.columns.dtype == np.int32 and more.first.dtype == more.last.dtype == np.int64
    np.testing.assert_array_equal(more.matrix().toarray(), expected)
    np.testing.assert_array_equal(more.matrix().sorted_indices().indices, more.matrix().indices)


@pytest.mark.parametrize("added", [[], [2, 5]])
def test_rows_without_entries(added: list[int]) -> None:
    none = RowColumns.none(3, 7)
    assert none.matrix().shape == (3, 7) and none.n_entries == 0
    more = none.with_columns(np.array(added, dtype=np.int64)).matrix().toarray()
    assert more.sum() == 3 * len(added) and (more[:, added] == 1).all()


def test_no_entry_is_copied() -> None:
    matrix = drawn(0)
    assert np.shares_memory(RowColumns.of(matrix, np.array([3])).columns, matrix.indices)
    assert np.shares_memory(RowColumns.of(matrix, np.arange(2, 6)).matrix().indices, matrix.indices)
