"""Sparse layouts against their plain twins in `reference`, and the laws they keep."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf import Ratings, _formats, formats
from hybridmf.core import validate as _validate
from hybridmf.errors import DuplicateEntriesError, RatingsError
from support import reference

# The paper's Fig. 6 first row block (4.1.1): four nonzeros in tile 0 in columns 0, 2 | 0, 1; two in tile 1.
PAPER_BLOCK = np.array([[3, 0, 1, 0, 2, 0], [2, 4, 0, 5, 0, 0]], dtype=np.float32)


@st.composite
def matrices(draw, max_side: int = 24):
    """Small CSR matrices: empty rows and columns, explicit zeros, float32 or float64, one very long row sometimes."""
    m, n = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random((m, n)) < draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    if draw(st.booleans()):
        mask[rng.integers(m)] = True
    rows, columns = np.nonzero(mask)
    values = rng.integers(0, 5, len(rows)).astype(draw(st.sampled_from([np.float32, np.float64])))
    return sp.csr_array((values, (rows, columns)), shape=(m, n))


def assert_same_csr(actual: sp.csr_array, expected: sp.csr_array) -> None:
    """The same arrays, explicit zeros included."""
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual.indptr, expected.indptr)
    np.testing.assert_array_equal(actual.indices, expected.indices)
    np.testing.assert_array_equal(actual.data, expected.data)


def test_assert_same_csr_notices_each_array():
    base = sp.csr_array(PAPER_BLOCK)
    for name in ("indptr", "indices", "data"):
        other = base.copy()
        getattr(other, name)[1] += 1
        with pytest.raises(AssertionError):
            assert_same_csr(other, base)


# ------------------------------------------------------------------------------------------------------- BALS


def test_bals_arrays_of_the_papers_example():
    bals = formats.BalsMatrix.from_csr(sp.csr_array(PAPER_BLOCK), tile_rows=2, tile_cols=3)
    assert bals.tile_colidx.tolist() == [
        0,
        2,
        1,
        4,
        3,
    ]  # "the elements of the tile_colidx array are 0, 2, 1 for tile 0"
    assert bals.tile_ptr.tolist() == [0, 3, 5]
    assert bals.seg_colidx.tolist() == [0, 1, 0, 2, 0, 1]
    assert bals.seg_ptr.tolist() == [0, 2, 4, 5, 6]
    assert bals.values.tolist() == [3, 1, 2, 4, 2, 5]
    assert bals.redundancy == 1
    assert bals.nnz == 6
    assert "2 x 3" in repr(bals)


@settings(max_examples=60)
@given(matrices(), st.integers(1, 30), st.integers(1, 30), st.sampled_from([1, 2, 3]))
def test_bals_equals_the_definition_and_round_trips(matrix, tile_rows, tile_cols, threads):
    bals = formats.BalsMatrix.from_csr(matrix, tile_rows, tile_cols, num_threads=threads)
    for name, expected in reference.bals(matrix, tile_rows, tile_cols).items():
        np.testing.assert_array_equal(getattr(bals, name), expected, err_msg=name)
    assert len(bals.seg_ptr) == matrix.shape[0] * -(-matrix.shape[1] // tile_cols) + 1
    assert bals.values.dtype == matrix.dtype
    assert_same_csr(bals.to_csr(num_threads=threads), matrix)


@functools.cache
def big_matrix(m: int = 3000, n: int = 700, nnz: int = 90_000, seed: int = 0) -> sp.csr_array:
    """Large enough for several threads; skewed columns."""
    rng = np.random.default_rng(seed)
    columns = np.minimum((n * rng.random(nnz) ** 3).astype(int), n - 1)
    matrix = sp.coo_array((np.ones(nnz, np.float32), (rng.integers(0, m, nnz), columns)), shape=(m, n)).tocsr()
    matrix.data = rng.random(matrix.nnz, dtype=np.float32)
    return matrix


@pytest.mark.parametrize("tile_rows", [1, 63, 64, 65, 3000, 4000])
@pytest.mark.parametrize("tile_cols", [1, 31, 32, 33, 700, 900])
def test_bals_threads_and_tile_edges(tile_rows, tile_cols):
    matrix = big_matrix()
    one = formats.BalsMatrix.from_csr(matrix, tile_rows, tile_cols, num_threads=1)
    four = formats.BalsMatrix.from_csr(matrix, tile_rows, tile_cols, num_threads=4)
    for name in ("values", "tile_colidx", "tile_ptr", "seg_colidx", "seg_ptr"):
        np.testing.assert_array_equal(getattr(one, name), getattr(four, name))
    assert_same_csr(four.to_csr(num_threads=4), matrix)


def test_bals_statistics_count_vacancies_as_table_3():
    dense = np.zeros((4, 6), dtype=np.float32)
    dense[0, 0] = dense[1, 0] = 1  # tile (0, 0): one column used twice
    dense[2, 4] = 1  # tile (1, 1): its other row is a vacant segment
    statistics = formats.BalsMatrix.from_csr(sp.csr_array(dense), tile_rows=2, tile_cols=3).statistics()
    assert statistics["tiles"] == 4
    assert statistics["vacant_tiles"] == 2
    assert statistics["vacant_tile_share"] == 0.5
    assert statistics["segments"] == 8
    assert statistics["vacant_segments"] == 1  # row 3 in tile (1, 1); those of vacant tiles do not count
    assert statistics["vacant_segment_share"] == 1 / 8
    assert statistics["redundancy"] == 1
    assert statistics["reuse_factor"] == 3 / 2
    assert statistics["csr_bytes"] == 3 * 8 + 5 * 4
    assert statistics["bals_bytes"] == 4 * (3 + 3 + 2 + 5 + 9)


def test_int64_offsets_where_the_limit_demands_them(monkeypatch):
    matrix = big_matrix()
    narrow = formats.BalsMatrix.from_csr(matrix, 64, 64, num_threads=2)
    monkeypatch.setattr(_validate, "INT32_LIMIT", matrix.nnz - 1)
    wide = formats.BalsMatrix.from_csr(matrix, 64, 64, num_threads=2)
    assert narrow.seg_ptr.dtype == narrow.tile_ptr.dtype == np.int32
    assert wide.seg_ptr.dtype == wide.tile_ptr.dtype == np.int64
    np.testing.assert_array_equal(wide.seg_ptr, narrow.seg_ptr)
    np.testing.assert_array_equal(wide.tile_colidx, narrow.tile_colidx)
    back = wide.to_csr()
    assert back.indptr.dtype == np.int64
    assert back.indices.dtype == np.int32
    assert_same_csr(back, matrix)
    assert wide.statistics()["vacant_segments"] == narrow.statistics()["vacant_segments"]


def test_bals_refuses_what_it_cannot_lay_out(monkeypatch):
    matrix = sp.csr_array(PAPER_BLOCK)
    for name in ("tile_rows", "tile_cols"):
        with pytest.raises(ValueError, match=f"{name} must satisfy .*got 0"):
            formats.BalsMatrix.from_csr(matrix, **{name: 0})
    with pytest.raises(ValueError, match="tile_rows must satisfy"):
        formats.BalsMatrix.from_csr(matrix, tile_rows=2**63 - 1)
    monkeypatch.setattr(formats, "MAX_SEGMENTS", 11)
    with pytest.raises(ValueError, match=r"tile_cols=1 gives 2 x 6 segments.*choose wider tiles"):
        formats.BalsMatrix.from_csr(matrix, tile_cols=1)
    unsorted = matrix.copy()
    unsorted.indices = unsorted.indices[::-1].copy()
    unsorted.has_sorted_indices = True  # a lie that must not be believed
    with pytest.raises(RatingsError, match=r"row 0 .*sort_indices"):
        formats.BalsMatrix.from_csr(unsorted)
    repeated = sp.csr_array((np.ones(2, np.float32), np.array([1, 1]), np.array([0, 2])), shape=(1, 3))
    with pytest.raises(DuplicateEntriesError, match=r"row 0, column 1"):
        formats.BalsMatrix.from_csr(repeated)
    with pytest.raises(TypeError, match="csr must be"):
        formats.BalsMatrix.from_csr("matrix")


def test_layouts_accept_ratings_dense_and_other_formats():
    expected = formats.BalsMatrix.from_csr(sp.csr_array(PAPER_BLOCK), 2, 3)
    for given_as in (
        PAPER_BLOCK,
        sp.csc_array(PAPER_BLOCK),
        sp.coo_matrix(PAPER_BLOCK),
        Ratings.from_matrix(PAPER_BLOCK),
    ):
        np.testing.assert_array_equal(formats.BalsMatrix.from_csr(given_as, 2, 3).seg_ptr, expected.seg_ptr)


def test_empty_matrices_have_layouts():
    for shape in ((3, 4), (1, 1)):
        bals = formats.BalsMatrix.from_csr(sp.csr_array(shape, dtype=np.float32), 2, 3)
        assert bals.nnz == 0
        assert bals.statistics()["vacant_tile_share"] == 1
        assert_same_csr(bals.to_csr(), sp.csr_array(shape, dtype=np.float32))


# ------------------------------------------------------------------------------------------------ the fast check


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_is_canonical_finds_each_fault_wherever_it_is(dtype, threads):
    matrix = _validate.as_csr(big_matrix().astype(dtype), dtype=dtype)
    indptr, indices, data = _validate.csr_arrays(matrix)
    assert _formats.is_canonical(indptr, indices, data, 700, threads)
    assert not _formats.is_canonical(indptr, indices, data, int(indices.max()), threads)
    for row in (0, 1500, 2999):
        first, last = indptr[row], indptr[row + 1] - 1
        for name, place, value in (
            ("indices", first, -1),
            ("indices", last, 700),
            ("indices", last, indices[last - 1]),
            ("indices", first, indices[first + 1] + 1),
            ("data", first, np.nan),
            ("data", last, np.inf),
            ("data", last, -np.inf),
        ):
            arrays = {"indices": indices.copy(), "data": data.copy()}
            arrays[name][place] = value
            assert not _formats.is_canonical(indptr, arrays["indices"], arrays["data"], 700, threads)
    largest = data.copy()
    largest[:2] = np.finfo(dtype).max, np.finfo(dtype).tiny
    assert _formats.is_canonical(indptr, indices, largest, 700, threads)


# --------------------------------------------------------------------------------------- transposition and order


@settings(max_examples=40)
@given(matrices())
def test_transpose_is_scipys(matrix):
    assert_same_csr(formats.transpose(matrix), sp.csr_array(matrix.T.tocsr()))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_transpose_in_parallel(threads):
    matrix = big_matrix()
    assert_same_csr(formats.transpose(matrix, num_threads=threads), sp.csr_array(matrix.T.tocsr()))


@pytest.mark.parametrize("parts", [1, 2])
def test_transpose_with_wide_cursors(parts):
    """The 64-bit cursors that serve more than 2^31 entries, on a small matrix."""
    matrix = big_matrix(m=1000, nnz=40_000)
    arrays = _formats.transpose(*_validate.csr_arrays(_validate.as_csr(matrix)), matrix.shape[1], parts, wide=True)
    np.testing.assert_array_equal(arrays[1], matrix.T.tocsr().indices)
    np.testing.assert_array_equal(arrays[2], matrix.T.tocsr().data)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_coordinates_by_column_keep_their_order(threads, wide):
    """Repeated pairs included: more coordinates than cells."""
    rng = np.random.default_rng(threads)
    rows, columns = (rng.integers(0, 150, 60_000, dtype=np.int32) for _ in range(2))
    data = np.arange(60_000, dtype=np.float64)
    indptr, found, values = _formats.by_column(rows, columns, data, 151, threads, wide=wide)
    order = np.argsort(columns, kind="stable")
    np.testing.assert_array_equal(indptr, np.concatenate(([0], np.cumsum(np.bincount(columns, minlength=151)))))
    np.testing.assert_array_equal(found, rows[order])
    np.testing.assert_array_equal(values, data[order])


def test_no_coordinates_by_column():
    nothing = np.empty(0, np.int32)
    for n_cols in (0, 3):
        indptr, rows, values = _formats.by_column(nothing, nothing, np.empty(0, np.float32), n_cols)
        assert indptr.tolist() == [0] * (n_cols + 1) and len(rows) == len(values) == 0


@settings(max_examples=40)
@given(matrices(), st.booleans(), st.booleans())
def test_reorder_is_algorithm_3(matrix, rows, cols):
    result = formats.reorder(matrix, rows=rows, cols=cols)
    row_degrees, col_degrees = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    identity = [np.arange(size) for size in matrix.shape]
    np.testing.assert_array_equal(result.row_order, reference.degree_order(row_degrees) if rows else identity[0])
    np.testing.assert_array_equal(result.col_order, reference.degree_order(col_degrees) if cols else identity[1])
    np.testing.assert_array_equal(result.matrix.toarray(), matrix.toarray()[result.row_order][:, result.col_order])
    assert result.matrix.nnz == matrix.nnz
    assert _formats.row_order_status(*_validate.csr_arrays(result.matrix)[:2])[0] == _formats.SORTED_UNIQUE
    np.testing.assert_array_equal(result.row_inverse[result.row_order], identity[0])
    np.testing.assert_array_equal(result.col_inverse[result.col_order], identity[1])
    np.testing.assert_array_equal(result.inverse_rows(result.matrix.toarray())[:, result.col_inverse], matrix.toarray())
    np.testing.assert_array_equal(result.inverse_cols(result.col_order), identity[1])


def test_reorder_in_parallel_and_its_errors():
    matrix = big_matrix()
    one, three = (formats.reorder(matrix, num_threads=threads) for threads in (1, 3))
    assert_same_csr(one.matrix, three.matrix)
    np.testing.assert_array_equal(formats.degree_order(matrix), one.row_order)
    with pytest.raises(ValueError, match=r"X has shape \(5,\); expected 3000 rows"):
        one.inverse_rows(np.zeros(5))
    with pytest.raises(ValueError, match=r"Y has shape \(\)"):
        one.inverse_cols(0)
    with pytest.raises(TypeError, match="rows must be True or False"):
        formats.reorder(matrix, rows="yes")


def test_reordering_gathers_entries_in_fewer_tiles():
    rng = np.random.default_rng(0)
    matrix = formats.reorder(big_matrix()).matrix[rng.permutation(3000)][:, rng.permutation(700)].tocsr()
    matrix.sort_indices()
    before = formats.BalsMatrix.from_csr(matrix, 64, 64).statistics()
    after = formats.BalsMatrix.from_csr(formats.reorder(matrix).matrix, 64, 64).statistics()
    assert after["reuse_factor"] > before["reuse_factor"]


@pytest.mark.parametrize("threads", [0, -1, 2.0, True])
def test_thread_counts_are_validated(threads):
    with pytest.raises((ValueError, TypeError), match="num_threads must"):
        formats.transpose(big_matrix(), num_threads=threads)
    if not isinstance(threads, (bool, float)):
        with pytest.raises(ValueError, match="num_threads must be >= 1"):
            _formats.transpose(*_validate.csr_arrays(_validate.as_csr(big_matrix())), 700, threads)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_has_zeros_finds_one_wherever_it_is(dtype):
    data = np.full(200_000, np.nan, dtype)
    assert not _formats.has_zeros(data) and not _formats.has_zeros(data[:0])
    for at in (0, 65_535, 65_536, 199_999):
        for zero in (0.0, -0.0):
            data[at] = zero
            assert _formats.has_zeros(data, 2)
            data[at] = 5e-324 if dtype == "float64" else 1e-45
            assert not _formats.has_zeros(data, 2)
