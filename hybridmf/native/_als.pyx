"""Half sweeps of alternating least squares on multicore CPUs (Gates et al., IEEE Big Data 2015, figs. 4-6).

For each row u of the target side, with entries k = (row u, fixed row i_k, rating r_k)

    A = G + lambda s_u I + sum_k w_k y_k y_k^T        b = sum_k t_k y_k        solve A x = b

    explicit   w = 1                     t = r - offset_i               G = 0
    implicit   w = 1 + alpha |r| - w0    t = 1 + alpha |r|  if r > 0    G = w0 F^T F   (w0: unobserved weight)
                                         t = 0              otherwise

Explicit entries may have weights of their own: then w is the weight, and t = w (r - offset_i). A row may have a pull, a
vector that b starts from: the penalty lambda s_u |x - m|^2 about a point m adds lambda s_u m to b.

rank1   fig. 5: one symmetric rank-1 update (Level-2 BLAS) per entry
blas3   ours of fig. 6: rows sqrt|w| y gathered into a workspace, then one syrk (Level-3 BLAS) per full workspace
gemm    fig. 6 as printed: w y and y gathered into two workspaces, then one gemm of both; rows in the given order, 200
        at a time (`BLOCK_ROWS`)
simd    ours: rows gathered with prefetching into an L1-sized workspace, b in the same pass; register-blocked symmetric
        update of the needed triangle; our own Cholesky, while A is still in cache: small systems one in each lane of a
        vector, large ones in pairs (kernels_impl.h). Rows of at most `dual_up_to` entries take the dual form.
        `nonnegative_rows` forms A by the same kernels and finds the minimum by descent
bals    the kernels of simd over BALS tiles: a tile's distinct rows are copied once for all its segments

The dual form of a row with n entries solves n equations in place of `rank` (docs/methods.md derives it). With Y the
rows of its entries,

    explicit   K = Y Y^T + lambda s_u I    x = Y^T v,        K v = t
               a bias with penalty lambda_b adds lambda / lambda_b to all elements of Y Y^T
    implicit   K = I + S Y Y^T S           x = Y^T (S q),    K q = S^-1 t,  S^2 = diag(w)
               in a basis where G + lambda I is the unit matrix; the caller changes the basis (`times_panels`).
               Longer rows then take the primal form with G = I and no ridge.
    With a pull, x is a base plus the solution for the targets that the base leaves, t - w Y base: the base is the pull
    divided by the ridge (explicit), or the pull in that basis (implicit).

Parallel over rows (bals: row blocks) with dynamic scheduling, because rows differ in degree; longest first, so that
no thread is left with a long row at the end. One thread owns a row from assembly to solution and calls BLAS and
LAPACK with one thread, so results do not depend on the number of threads. Threads share rows beyond LONG_ROW entries
(simd): they sum segments of fixed size, whose sums are added in order. A and the workspace of a thread stay in its
cache. Only one triangle of A is filled: the lower one in column-major, the upper one in row-major order.
"""

import numpy as np

from cython.parallel cimport prange
from libc.math cimport fabs, isfinite, sqrt
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset
from scipy.linalg.cython_blas cimport dgemm, dsyrk, sgemm, ssyrk
from scipy.linalg.cython_lapack cimport dpotrf, dpotrs, spotrf, spotrs

from hybridmf._openmp cimport hmf_thread_id, hmf_usable_threads
from hybridmf.native._kernels cimport hmf_kernels, hmf_kernels_named
from hybridmf.native.kernels cimport (
    HMF_LANES,
    HMF_LANES_RANK,
    HMF_PAD,
    HMF_PANEL,
    HMF_PREFETCH,
    HMF_SYSTEMS,
    apply_rows,
    axpy,
    cholesky,
    cholesky_lanes,
    combine,
    dot,
    dot_exact,
    gather,
    hmf_kernel_table,
    hmf_rows,
    products,
    real,
    sum_rows,
    syr,
    syrk_upper,
    weigh,
)
from hybridmf.native.kernels cimport score as times_panel

# Assemblies, as the plan names them.
RANK1 = 0
BLAS3 = 1
SIMD = 2
GEMM = 3
cdef int _RANK1 = 0, _SIMD = 2, _GEMM = 3

# Any other status is the order of the leading minor that is not positive.
OK = 0
NON_FINITE = -1
NEGATIVE_CURVATURE = -2
UNFINISHED = -3                       # of `nonnegative_rows`, for the caller to solve
cdef int32_t _NON_FINITE = -1, _NEGATIVE_CURVATURE = -2, _UNFINISHED = -3

# Rows gathered before a syrk: 64 KB at f = 64 in float32, which leaves room for A in a 256 KB L2.
GATHER_ROWS = 256
cdef Py_ssize_t _GATHER_ROWS = 256

# Bytes of the rows gathered for one symmetric update: two thirds of a 48 KB L1; the rest is for tiles of A.
cdef Py_ssize_t SIMD_GATHER_BYTES = 32 * 1024

# Conjugate gradients: entries whose weights are computed at a time; rows of implicit feedback whose products with the
# Gram matrix are one, and the most bytes of the factors of their entries, which then stay in L2 between the steps.
cdef enum:
    CG_CHUNK = 256
    CG_TOGETHER = 8
    CG_BYTES = 1 << 18

# Non-negative rows: maximum number of sweeps, and sweeps between exact solutions of the free coordinates.
cdef enum:
    MOST_SWEEPS = 1000
    FREE_SWEEPS = 4

# Largest rank for our Cholesky; beyond it A no longer fits in L2, and LAPACK's larger blocks are faster.
OWN_CHOLESKY_RANK = 512
cdef Py_ssize_t _OWN_CHOLESKY_RANK = 512

# simd: threads share longer rows in segments, so that no thread ends alone with a popular item. The numbers are fixed:
# the order of summation must not depend on the thread count.
LONG_ROW = 32768
SEGMENTS = 64
cdef Py_ssize_t _SEGMENT = 8192, _SEGMENTS = 64

# Rows of a partial sum of the Gram matrix at least, and bytes of those summed in one syrk, in float64: most of a 32 KB
# L1. Fixed, so that the sum does not depend on the thread count.
cdef Py_ssize_t GRAM_ROWS = 512, GRAM_BYTES = 24 * 1024

# Rows a thread takes at a time. One at a time would balance best; 8 reduces contention for the shared counter.
# Gates et al. take NB = 200 (section III).
cdef enum:
    ROW_CHUNK = 8
    BLOCK_ROWS = 200

# Rows between a prefetch and its use, and entries prefetched of each row; kernels prefetch the rest.
cdef enum:
    ROWS_AHEAD = 2
    ENTRIES_AHEAD = 16

# Rows per task in a product with a small matrix.
cdef enum:
    PRODUCT_ROWS = 48


cdef struct Weights:
    # parameters that turn a rating into a weight and a target; see the module docstring
    bint implicit
    double alpha
    double unobserved


cdef struct Systems:
    # shared by the systems of a half sweep; `void` arrays hold `real`, since structs have no fused types
    const hmf_kernel_table* table
    Weights how
    Py_ssize_t rank
    const void* fixed           # (n_fixed, rank)
    const void* offsets         # (n_fixed,) subtracted from the ratings, or NULL
    const void* gram            # times the unobserved weight: (rank, rank), simd and bals (ld, ld) zero-padded; or NULL
    const void* ridge           # (rank,) lambda, lambda_b for a bias
    Py_ssize_t dual_up_to       # entries of the longest row that takes the dual form
    double bias_square          # lambda / lambda_b where the last column of `fixed` is a bias's, else 0
    double epsilon              # pivots up to this share of their diagonal element count as zero


cdef struct Rows:
    # all rows of the target side
    const int64_t* indptr
    const int32_t* indices
    const char* ratings
    Py_ssize_t itemsize         # of a rating
    const double* scale         # (n_rows,)
    const char* pull            # (n_rows, rank) or NULL
    Py_ssize_t pull_stride      # bytes of a row of it
    const char* weights         # (nnz,) of explicit entries, or NULL: 1


cdef struct Tiles:
    # all rows of the target side, in the BALS format
    const char* values
    const int32_t* tile_colidx
    const int64_t* tile_ptr
    const int32_t* seg_colidx
    const int64_t* seg_ptr
    Py_ssize_t itemsize         # of a value
    const double* scale         # (n_rows,)
    const void* pull            # (n_rows, rank) or NULL
    Py_ssize_t n_rows, tile_rows, tile_cols, n_tile_cols


cdef struct RowEntries:
    # entries of one row or of a part of it
    const int32_t* columns      # (n,)
    const void* ratings         # (n,)
    Py_ssize_t n
    double scale                # s_u
    const void* pull            # (rank,) that b starts from, or NULL
    const void* weights         # (n,) of explicit entries, or NULL


cdef Systems _systems(given, const real[:, ::1] out):
    """The C struct of a `hybridmf.native.arguments.Systems`, which owns the arrays; `out` selects their type."""
    cdef const real[:, ::1] fixed = given.fixed, gram_matrix = given.gram
    cdef const real[::1] offsets = given.offsets, ridge = given.ridge
    cdef const real* offset_pointer = &offsets[0] if offsets.shape[0] else NULL
    cdef const real* gram_pointer = &gram_matrix[0, 0] if gram_matrix.shape[0] else NULL
    return Systems(hmf_kernels(), Weights(given.implicit, given.alpha, given.unobserved), fixed.shape[1], &fixed[0, 0],
                   offset_pointer, gram_pointer, &ridge[0], given.dual_up_to, given.bias_square, given.epsilon)


cdef const char* _pull_pointer(given, const real[:, ::1] out) except? NULL:
    """The rows of a pull, of the shape of `out`, which selects their type; NULL for None."""
    cdef const real[:, ::1] pull
    if given is None:
        return NULL
    pull = given
    assert pull.shape[0] == out.shape[0] and pull.shape[1] == out.shape[1]
    return <const char*> &pull[0, 0]


cdef Rows _rows(given, const real[:, ::1] out):
    """The C struct of a `hybridmf.native.arguments.Rows`, which owns the arrays."""
    cdef const int64_t[::1] indptr = given.indptr
    cdef const int32_t[::1] indices = given.indices
    cdef const real[::1] ratings = given.ratings, weights
    cdef const double[::1] scale = given.scale
    cdef const char* weight_pointer = NULL
    if given.weights is not None:
        weights = given.weights
        weight_pointer = <const char*> &weights[0]
    return Rows(&indptr[0], &indices[0], <const char*> &ratings[0], sizeof(real), &scale[0],
                _pull_pointer[real](given.pull, out), out.shape[1] * sizeof(real), weight_pointer)


cdef Tiles _tiles(given, const real[:, ::1] out, Py_ssize_t n_fixed):
    """The C struct of a `hybridmf.native.arguments.Tiles`, which owns the arrays."""
    cdef const real[::1] values = given.values
    cdef const int32_t[::1] tile_colidx = given.tile_colidx, seg_colidx = given.seg_colidx
    cdef const int64_t[::1] tile_ptr = given.tile_ptr, seg_ptr = given.seg_ptr
    cdef const double[::1] scale = given.scale
    cdef Py_ssize_t tile_rows = given.tile_rows, tile_cols = given.tile_cols
    return Tiles(<const char*> &values[0], &tile_colidx[0], &tile_ptr[0], &seg_colidx[0], &seg_ptr[0], sizeof(real),
                 &scale[0], _pull_pointer[real](given.pull, out), out.shape[0], tile_rows, tile_cols,
                 (n_fixed + tile_cols - 1) // tile_cols)


cdef inline RowEntries _part(const Rows* rows, Py_ssize_t row, Py_ssize_t start, Py_ssize_t n) noexcept nogil:
    """`n` entries of a row, from position `start` in the matrix on."""
    cdef const void* pull = NULL
    cdef const void* weights = NULL
    if rows.pull != NULL:
        pull = rows.pull + row * rows.pull_stride
    if rows.weights != NULL:
        weights = rows.weights + start * rows.itemsize
    return RowEntries(rows.indices + start, rows.ratings + start * rows.itemsize, n, rows.scale[row], pull, weights)


cdef inline RowEntries _entries(const Rows* rows, Py_ssize_t row) noexcept nogil:
    return _part(rows, row, rows.indptr[row], rows.indptr[row + 1] - rows.indptr[row])


cdef inline hmf_rows _fixed_rows(const Systems* systems, const int32_t* columns, Py_ssize_t n) noexcept nogil:
    return hmf_rows(n, systems.rank, systems.rank, systems.fixed, columns)


cdef inline double _weight(Weights how, double rating) noexcept nogil:
    return 1.0 + how.alpha * fabs(rating) - how.unobserved if how.implicit else 1.0


cdef inline double _target(Weights how, double rating, double offset) noexcept nogil:
    if how.implicit:
        return 1.0 + how.alpha * fabs(rating) if rating > 0 else 0.0
    return rating - offset


def instruction_set():
    """Name of the kernel table in use: "avx512", "avx2", "neon" or "portable" (HYBRIDMF_ISA chooses a lower one)."""
    return hmf_kernels().name.decode()


def can_run(str name):
    """Whether this processor can run the kernels called `name`."""
    return hmf_kernels_named(name.encode()) != NULL


# ---------------------------------------------------------------------------------------------------- BLAS, LAPACK


ctypedef void (*Syrk)(char*, char*, int*, int*, void*, void*, int*, void*, void*, int*) noexcept nogil
ctypedef void (*Gemm)(
    char*, char*, int*, int*, int*, void*, void*, int*, void*, int*, void*, void*, int*
) noexcept nogil
ctypedef void (*Potrf)(char*, int*, void*, int*, int*) noexcept nogil
ctypedef void (*Potrs)(char*, int*, int*, void*, int*, void*, int*, int*) noexcept nogil

cdef struct Library:
    # SciPy's BLAS and LAPACK, or those of `use_blas`, in float32 and float64
    Syrk syrk[2]
    Gemm gemm[2]
    Potrf potrf[2]
    Potrs potrs[2]

cdef Library scipys
scipys.syrk[0], scipys.syrk[1] = <Syrk> ssyrk, <Syrk> dsyrk
scipys.gemm[0], scipys.gemm[1] = <Gemm> sgemm, <Gemm> dgemm
scipys.potrf[0], scipys.potrf[1] = <Potrf> spotrf, <Potrf> dpotrf
scipys.potrs[0], scipys.potrs[1] = <Potrs> spotrs, <Potrs> dpotrs
cdef Library library = scipys


def use_blas(addresses):
    """Call another BLAS and LAPACK, to compare libraries; not while a fit runs.

    SciPy's OpenBLAS takes one lock of the process in every call, so calls for small matrices do not scale over threads.

    Parameters
    ----------
    addresses : dict of str to int, or None
        Addresses of ssyrk, dsyrk, sgemm, dgemm, spotrf, dpotrf, spotrs and dpotrs, with 32-bit integers by reference as
        in Fortran. None: those of SciPy.
    """
    global library
    cdef Library given
    cdef int k
    if addresses is None:
        library = scipys
        return
    for k, kind in enumerate("sd"):
        given.syrk[k] = <Syrk> <size_t> addresses[f"{kind}syrk"]
        given.gemm[k] = <Gemm> <size_t> addresses[f"{kind}gemm"]
        given.potrf[k] = <Potrf> <size_t> addresses[f"{kind}potrf"]
        given.potrs[k] = <Potrs> <size_t> addresses[f"{kind}potrs"]
    library = given


cdef inline void _syrk(int n, int k, real alpha, real* rows, real beta, real* a) noexcept nogil:
    """Lower triangle of a (n x n) = beta a + alpha sum of rows^T rows; rows (k, n) row-major."""
    library.syrk[sizeof(real) // 8](b"L", b"N", &n, &k, &alpha, rows, &n, &beta, a, &n)


cdef inline void _gemm(int n, int k, real* v, real* w, real* a) noexcept nogil:
    """a (n x n) += v^T w; v and w (k, n) row-major."""
    cdef real one = 1
    library.gemm[sizeof(real) // 8](b"N", b"T", &n, &n, &k, &one, v, &n, w, &n, &one, a, &n)


cdef inline int32_t _cholesky_solve(int n, int ld, real* a, real* b, const real* diagonal,
                                    real epsilon) noexcept nogil:
    """b = a^-1 b by Cholesky, in place. Returns 0, the order of the failing leading minor, or NON_FINITE."""
    cdef int info = 0, one = 1, j
    cdef real pivot
    library.potrf[sizeof(real) // 8](b"L", &n, a, &ld, &info)
    if info != 0:
        return info
    for j in range(n):
        pivot = a[j * ld + j] * a[j * ld + j]
        if not isfinite(pivot):
            return _NON_FINITE
        # A pivot that is all cancellation shows a matrix singular to working precision, though potrf succeeded.
        if pivot <= epsilon * diagonal[j]:
            return j + 1
    library.potrs[sizeof(real) // 8](b"L", &n, &one, a, &ld, b, &n, &info)
    for j in range(n):
        if not isfinite(b[j]):
            return _NON_FINITE
    return 0


def gram(const real[:, ::1] factors, int n_threads, bint blas=False):
    """F^T F in float64; blocks of fixed size, added in order, give the same bits for any thread count.

    Parameters
    ----------
    factors : float32 or float64 array, shape (n_rows, rank)
    n_threads : int
    blas : bool
        Sum blocks by BLAS (Gates fig. 4), limited to one thread by the caller; else by our own kernel.

    Returns
    -------
    float64 array, shape (rank, rank)
    """
    cdef Py_ssize_t n_rows = factors.shape[0], rank = factors.shape[1], ld = _padded(rank)
    # At most 256 partial sums, fewer if large, each of at least GRAM_ROWS rows: independent of the thread count
    cdef Py_ssize_t most_parts = max(16, min(256, (1 << 23) // (ld * ld)))
    cdef Py_ssize_t rows_per_part = max(GRAM_ROWS, (n_rows + most_parts - 1) // most_parts)
    cdef Py_ssize_t n_parts = (n_rows + rows_per_part - 1) // rows_per_part
    cdef const hmf_kernel_table* table = hmf_kernels()
    n_threads = hmf_usable_threads(n_threads)
    parts = np.zeros((max(n_parts, 1), ld, ld))
    cdef double[:, :, ::1] part_view = parts
    cdef double[:, ::1] scratch = np.zeros((n_threads, _gram_rows(ld) * ld))
    cdef Py_ssize_t part
    for part in prange(n_parts, nogil=True, schedule="dynamic", num_threads=n_threads):
        _gram_part(table, factors, part * rows_per_part, min(n_rows, (part + 1) * rows_per_part), blas,
                   &scratch[hmf_thread_id(), 0], &part_view[part, 0, 0])
    total = np.triu(parts.sum(axis=0)[:rank, :rank])
    return total + np.triu(total, 1).T


cdef inline Py_ssize_t _gram_rows(Py_ssize_t ld) noexcept nogil:
    """Rows of the Gram matrix summed in one syrk."""
    return max(16, GRAM_BYTES // (8 * ld))


cdef void _gram_part(const hmf_kernel_table* table, const real[:, ::1] factors, Py_ssize_t start, Py_ssize_t stop,
                     bint blas, double* scratch, double* out) noexcept nogil:
    cdef Py_ssize_t row, end, k, j, rank = factors.shape[1], ld = _padded(rank)
    row = start
    while row < stop:
        end = min(row + _gram_rows(ld), stop)
        for k in range(end - row):
            for j in range(rank):
                scratch[k * ld + j] = factors[row + k, j]
        if blas:    # a lower triangle in column-major order is an upper one in row-major order
            _syrk[double](<int> ld, <int> (end - row), 1.0, scratch, 1.0, out)
        else:
            syrk_upper[double](table, end - row, ld, <const double*> scratch, 1.0, out)
        row = end


# -------------------------------------------------------------------------------------------------- one row's system


cdef void _start_system(
        const Systems* systems,
        double scale,              # IN   s_u
        const real* pull,          # IN   (rank,) that b starts from, or NULL
        Py_ssize_t ld,             # leading dimension of the Gram matrix and of A
        real* a, real* b) noexcept nogil:   # OUT (ld, ld), (ld,)
    cdef const real* ridge = <const real*> systems.ridge
    cdef Py_ssize_t j
    if systems.gram != NULL:
        memcpy(a, systems.gram, ld * ld * sizeof(real))
    else:
        memset(a, 0, ld * ld * sizeof(real))
    for j in range(systems.rank):
        a[j * ld + j] += <real> (scale * ridge[j])
    memset(b, 0, ld * sizeof(real))
    if pull != NULL:
        memcpy(b, pull, systems.rank * sizeof(real))


cdef inline double _entry_weight(const Systems* systems, const RowEntries* entries, Py_ssize_t k,
                                 const real* ratings) noexcept nogil:
    """Weight of entry k; `ratings` are those of `entries`, with their type."""
    if entries.weights != NULL:
        return (<const real*> entries.weights)[k]
    return _weight(systems.how, ratings[k])


cdef inline double _target_of(const Systems* systems, const RowEntries* entries, Py_ssize_t k,
                              const real* ratings) noexcept nogil:
    """Target of entry k; `ratings` are those of `entries`, with their type."""
    cdef double offset = 0.0
    if systems.offsets != NULL:
        offset = (<const real*> systems.offsets)[entries.columns[k]]
    if entries.weights != NULL:
        return (<const real*> entries.weights)[k] * _target(systems.how, ratings[k], offset)
    return _target(systems.how, ratings[k], offset)


cdef void _add_rank1(
        const Systems* systems, const RowEntries* entries,
        real* a, real* b) noexcept nogil:   # IN OUT
    """ALS_CORE of fig. 5: A += w y y^T, b += t y, entry by entry."""
    cdef const hmf_kernel_table* table = systems.table
    cdef const real* ratings = <const real*> entries.ratings
    cdef const real* y
    cdef Py_ssize_t k, rank = systems.rank
    for k in range(entries.n):
        y = <const real*> systems.fixed + entries.columns[k] * rank
        syr(table, rank, <real> _entry_weight(systems, entries, k, ratings), y, a)
        axpy(table, rank, <real> _target_of(systems, entries, k, ratings), y, b)


cdef void _add_blas3(
        const Systems* systems, const RowEntries* entries,
        bint printed,                       # by gemm, as printed
        real* gathered,                     # scratch (GATHER_ROWS, rank)
        real* a, real* b) noexcept nogil:   # IN OUT
    """ALS_CORE of fig. 6: gather sqrt|w| y, then syrk. Negative weights (w0 > 1) take a second pass that subtracts.

    As printed: gather v = w y and w = y, each in half of the scratch, then gemm; weights may have any sign.
    """
    cdef const real* ratings = <const real*> entries.ratings
    cdef Py_ssize_t k, j, rank = systems.rank, n_negative = 0
    cdef int filled = 0, sign, most = <int> (_GATHER_ROWS // 2 if printed else _GATHER_ROWS)
    cdef double weight
    cdef real root
    cdef const real* y
    cdef real* row
    for sign in range(1, -2, -2):
        if sign < 0 and n_negative == 0:
            break
        for k in range(entries.n):
            weight = sign * _entry_weight(systems, entries, k, ratings)
            y = <const real*> systems.fixed + entries.columns[k] * rank
            if sign > 0:
                axpy(systems.table, rank, <real> _target_of(systems, entries, k, ratings), y, b)
                n_negative += weight < 0 and not printed
            if weight <= 0 and not printed:
                continue
            root = <real> (weight if printed else sqrt(weight))
            row = gathered + filled * rank
            for j in range(rank):
                row[j] = root * y[j]
            if printed:
                memcpy(row + most * rank, y, rank * sizeof(real))
            filled += 1
            if filled == most:
                _add_gathered(rank, filled, printed, sign, gathered, a)
                filled = 0
        if filled:
            _add_gathered(rank, filled, printed, sign, gathered, a)
            filled = 0


cdef inline void _add_gathered(Py_ssize_t rank, int n, bint printed, int sign, real* gathered, real* a) noexcept nogil:
    """Add the product of the `n` rows that `_add_blas3` has gathered."""
    if printed:
        _gemm(<int> rank, n, gathered, gathered + _GATHER_ROWS // 2 * rank, a)
    else:
        _syrk(<int> rank, n, <real> sign, gathered, <real> 1.0, a)


cdef int32_t _finish_system(Py_ssize_t rank, real* a, real* b, real* diagonal, real epsilon,
                            real* out) noexcept nogil:
    """Solve a system; writes `out` only on success."""
    cdef Py_ssize_t j
    cdef int32_t status
    for j in range(rank):
        diagonal[j] = a[j * rank + j]
    status = _cholesky_solve(<int> rank, <int> rank, a, b, diagonal, epsilon)
    if status == 0:
        memcpy(out, b, rank * sizeof(real))
    return status


cdef struct Panels:
    # a matrix as `panels` packs it
    const void* packed
    const int64_t* spans
    Py_ssize_t rank
    Py_ssize_t n


cdef inline void _product(const hmf_kernel_table* table, const Panels* matrix, Py_ssize_t n_rows, const real* rows,
                          Py_ssize_t apart, real* out, Py_ssize_t stride) noexcept nogil:
    """out = rows @ matrix, whole panels; rows are `apart` elements apart, and those of the product `stride`."""
    cdef Py_ssize_t panel
    cdef const int64_t* span
    for panel in range(matrix.n):
        span = matrix.spans + 2 * panel
        times_panel(table, n_rows, span[1] - span[0], rows + span[0], apart,
                    <const real*> matrix.packed + (panel * matrix.rank + span[0]) * HMF_PANEL,
                    out + panel * HMF_PANEL, stride)


cdef void _apply_entries(
        const Systems* systems, const RowEntries* entries,
        bint residual,                      # b - A p instead of A p
        const real* p,
        real* weight,                       # scratch (2 * CG_CHUNK,)
        real* out) noexcept nogil:          # IN OUT (rank,) product of the Gram matrix and p -> A p or b - A p
    """Add what the penalty and the entries of a row contribute to a product, without forming A."""
    cdef const hmf_kernel_table* table = systems.table
    cdef const real* ratings = <const real*> entries.ratings
    cdef const real* ridge = <const real*> systems.ridge
    cdef real sign = <real> (-1.0 if residual else 1.0)
    cdef real* target = weight + CG_CHUNK
    cdef Py_ssize_t rank = systems.rank, j, k, n, start = 0
    cdef hmf_rows fixed_rows
    cdef const real* pull = <const real*> entries.pull
    cdef bint weighted = systems.how.implicit or entries.weights != NULL
    for j in range(rank):
        out[j] = sign * (out[j] + <real> (entries.scale * ridge[j]) * p[j])
    if residual and pull != NULL:
        for j in range(rank):
            out[j] += pull[j]
    while start < entries.n:
        n = min(CG_CHUNK, entries.n - start)
        if weighted:
            for k in range(n):
                weight[k] = <real> _entry_weight(systems, entries, start + k, ratings)
        if residual:
            for k in range(n):
                target[k] = <real> _target_of(systems, entries, start + k, ratings)
        fixed_rows = _fixed_rows(systems, entries.columns + start, n)
        apply_rows(table, &fixed_rows, <const real*> weight if weighted else NULL,
                   <const real*> target if residual else NULL, sign, p, out)
        start += n


cdef void _form_system(
        const Systems* systems, const RowEntries* entries,
        real* v,                            # scratch: gathered rows, their roots and targets
        real* a, real* b) noexcept nogil:   # OUT (ld, ld) both halves, (ld,) behind it
    """A and b of one row, from the kernels of the exact solver."""
    cdef Py_ssize_t rank = systems.rank, ld = _padded(rank), i, j
    _start_system(systems, entries.scale, <const real*> entries.pull, ld, a, b)
    _simd_add(systems, entries, _all_coordinates(systems), v, a, b)
    for i in range(rank):
        for j in range(i):
            a[i * ld + j] = a[j * ld + i]


cdef struct Gradients:
    # rows that take the steps of conjugate gradients together, so that their products with the Gram matrix are one
    int count
    bint formed                     # a single row, whose A is formed
    RowEntries entries[CG_TOGETHER]
    void* x[CG_TOGETHER]            # (rank,) warm start -> solution
    int32_t* status[CG_TOGETHER]
    bint ended[CG_TOGETHER]
    double rr[CG_TOGETHER]          # squared norm of the residual
    double rr_first[CG_TOGETHER]


cdef void _conjugate_gradients(
        const Systems* systems, Panels gram_matrix, Gradients* group, int n_steps,
        real* work) noexcept nogil:         # scratch (workspace_size(rank),)
    """`n_steps` of conjugate gradients on A x = b from the x given; A is formed once, or a product walks the entries.

    A row ends early only where its residual has fallen by 1e-10 (squared 1e-20) or is about to underflow. Inner
    products are summed in double. No row's bits depend on the others.
    """
    cdef const hmf_kernel_table* table = systems.table
    cdef Py_ssize_t rank = systems.rank, ld = _padded(rank), wide = _wide(rank), j
    cdef real* rs = work
    cdef real* ps = rs + CG_TOGETHER * wide
    cdef real* aps = ps + CG_TOGETHER * wide
    cdef real* rest = aps + CG_TOGETHER * wide     # weights; or A, b and scratch
    cdef real* r
    cdef real* p
    cdef real* ap
    cdef real* x
    cdef int step, k
    cdef double rr_next, curvature, length
    # a residual this small (squared) would underflow in the products of the next step
    cdef double tiny = 1e-60 if sizeof(real) == 4 else 1e-290
    for k in range(group.count):
        group.ended[k] = False
        group.status[k][0] = 0
        memcpy(ps + k * wide, group.x[k], rank * sizeof(real))
    if group.formed:
        _form_system(systems, &group.entries[0], rest + (ld + 1) * ld, rest, rest + ld * ld)
    for step in range(n_steps + 1):         # the first product is that of x
        memset(aps, 0, group.count * wide * sizeof(real))
        if group.formed:
            combine(table, rank, ld, <const real*> rest, <const real*> ps, aps)
        elif systems.gram != NULL:
            _product(table, &gram_matrix, group.count, <const real*> ps, wide, aps, wide)
        for k in range(group.count):
            r, p, ap, x = rs + k * wide, ps + k * wide, aps + k * wide, <real*> group.x[k]
            if group.ended[k]:
                continue
            if group.formed and step == 0:
                for j in range(rank):
                    ap[j] = rest[ld * ld + j] - ap[j]
            elif not group.formed:
                _apply_entries(systems, &group.entries[k], step == 0, <const real*> p, rest, ap)
            if step == 0:
                memcpy(r, ap, rank * sizeof(real))
            else:
                curvature = dot_exact(table, rank, <const real*> p, <const real*> ap)
                if curvature <= 0:
                    group.status[k][0] = _NEGATIVE_CURVATURE
                    group.ended[k] = True
                    continue
                length = group.rr[k] / curvature
                axpy(table, rank, <real> length, <const real*> p, x)
                axpy(table, rank, <real> -length, <const real*> ap, r)
            rr_next = dot_exact(table, rank, <const real*> r, <const real*> r)
            if not isfinite(rr_next):
                group.status[k][0] = _NON_FINITE
                group.ended[k] = True
                continue
            if step == 0:
                memcpy(p, r, rank * sizeof(real))
                group.rr_first[k] = rr_next
            else:
                for j in range(rank):
                    p[j] = r[j] + <real> (rr_next / group.rr[k]) * p[j]
            group.rr[k] = rr_next
            group.ended[k] = rr_next <= 1e-20 * group.rr_first[k] or rr_next <= tiny


def padded_rank(Py_ssize_t rank):
    """Leading dimension of a system in ``assembly="simd"``."""
    return _padded(rank)


cdef inline Py_ssize_t _padded(Py_ssize_t rank) noexcept nogil:
    return (rank + HMF_PAD - 1) // HMF_PAD * HMF_PAD


cdef inline Py_ssize_t _wide(Py_ssize_t rank) noexcept nogil:
    """Elements of a row of a product with packed panels."""
    return (rank + HMF_PANEL - 1) // HMF_PANEL * HMF_PANEL


cdef inline Py_ssize_t _simd_rows(Py_ssize_t ld, Py_ssize_t itemsize) noexcept nogil:
    """Rows gathered for one symmetric update."""
    return max(32, min(512, SIMD_GATHER_BYTES // (ld * itemsize)))


cdef struct Coordinates:
    # coordinates to solve for, and the current predictions
    Py_ssize_t first, width
    const void* predicted       # (entries.n,) or NULL


cdef inline Coordinates _all_coordinates(const Systems* systems) noexcept nogil:
    return Coordinates(0, systems.rank, NULL)


cdef void _simd_add(
        const Systems* systems, const RowEntries* entries, Coordinates those,
        real* v,                            # scratch: gathered rows, then their roots and targets
        real* a, real* b) noexcept nogil:   # IN OUT
    """A += w y y^T, b += (t - w predicted) y."""
    # Confidences below the unobserved weight give negative weights; a second pass subtracts their entries.
    if _simd_pass(systems, entries, those, <real> 1.0, v, a, b):
        _simd_pass(systems, entries, those, <real> -1.0, v, a, b)


cdef Py_ssize_t _simd_pass(
        const Systems* systems, const RowEntries* entries, Coordinates those, real sign, real* v, real* a,
        real* b) noexcept nogil:
    """`_simd_add` for entries whose weight has the given sign; returns the number of the others."""
    cdef const hmf_kernel_table* table = systems.table
    cdef Weights how = systems.how
    cdef const int32_t* columns = entries.columns
    cdef const real* ratings = <const real*> entries.ratings
    cdef const real* offsets = <const real*> systems.offsets
    cdef const real* predicted = <const real*> those.predicted
    cdef const real* weights = <const real*> entries.weights
    cdef bint weighted = how.implicit or weights != NULL
    cdef Py_ssize_t ld = _padded(those.width), chunk = _simd_rows(ld, sizeof(real)), start = 0, n, k, n_opposite = 0
    cdef real* root = v + chunk * ld
    cdef real* target = root + chunk
    cdef hmf_rows fixed_rows
    while start < entries.n:
        n = min(chunk, entries.n - start)
        if how.implicit:
            n_opposite += weigh(table, n, ratings + start, <real> how.alpha, <real> how.unobserved, sign, root, target)
        else:
            for k in range(n):
                target[k] = ratings[start + k] - (offsets[columns[start + k]] if offsets != NULL else <real> 0.0)
            if weights != NULL:
                for k in range(n):
                    root[k] = <real> sqrt(weights[start + k])
                    target[k] *= weights[start + k]
        if predicted != NULL:
            for k in range(n):
                target[k] -= (sign * root[k] * root[k] if weighted else <real> 1.0) * predicted[start + k]
        fixed_rows = hmf_rows(n, those.width, systems.rank, <const real*> systems.fixed + those.first, columns + start)
        gather(table, &fixed_rows, entries.n - start, ld, <const real*> root if weighted else NULL,
               <const real*> target, v, b)
        syrk_upper(table, n, ld, <const real*> v, sign, a)
        start += n
    return n_opposite


cdef int32_t _solve_padded(const Systems* systems, real* a, real* b, real* work, real* out) noexcept nogil:
    """Solve one system and store the solution; work (4 * ld,)."""
    cdef real* x = work
    cdef Py_ssize_t code
    _solve_side_by_side(systems, 1, systems.rank, &a, &b, work + _padded(systems.rank), &x, &code)
    return _store(<int32_t> code, systems.rank, <const real*> x, out)


cdef void _solve_side_by_side(const Systems* systems, int count, Py_ssize_t rank, real** a, real** b, real* work,
                              real** x, Py_ssize_t* codes) noexcept nogil:
    """x[k] = a[k]^-1 b[k] by our Cholesky, or by LAPACK for large systems; work (3 * ld * count,)."""
    cdef Py_ssize_t ld = _padded(rank), j
    cdef real epsilon = <real> systems.epsilon
    cdef int k
    if rank <= _OWN_CHOLESKY_RANK:
        cholesky(systems.table, count, rank, a, b, epsilon, work, x, codes)
        return
    for k in range(count):
        for j in range(rank):
            work[j] = a[k][j * ld + j]
        codes[k] = _cholesky_solve(<int> rank, <int> ld, a[k], b[k], <const real*> work, epsilon)
        memcpy(x[k], b[k], rank * sizeof(real))


cdef void _start_dual(
        const Systems* systems, const RowEntries* entries,
        Py_ssize_t ld,                         # leading dimension of K
        real* scratch,                         # (rank,)
        real* a, real* b,                      # OUT  (ld, ld), (ld,)
        real* root) noexcept nogil:            # OUT  (2 * ld,) S, and targets left out of b
    """K and its right-hand side.

    b = S^-1 t if the weight is at least the unobserved one. Other targets t are kept and contribute -S Y Y^T t: their
    roots may be too small to divide by (zero for confidences equal to the unobserved weight), and the difference
    would cancel for large weights (docs/methods.md).
    """
    cdef const hmf_kernel_table* table = systems.table
    cdef Weights how = systems.how
    cdef const real* fixed = <const real*> systems.fixed
    cdef const real* ratings = <const real*> entries.ratings
    cdef const real* offsets = <const real*> systems.offsets
    cdef Py_ssize_t rank = systems.rank, n = entries.n, k
    cdef hmf_rows fixed_rows = _fixed_rows(systems, entries.columns, n)
    cdef real* rest = root + ld
    cdef real ridge = 1
    cdef bint any_rest = False
    memset(b, 0, ld * sizeof(real))
    if how.implicit:
        weigh(table, n, ratings, <real> how.alpha, <real> how.unobserved, <real> 1.0, root, rest)
        for k in range(n):
            if root[k] > 0 and root[k] * root[k] >= <real> how.unobserved:
                b[k] = rest[k] / root[k]
                rest[k] = 0
            elif rest[k] != 0:
                any_rest = True
    else:
        ridge = <real> (entries.scale * (<const real*> systems.ridge)[0])
        for k in range(n):
            root[k] = 1
            b[k] = ratings[k] - (offsets[entries.columns[k]] if offsets != NULL else <real> 0.0)
        if entries.weights != NULL:
            for k in range(n):
                root[k] = <real> sqrt((<const real*> entries.weights)[k])
                b[k] *= root[k]
    memset(root + n, 0, (ld - n) * sizeof(real))
    fixed_rows.width -= systems.bias_square > 0     # the column of a bias takes no part
    products(table, &fixed_rows, <const real*> root, <real> systems.bias_square, ridge, ld, a)
    fixed_rows.width = rank
    if any_rest:
        sum_rows(table, &fixed_rows, <const real*> rest, scratch)
        for k in range(n):
            b[k] -= root[k] * dot(table, rank, fixed + entries.columns[k] * rank, <const real*> scratch)
    if entries.pull != NULL:
        _dual_base(systems, entries, scratch)
        for k in range(n):
            b[k] -= root[k] * dot(table, rank, fixed + entries.columns[k] * rank, <const real*> scratch)


cdef inline void _dual_base(const Systems* systems, const RowEntries* entries, real* base) noexcept nogil:
    """The solution of a row without entries that has a pull, (rank,)."""
    cdef const real* pull = <const real*> entries.pull
    cdef const real* ridge = <const real*> systems.ridge
    cdef Py_ssize_t j
    for j in range(systems.rank):
        base[j] = pull[j] if systems.how.implicit else <real> (pull[j] / (entries.scale * ridge[j]))


cdef void _finish_dual(
        const Systems* systems, const RowEntries* entries,
        const real* q,                         # IN   (ld,) K^-1 b
        real* root,                            # IN   (2 * ld,) as `_start_dual` left it; destroyed
        real* scratch,                         # (rank,)
        real* x) noexcept nogil:               # OUT  (rank,)
    cdef Py_ssize_t rank = systems.rank, n = entries.n, k, ld = _padded(n)
    cdef real* rest = root + ld
    cdef double total = 0
    for k in range(n):
        root[k] *= q[k]
        if systems.how.implicit:
            root[k] += rest[k]
        total += root[k]
    cdef hmf_rows fixed_rows = _fixed_rows(systems, entries.columns, n)
    sum_rows(systems.table, &fixed_rows, <const real*> root, x)
    if systems.bias_square > 0:
        x[rank - 1] = <real> (systems.bias_square * total)
    if entries.pull != NULL:
        _dual_base(systems, entries, scratch)
        for k in range(rank):
            x[k] += scratch[k]


cdef inline bint _in_lanes(const hmf_kernel_table* table, Py_ssize_t ld, const real* kind) noexcept nogil:
    """Whether systems of this size are solved in lanes; `kind`: any pointer to their type."""
    if real is float:
        return ld <= table.lanes_rank_f
    else:
        return ld <= table.lanes_rank_d


cdef inline Py_ssize_t _slot_size(Py_ssize_t ld) noexcept nogil:
    """Elements of one system: A, b, x, and two vectors that `_start_dual` keeps for `_finish_dual`."""
    return ld * (ld + 4)


cdef inline Py_ssize_t _group_size(Py_ssize_t ld, bint in_lanes) noexcept nogil:
    """Elements of the systems solved together and of their solver's scratch."""
    if in_lanes:
        return HMF_LANES * (_slot_size(ld) + ld * (ld + HMF_LANES + 4) // 2)
    return HMF_SYSTEMS * (_slot_size(ld) + 3 * ld)


cdef inline void _prefetch_ahead(const Systems* systems, const Rows* rows, const int64_t* order, Py_ssize_t n_left,
                                 const real* kind) noexcept nogil:
    """Prefetch the data of the next rows of `order`, which are scattered in memory; `kind`: any `real` pointer."""
    cdef Py_ssize_t row
    cdef hmf_rows fixed_rows
    if n_left > 3 * ROWS_AHEAD:
        HMF_PREFETCH(rows.indptr + order[3 * ROWS_AHEAD])
    if n_left > 2 * ROWS_AHEAD:
        row = order[2 * ROWS_AHEAD]
        HMF_PREFETCH(rows.indices + rows.indptr[row])
        HMF_PREFETCH(rows.ratings + rows.indptr[row] * rows.itemsize)
        HMF_PREFETCH(rows.scale + row)
    if n_left > ROWS_AHEAD:
        row = order[ROWS_AHEAD]
        fixed_rows = _fixed_rows(systems, rows.indices + rows.indptr[row],
                                 min(rows.indptr[row + 1] - rows.indptr[row], ENTRIES_AHEAD))
        if real is float:
            systems.table.prefetch_rows_f(&fixed_rows)
        else:
            systems.table.prefetch_rows_d(&fixed_rows)


cdef struct Group:
    # assembled systems of one form and padded size, still to be solved
    int count
    bint dual
    Py_ssize_t ld, order            # padded and largest order of a system
    int64_t rows[HMF_LANES]
    RowEntries entries[HMF_LANES]


cdef void _simd_rows_of(
        const Systems* systems, const Rows* rows,
        const int64_t* order, Py_ssize_t n_left,    # IN   the remaining rows; solves the first ROW_CHUNK
        real* work,                # scratch (workspace_size(rank),)
        int32_t* status, real* out) noexcept nogil:
    """ALS_CORE of fig. 6 by our own kernels; solves rows of one size together."""
    cdef Py_ssize_t rank = systems.rank, row, ld, k, together
    cdef bint dual
    cdef RowEntries entries
    cdef Group group
    cdef real* a
    cdef real* v
    group.count = 0
    for k in range(min(ROW_CHUNK, n_left)):
        _prefetch_ahead(systems, rows, order + k, n_left - k, <const real*> out)
        row = order[k]
        entries = _entries(rows, row)
        if entries.n == 0:
            memset(out + row * rank, 0, rank * sizeof(real))
            status[row] = 0
            continue
        dual = entries.n <= systems.dual_up_to
        ld = _padded(entries.n if dual else rank)
        together = HMF_LANES if _in_lanes(systems.table, ld, <const real*> out) else HMF_SYSTEMS
        if group.count and (dual != group.dual or ld != group.ld or group.count == together):
            _solve_group(systems, &group, work, status, out)
            group.count = 0
        if group.count == 0:
            group.dual, group.ld, group.order = dual, ld, 0
        group.order = max(group.order, entries.n if dual else rank)
        group.rows[group.count] = row
        group.entries[group.count] = entries
        a = work + group.count * _slot_size(ld)
        v = work + together * _slot_size(ld)
        group.count += 1
        if dual:
            _start_dual(systems, &entries, ld, v, a, a + ld * ld, a + (ld + 2) * ld)
        else:
            _start_system(systems, entries.scale, <const real*> entries.pull, ld, a, a + ld * ld)
            _simd_add(systems, &entries, _all_coordinates(systems), v, a, a + ld * ld)
    if group.count:
        _solve_group(systems, &group, work, status, out)


cdef void _solve_group(const Systems* systems, const Group* group, real* work, int32_t* status,
                       real* out) noexcept nogil:
    """Solve the systems of a group, held in `work`, and store the solutions."""
    cdef Py_ssize_t rank = systems.rank, ld = group.ld, slot = _slot_size(ld)
    cdef bint in_lanes = _in_lanes(systems.table, ld, <const real*> out)
    cdef real* solver = work + (HMF_LANES if in_lanes else HMF_SYSTEMS) * slot
    cdef real* a[HMF_LANES]
    cdef real* b[HMF_LANES]
    cdef real* x[HMF_LANES]
    cdef real* solved
    cdef Py_ssize_t codes[HMF_LANES]
    cdef int k
    for k in range(group.count):
        a[k] = work + k * slot
        b[k] = a[k] + ld * ld
        x[k] = b[k] + ld
    if in_lanes:
        cholesky_lanes(systems.table, group.count, group.order, a, b, <real> systems.epsilon, solver, x, codes)
    else:
        _solve_side_by_side(systems, group.count, group.order, a, b, solver, x, codes)
    for k in range(group.count):
        solved = x[k]
        if group.dual:
            solved = solver
            if codes[k] == 0:
                _finish_dual(systems, &group.entries[k], <const real*> x[k], x[k] + ld, solved + rank, solved)
        status[group.rows[k]] = _store(<int32_t> codes[k], rank, <const real*> solved, out + group.rows[k] * rank)


cdef inline int32_t _store(int32_t status, Py_ssize_t rank, const real* x, real* out) noexcept nogil:
    """Copy a valid solution to `out`; returns its status."""
    cdef Py_ssize_t j
    if status == 0:
        for j in range(rank):
            if not isfinite(x[j]):
                return _NON_FINITE
        memcpy(out, x, rank * sizeof(real))
    return status


cdef int32_t _subspace_row(
        const Systems* systems, const RowEntries* entries, Py_ssize_t block,
        real* work,                # scratch (subspace_workspace_size(rank, block, entries.n),)
        real* x) noexcept nogil:   # IN OUT (rank,)
    """iALS++: exact minimization over one block of `block` coordinates after another (Rendle et al. 2021, Alg. 2)."""
    cdef const hmf_kernel_table* table = systems.table
    cdef const real* fixed = <const real*> systems.fixed
    cdef const real* gram_matrix = <const real*> systems.gram
    cdef const real* ridge = <const real*> systems.ridge
    cdef Py_ssize_t rank = systems.rank, first = 0, width, ld, j, k
    cdef real* predicted = work
    cdef real* a = work + entries.n
    cdef real* b
    cdef real* step
    cdef Py_ssize_t status
    for k in range(entries.n):
        predicted[k] = dot(table, rank, fixed + entries.columns[k] * rank, <const real*> x)
    while first < rank:
        width = min(block, rank - first)
        ld = _padded(width)
        b = a + ld * ld
        step = b + ld
        memset(a, 0, (ld * ld + ld) * sizeof(real))
        for j in range(width):
            if gram_matrix != NULL:
                memcpy(a + j * ld, gram_matrix + (first + j) * rank + first, width * sizeof(real))
                b[j] = -dot(table, rank, gram_matrix + (first + j) * rank, <const real*> x)
            a[j * ld + j] += <real> (entries.scale * ridge[first + j])
            b[j] -= <real> (entries.scale * ridge[first + j] * x[first + j])
            if entries.pull != NULL:
                b[j] += (<const real*> entries.pull)[first + j]
        _simd_add(systems, entries, Coordinates(first, width, predicted), step + 4 * ld, a, b)
        cholesky(table, 1, width, &a, &b, <real> systems.epsilon, step + ld, &step, &status)
        if status != 0:
            return <int32_t> (status + first) if status > 0 else status
        for j in range(width):
            x[first + j] += step[j]
            if not isfinite(x[first + j]):
                return _NON_FINITE
        if first + width < rank:
            for k in range(entries.n):
                predicted[k] += dot(table, width, fixed + entries.columns[k] * rank + first, <const real*> step)
        first += width
    return 0


# ---------------------------------------------------------------------------------------------------- half sweeps


def workspace_size(Py_ssize_t rank, Py_ssize_t itemsize):
    """Elements of scratch one thread needs in `cholesky_rows` and `cg_rows`: A, b, gathered rows and their weights."""
    # enough for every type and instruction set, and for the larger groups of small systems in the dual form
    cdef Py_ssize_t ld = _padded(rank), small = min(ld, HMF_LANES_RANK)
    cdef Py_ssize_t steps = 2 * CG_CHUNK + 3 * CG_TOGETHER * _wide(rank)    # of conjugate gradients
    cdef Py_ssize_t gathered = max(_GATHER_ROWS * rank, _simd_rows(ld, itemsize) * (ld + 2), steps)
    if ld == small:
        return HMF_LANES * _slot_size(ld) + max(gathered, _group_size(ld, True) - HMF_LANES * _slot_size(ld))
    return max(_group_size(ld, False) + gathered, _group_size(small, True))


cdef inline Py_ssize_t _row_workspace(Py_ssize_t rank) noexcept nogil:
    return rank * rank + 2 * rank


def cholesky_rows(
        real[:, ::1] out,                 # OUT  (n_rows, rank) solved rows; others untouched
        systems,                          # IN   `hybridmf.native.arguments.Systems`
        rows,                             # IN   `hybridmf.native.arguments.Rows`
        const int64_t[::1] order,         # IN   rows to solve, in this order
        int32_t[::1] status,              # OUT  (n_rows,)
        real[:, ::1] workspace,           # scratch (n_threads, workspace_size(rank, itemsize)); sets n_threads
        int assembly):
    """Solve each row in `order` exactly; sets rows without entries to zero."""
    cdef Systems its = _systems(systems, out)
    cdef Rows all_rows = _rows(rows, out)
    cdef Py_ssize_t n_rows = order.shape[0], position
    cdef int n_threads = hmf_usable_threads(<int> workspace.shape[0])
    if assembly == _SIMD:
        for position in prange((n_rows + ROW_CHUNK - 1) // ROW_CHUNK, nogil=True, schedule="dynamic",
                               num_threads=n_threads):
            _simd_rows_of(
                &its, &all_rows, &order[position * ROW_CHUNK], n_rows - position * ROW_CHUNK,
                &workspace[hmf_thread_id(), 0], &status[0], &out[0, 0])
        return
    cdef Py_ssize_t together = BLOCK_ROWS if assembly == _GEMM else ROW_CHUNK
    for position in prange(n_rows, nogil=True, schedule="dynamic", chunksize=together, num_threads=n_threads):
        status[order[position]] = _cholesky_row(
            &its, &all_rows, order[position], assembly, &workspace[hmf_thread_id(), 0], &out[order[position], 0])


def long_row_waves(const int64_t[::1] indptr, const int64_t[::1] rows):
    """Waves of whole rows for `cholesky_long_rows`, each of at most SEGMENTS segments.

    Returns
    -------
    list of int64 array, shape (n_segments, 3)
        For each wave its segments: index into `rows`, first entry, number of entries.
    """
    cdef Py_ssize_t k, start, length, size
    waves, wave = [], []
    for k in range(rows.shape[0]):
        start, length = indptr[rows[k]], indptr[rows[k] + 1] - indptr[rows[k]]
        size = max(_SEGMENT, (length + _SEGMENTS - 1) // _SEGMENTS)   # the longest rows get longer segments
        pieces = [(k, start + at, min(size, length - at)) for at in range(0, length, size)]
        if wave and len(wave) + len(pieces) > _SEGMENTS:
            waves.append(np.array(wave, dtype=np.int64))
            wave = []
        wave += pieces
    return waves + [np.array(wave, dtype=np.int64)] if wave else waves


def cholesky_long_rows(
        real[:, ::1] out,
        systems,                          # IN   `hybridmf.native.arguments.Systems`
        rows,                             # IN   `hybridmf.native.arguments.Rows`
        const int64_t[::1] order,         # IN   rows that the segments index
        const int64_t[:, ::1] segments,   # IN   (n_segments, 3), one wave of long_row_waves
        int32_t[::1] status,
        real[:, ::1] partial,             # scratch (SEGMENTS, (ld + 1) * ld) sums of each segment
        real[:, ::1] workspace):          # scratch as in cholesky_rows
    """`cholesky_rows` in ``assembly="simd"`` for long rows, shared by threads; see LONG_ROW."""
    cdef Systems its = _systems(systems, out)
    cdef Rows all_rows = _rows(rows, out)
    cdef Py_ssize_t n_segments = segments.shape[0], k, row
    cdef int n_threads = hmf_usable_threads(<int> workspace.shape[0])
    for k in prange(n_segments, nogil=True, schedule="dynamic", num_threads=n_threads):
        _add_segment(&its, &all_rows, order[segments[k, 0]], &segments[k, 0], &workspace[hmf_thread_id(), 0],
                     &partial[k, 0])
    for k in prange(n_segments, nogil=True, schedule="dynamic", num_threads=n_threads):
        if k == 0 or segments[k, 0] != segments[k - 1, 0]:    # first segment of its row: this thread sums and solves
            row = order[segments[k, 0]]
            status[row] = _solve_segments(
                &its, all_rows.scale[row], <const real*> _part(&all_rows, row, 0, 0).pull, &segments[k, 0],
                n_segments - k, &partial[k, 0], &workspace[hmf_thread_id(), 0], &out[row, 0])


cdef void _add_segment(const Systems* systems, const Rows* rows, Py_ssize_t row, const int64_t* segment, real* work,
                       real* partial) noexcept nogil:
    """Partial sums of one segment."""
    cdef Py_ssize_t ld = _padded(systems.rank)
    cdef RowEntries entries = _part(rows, row, segment[1], segment[2])
    memset(partial, 0, (ld + 1) * ld * sizeof(real))
    _simd_add(systems, &entries, _all_coordinates(systems), work, partial, partial + ld * ld)


cdef int32_t _solve_segments(
        const Systems* systems, double scale, const real* pull, const int64_t* segments, Py_ssize_t n_segments,
        const real* partial, real* work, real* out) noexcept nogil:
    """Add the partial sums of one row in order, and solve; `segments` and `partial` start at its first segment."""
    cdef Py_ssize_t ld = _padded(systems.rank), size = (ld + 1) * ld, k = 0
    cdef real* a = work
    cdef real* b = a + ld * ld
    _start_system(systems, scale, pull, ld, a, b)
    while k < n_segments and segments[3 * k] == segments[0]:
        axpy(systems.table, size, <real> 1.0, partial + k * size, a)      # b follows a in both
        k += 1
    return _solve_padded(systems, a, b, b + ld, out)


cdef int32_t _cholesky_row(
        const Systems* systems, const Rows* rows, Py_ssize_t row, int assembly, real* work, real* out) noexcept nogil:
    cdef Py_ssize_t rank = systems.rank
    cdef RowEntries entries = _entries(rows, row)
    cdef real* a = work
    cdef real* b = work + rank * rank
    if entries.n == 0:
        memset(out, 0, rank * sizeof(real))
        return 0
    _start_system(systems, entries.scale, <const real*> entries.pull, rank, a, b)
    if assembly == _RANK1:
        _add_rank1(systems, &entries, a, b)
    else:
        _add_blas3(systems, &entries, assembly == _GEMM, work + _row_workspace(rank), a, b)
    return _finish_system(rank, a, b, b + rank, <real> systems.epsilon, out)


def cg_rows(
        real[:, ::1] out,                 # IN OUT (n_rows, rank) warm start -> solution
        systems, rows, const int64_t[::1] order, int32_t[::1] status,
        real[:, ::1] workspace,           # as in cholesky_rows
        int n_steps, Py_ssize_t form_from):
    """`n_steps` conjugate gradient steps from `out` for each row in `order`; sets rows without entries to zero.

    Forms A for rows of at least `form_from` entries. The Gram matrix is zero-padded.
    """
    cdef Systems its = _systems(systems, out)
    cdef Rows all_rows = _rows(rows, out)
    cdef Py_ssize_t n_rows = order.shape[0], position
    cdef int n_threads = hmf_usable_threads(<int> workspace.shape[0])
    cdef const real[:, ::1] matrix = systems.gram
    packed, spans = panels(matrix)
    cdef const real[:, :, ::1] packed_view = packed
    cdef const int64_t[:, ::1] spans_view = spans
    cdef Panels gram_matrix = Panels(NULL, NULL, matrix.shape[0], packed_view.shape[0])
    if gram_matrix.n:
        gram_matrix.packed, gram_matrix.spans = &packed_view[0, 0, 0], &spans_view[0, 0]
    for position in prange((n_rows + ROW_CHUNK - 1) // ROW_CHUNK, nogil=True, schedule="dynamic",
                           num_threads=n_threads):
        _cg_rows_of(&its, gram_matrix, &all_rows, &order[position * ROW_CHUNK], n_rows - position * ROW_CHUNK, n_steps,
                    form_from, &workspace[hmf_thread_id(), 0], &status[0], &out[0, 0])


cdef void _cg_rows_of(
        const Systems* systems, Panels gram_matrix, const Rows* rows,
        const int64_t* order, Py_ssize_t n_left,    # IN   rows from here on, of which ROW_CHUNK are solved
        int n_steps, Py_ssize_t form_from,
        real* work,                                 # scratch (workspace_size(rank),)
        int32_t* status, real* out) noexcept nogil:
    cdef Py_ssize_t rank = systems.rank, row, k
    cdef int together = CG_TOGETHER if systems.gram != NULL else 1     # others would only share the cache
    cdef Py_ssize_t n_together = 0, most = CG_BYTES // (rank * sizeof(real))   # entries
    cdef RowEntries entries
    cdef Gradients group
    group.count = 0
    for k in range(min(ROW_CHUNK, n_left)):
        _prefetch_ahead(systems, rows, order + k, n_left - k, <const real*> out)
        row = order[k]
        entries = _entries(rows, row)
        if entries.n == 0:
            memset(out + row * rank, 0, rank * sizeof(real))
            status[row] = 0
            continue
        if group.count and (group.formed or entries.n >= form_from or group.count == together
                            or n_together + entries.n > most):
            _conjugate_gradients(systems, gram_matrix, &group, n_steps, work)
            group.count = 0
            n_together = 0
        group.formed = entries.n >= form_from
        group.entries[group.count] = entries
        group.x[group.count] = out + row * rank
        group.status[group.count] = status + row
        group.count += 1
        n_together += entries.n
    if group.count:
        _conjugate_gradients(systems, gram_matrix, &group, n_steps, work)


def nonnegative_rows(
        real[:, ::1] out,                 # IN OUT (n_rows, rank) start, bounded coordinates >= 0 -> solution
        systems, rows, const int64_t[::1] order, int32_t[::1] status,
        real[:, ::1] workspace,           # as in cholesky_rows
        Py_ssize_t bounded):
    """Minimize each row in `order` with its first `bounded` coordinates >= 0; sets rows without entries to zero.

    The Gram matrix is zero-padded. The status is UNFINISHED for a row that is not at its minimum after MOST_SWEEPS, or
    whose system is singular to working precision.
    """
    cdef Systems its = _systems(systems, out)
    cdef Rows all_rows = _rows(rows, out)
    cdef Py_ssize_t position
    cdef int n_threads = hmf_usable_threads(<int> workspace.shape[0])
    for position in prange(order.shape[0], nogil=True, schedule="dynamic", chunksize=ROW_CHUNK,
                           num_threads=n_threads):
        status[order[position]] = _nonnegative_row(&its, &all_rows, order[position], bounded,
                                                   &workspace[hmf_thread_id(), 0], &out[order[position], 0])


cdef int32_t _nonnegative_row(const Systems* systems, const Rows* rows, Py_ssize_t row, Py_ssize_t bounded,
                              real* work, real* out) noexcept nogil:
    cdef RowEntries entries = _entries(rows, row)
    cdef Py_ssize_t ld = _padded(systems.rank), j
    cdef real* a = work + ld
    cdef real* b = a + ld * ld
    if entries.n == 0:
        memset(out, 0, systems.rank * sizeof(real))
        return 0
    _form_system(systems, &entries, b + ld, a, b)
    for j in range(systems.rank):
        if not isfinite(a[j * ld + j]) or not isfinite(b[j]):
            return _NON_FINITE
    return _descend(systems, bounded, <const real*> a, <const real*> b, work, b + ld, out)


cdef int32_t _descend(
        const Systems* systems, Py_ssize_t bounded,
        const real* a, const real* b,       # IN   (ld, ld) both halves, (ld,)
        real* gradient,                     # scratch (ld,)
        real* work,                         # scratch ((ld + 5) * ld,)
        real* x) noexcept nogil:            # IN OUT (rank,)
    """Minimize x.A x / 2 - b.x, the first `bounded` coordinates >= 0.

    Coordinate descent (Franc, Hlavac and Navara 2005) finds the coordinates that are zero, and after every FREE_SWEEPS
    sweeps a step of an active-set method (Lawson and Hanson 1974) solves for the others; if a system is nearly
    singular, descent alone would take thousands of sweeps. The objective never rises. Descent ends when a sweep moves
    no component of a newly computed gradient by more than 16 units in the last place of the largest term.
    """
    cdef const hmf_kernel_table* table = systems.table
    cdef Py_ssize_t rank = systems.rank, ld = _padded(rank), j
    cdef int sweep
    cdef int32_t status = _UNFINISHED
    cdef bint solved = True
    cdef double curvature, step, moved, largest
    for sweep in range(MOST_SWEEPS):
        if sweep % FREE_SWEEPS == 0:
            solved = not sweep or _solve_free(systems, bounded, a, b, work, x)
            memset(gradient, 0, ld * sizeof(real))
            combine(table, rank, ld, a, <const real*> x, gradient)
            axpy(table, rank, <real> -1.0, b, gradient)
        moved = largest = 0
        for j in range(rank):
            curvature = a[j * ld + j]
            if curvature == 0:              # no entry or penalty determines the coordinate
                x[j] = 0
                continue
            step = -gradient[j] / curvature
            if j < bounded and x[j] + step < 0:
                step = -x[j]
            if not isfinite(step):
                return _NON_FINITE
            largest = max(largest, max(fabs(b[j]), curvature * fabs(x[j])))
            if step != 0:
                x[j] += <real> step
                axpy(table, rank, <real> step, a + j * ld, gradient)
            moved = max(moved, fabs(step) * curvature)
        if sweep % FREE_SWEEPS == 0 and moved <= 4 * systems.epsilon * largest:
            # where the free system is singular to working precision, small steps do not mean a minimum
            status = 0 if solved else _UNFINISHED
            break
    for j in range(rank):
        if not isfinite(x[j]):
            return _NON_FINITE
    return status


cdef bint _solve_free(
        const Systems* systems, Py_ssize_t bounded,
        const real* a, const real* b,
        real* work,                         # scratch ((ld + 5) * ld,)
        real* x) noexcept nogil:            # IN OUT (rank,)
    """Move x towards the minimum over its free coordinates (unbounded, or > 0), until one would become negative.

    Returns whether the system of these coordinates is positive definite; if not, x stays as it is.
    """
    cdef Py_ssize_t rank = systems.rank, n = 0, ld, i, j, k = 0, m, code
    cdef real* free_b
    cdef real* solved
    cdef double share = 1
    for j in range(rank):
        n += j >= bounded or x[j] > 0
    if n == 0:
        return True
    ld = _padded(n)
    free_b = work + ld * ld
    solved = free_b + ld
    memset(work, 0, (ld + 2) * ld * sizeof(real))
    for j in range(rank):
        if j >= bounded or x[j] > 0:
            m = 0
            for i in range(rank):
                if i >= bounded or x[i] > 0:
                    work[k * ld + m] = a[j * _padded(rank) + i]
                    m += 1
            free_b[k] = b[j]
            k += 1
    _solve_side_by_side(systems, 1, n, &work, &free_b, solved + ld, &solved, &code)
    if code != 0:
        return False
    k = 0
    for j in range(rank):
        if j >= bounded or x[j] > 0:
            if not isfinite(solved[k]):
                return False
            if j < bounded and solved[k] < 0:
                share = min(share, x[j] / (x[j] - solved[k]))
            k += 1
    k = 0
    for j in range(rank):
        if j >= bounded or x[j] > 0:
            x[j] = <real> (x[j] + share * (solved[k] - x[j]))
            if j < bounded and solved[k] < 0 and x[j] < 0:
                x[j] = 0
            k += 1
    return True


def subspace_workspace_size(Py_ssize_t rank, Py_ssize_t block, Py_ssize_t itemsize, Py_ssize_t longest):
    """Elements of scratch one thread needs in `subspace_rows`; `longest`: entries in the longest row."""
    return longest + workspace_size(min(rank, block), itemsize)


def subspace_rows(
        real[:, ::1] out,                 # IN OUT (n_rows, rank) start -> solution
        systems, rows, const int64_t[::1] order, int32_t[::1] status,
        real[:, ::1] workspace,           # scratch (n_threads, subspace_workspace_size(...))
        Py_ssize_t block):
    """One pass over the coordinate blocks of each row in `order`, from `out`; sets rows without entries to zero."""
    cdef Systems its = _systems(systems, out)
    cdef Rows all_rows = _rows(rows, out)
    cdef Py_ssize_t position
    cdef int n_threads = hmf_usable_threads(<int> workspace.shape[0])
    for position in prange(order.shape[0], nogil=True, schedule="dynamic", chunksize=ROW_CHUNK,
                           num_threads=n_threads):
        status[order[position]] = _subspace_or_zero(&its, &all_rows, order[position], block,
                                                    &workspace[hmf_thread_id(), 0], &out[order[position], 0])


cdef int32_t _subspace_or_zero(const Systems* systems, const Rows* rows, Py_ssize_t row, Py_ssize_t block, real* work,
                               real* out) noexcept nogil:
    cdef RowEntries entries = _entries(rows, row)
    if entries.n == 0:
        memset(out, 0, systems.rank * sizeof(real))
        return 0
    return _subspace_row(systems, &entries, block, work, out)


def inverse_root(const double[:, ::1] matrix, double epsilon):
    """L^-1 of matrix = L L^T, in one thread; None unless the matrix is positive definite to working precision.

    Parameters
    ----------
    matrix : float64 array, shape (rank, rank)
        Symmetric.
    epsilon : float
        Pivots at or below this share of their diagonal element count as zero.

    Returns
    -------
    float64 array, shape (rank, rank), or None
        Lower triangular.
    """
    cdef const hmf_kernel_table* table = hmf_kernels()
    cdef Py_ssize_t rank = matrix.shape[0], i, j
    cdef double pivot
    cdef double[:, ::1] lower = np.zeros((rank, rank)), inverse = np.zeros((rank, rank))
    for i in range(rank):
        for j in range(i):
            lower[i, j] = (matrix[i, j] - dot[double](table, j, &lower[i, 0], &lower[j, 0])) / lower[j, j]
        pivot = matrix[i, i] - dot[double](table, i, &lower[i, 0], &lower[i, 0])
        if not (pivot > epsilon * matrix[i, i] and isfinite(pivot)):
            return None
        lower[i, i] = sqrt(pivot)
        combine[double](table, i, rank, &inverse[0, 0], &lower[i, 0], &inverse[i, 0])
        for j in range(i):
            inverse[i, j] /= -lower[i, i]
        inverse[i, i] = 1 / lower[i, i]
    return np.asarray(inverse)


def panels(const real[:, ::1] matrix):
    """A square matrix packed for `times_panels`.

    Returns
    -------
    array, shape (n_panels, rank, HMF_PANEL)
        HMF_PANEL columns each, zero-padded.
    spans : int64 array, shape (n_panels, 2)
        First nonzero row of each panel, and the row after the last one.
    """
    cdef Py_ssize_t rank = matrix.shape[0], n_panels = (rank + HMF_PANEL - 1) // HMF_PANEL
    padded = np.pad(np.asarray(matrix), ((0, 0), (0, n_panels * HMF_PANEL - rank)))
    packed = np.ascontiguousarray(padded.reshape(rank, n_panels, HMF_PANEL).transpose(1, 0, 2))
    spans = np.zeros((n_panels, 2), dtype=np.int64)
    for panel in range(n_panels):
        filled = np.flatnonzero(packed[panel].any(axis=1))
        if len(filled):
            spans[panel] = filled[0], filled[len(filled) - 1] + 1
    return packed, spans


def times_panels(
        real[:, ::1] out,                    # OUT  (n_rows, rank), may be `rows`
        const real[:, ::1] rows,             # IN   (n_rows, rank)
        const real[:, :, ::1] packed, const int64_t[:, ::1] spans,    # IN   from `panels`
        int32_t[::1] status,                 # IN OUT (n_rows,) NON_FINITE where a row of the product is not finite
        int n_threads):
    """out = rows @ matrix; each row of the result depends on its own row only, bit for bit."""
    cdef const hmf_kernel_table* table = hmf_kernels()
    cdef Py_ssize_t n_rows = rows.shape[0], n_blocks = (n_rows + PRODUCT_ROWS - 1) // PRODUCT_ROWS, block
    n_threads = hmf_usable_threads(n_threads)
    cdef real[:, ::1] scratch = np.empty((n_threads, PRODUCT_ROWS * packed.shape[0] * HMF_PANEL),
                                         dtype=np.asarray(rows).dtype)
    cdef Panels matrix = Panels(&packed[0, 0, 0], &spans[0, 0], rows.shape[1], packed.shape[0])
    for block in prange(n_blocks, nogil=True, schedule="static", num_threads=n_threads):
        _times_panels(table, &matrix, min(PRODUCT_ROWS, n_rows - block * PRODUCT_ROWS), &rows[block * PRODUCT_ROWS, 0],
                      &scratch[hmf_thread_id(), 0], &out[block * PRODUCT_ROWS, 0], &status[block * PRODUCT_ROWS])


cdef void _times_panels(
        const hmf_kernel_table* table, const Panels* matrix, Py_ssize_t n_rows, const real* rows, real* scratch,
        real* out, int32_t* status) noexcept nogil:
    cdef Py_ssize_t row, j, rank = matrix.rank, ld = matrix.n * HMF_PANEL
    cdef bint finite
    _product(table, matrix, n_rows, rows, rank, scratch, ld)
    for row in range(n_rows):
        finite = True
        for j in range(rank):
            finite &= isfinite(scratch[row * ld + j])
        if not finite and status[row] == 0:
            status[row] = _NON_FINITE
        memcpy(out + row * rank, scratch + row * ld, rank * sizeof(real))


# ---------------------------------------------------------------------------------------------------------- BALS


def bals_workspace_size(Py_ssize_t rank, Py_ssize_t itemsize, Py_ssize_t tile_rows, Py_ssize_t tile_cols):
    """Elements of scratch one thread needs in `cholesky_bals`: systems of a row block, a tile's rows, gathered rows."""
    cdef Py_ssize_t ld = _padded(rank)
    return tile_rows * (ld + 1) * ld + 4 * ld + _simd_rows(ld, itemsize) * (ld + 2) + tile_cols * (rank + 1)


def cholesky_bals(
        real[:, ::1] out,                 # OUT  (n_rows, rank)
        systems,                          # IN   `hybridmf.native.arguments.Systems`
        tiles,                            # IN   `hybridmf.native.arguments.Tiles`
        const int64_t[::1] blocks,        # IN   row blocks to solve, in this order
        int32_t[::1] status,              # OUT  (n_rows,)
        real[:, ::1] workspace):          # scratch (n_threads, bals_workspace_size(...)); sets n_threads
    """`cholesky_rows` over BALS tiles: accumulators of a row block and one tile's rows stay in cache (BALS Alg. 2)."""
    cdef Systems its = _systems(systems, out)
    cdef Tiles all_tiles = _tiles(tiles, out, len(systems.fixed))
    cdef Py_ssize_t position
    cdef int n_threads = hmf_usable_threads(<int> workspace.shape[0])
    for position in prange(blocks.shape[0], nogil=True, schedule="dynamic", num_threads=n_threads):
        _bals_row_block(&its, &all_tiles, blocks[position], &workspace[hmf_thread_id(), 0], &status[0], &out[0, 0])


cdef void _bals_row_block(const Systems* systems, const Tiles* tiles, Py_ssize_t block, real* work, int32_t* status,
                          real* out) noexcept nogil:
    cdef Py_ssize_t rank = systems.rank, ld = _padded(rank), system = (ld + 1) * ld, t, row, k, n_columns
    cdef Py_ssize_t first = block * tiles.tile_rows, n_rows = min(tiles.tile_rows, tiles.n_rows - first)
    cdef const int64_t* tile_ptr = tiles.tile_ptr + block * tiles.n_tile_cols
    cdef const int64_t* seg_ptr = tiles.seg_ptr + first * tiles.n_tile_cols
    cdef const real* offsets = <const real*> systems.offsets
    cdef const real* pull = <const real*> tiles.pull
    cdef const int32_t* columns
    cdef real* solver = work + n_rows * system
    cdef real* gathered = solver + 4 * ld
    cdef real* tile = gathered + _simd_rows(ld, sizeof(real)) * (ld + 2)    # the tile's distinct rows, contiguous
    cdef real* tile_offsets = tile + tiles.tile_cols * rank
    cdef const int64_t* segment
    cdef RowEntries entries
    cdef Systems within = systems[0]        # the fixed side: one tile
    within.fixed = tile
    if offsets != NULL:
        within.offsets = tile_offsets
    for row in range(n_rows):
        _start_system(systems, tiles.scale[first + row], pull + (first + row) * rank if pull != NULL else pull, ld,
                      work + row * system, work + row * system + ld * ld)
    for t in range(tiles.n_tile_cols):
        n_columns = tile_ptr[t + 1] - tile_ptr[t]
        if n_columns == 0:      # vacant tile: one test skips all its segments
            continue
        columns = tiles.tile_colidx + tile_ptr[t]
        for k in range(n_columns):
            memcpy(tile + k * rank, <const real*> systems.fixed + columns[k] * rank, rank * sizeof(real))
            if offsets != NULL:
                tile_offsets[k] = offsets[columns[k]]
        for row in range(n_rows):
            segment = seg_ptr + t * n_rows + row
            if segment[1] > segment[0]:
                entries = RowEntries(tiles.seg_colidx + segment[0], tiles.values + segment[0] * tiles.itemsize,
                                     segment[1] - segment[0], tiles.scale[first + row], NULL, NULL)
                _simd_add(&within, &entries, _all_coordinates(&within), gathered, work + row * system,
                          work + row * system + ld * ld)
    for row in range(n_rows):
        if _is_vacant_row(seg_ptr, row, n_rows, tiles.n_tile_cols):
            status[first + row] = 0
            memset(out + (first + row) * rank, 0, rank * sizeof(real))
        else:
            status[first + row] = _solve_padded(systems, work + row * system, work + row * system + ld * ld, solver,
                                                out + (first + row) * rank)


cdef inline bint _is_vacant_row(const int64_t* seg_ptr, Py_ssize_t row, Py_ssize_t n_rows,
                                Py_ssize_t n_tile_cols) noexcept nogil:
    cdef Py_ssize_t t
    for t in range(n_tile_cols):
        if seg_ptr[t * n_rows + row + 1] > seg_ptr[t * n_rows + row]:
            return False
    return True


# ----------------------------------------------------------------------------------------- predictions and the loss


def predict_pairs(const real[:, ::1] user_factors, const real[:, ::1] item_factors, const int64_t[::1] users,
                  const int64_t[::1] items, int n_threads):
    """x_u . y_i of each pair, summed in float64.

    Returns
    -------
    float64 array, shape (n_pairs,)
    """
    cdef const hmf_kernel_table* table = hmf_kernels()
    n_threads = hmf_usable_threads(n_threads)
    cdef Py_ssize_t k, rank = user_factors.shape[1]
    out = np.empty(users.shape[0])
    cdef double[::1] out_view = out
    for k in prange(users.shape[0], nogil=True, schedule="static", num_threads=n_threads):
        out_view[k] = dot_exact(table, rank, &user_factors[users[k], 0], &item_factors[items[k], 0])
    return out


def row_losses(
        const real[:, ::1] row_factors,      # IN   (n_rows, rank)
        const real[:, ::1] column_factors,   # IN   (n_columns, rank)
        const int64_t[::1] indptr, const int32_t[::1] indices, const real[::1] ratings,   # IN   CSR
        offsets,                             # IN   of rows and columns: float64 (n_rows,) and (n_columns,), or empty
        how,                                 # IN   `hybridmf.native.arguments.Weights`
        int n_threads,
        entry_weights=None):                 # IN   of explicit entries, (nnz,) with the type of the ratings
    """Loss of the observed entries, row by row, in float64.

    Explicit: sum of w (r - offsets - x.y)^2. Implicit: sum of c (p - x.y)^2 - unobserved (x.y)^2, to be added to
    unobserved * |X Y^T|^2. Separate sums per row make the total independent of the thread count.

    Returns
    -------
    float64 array, shape (n_rows,)
    """
    cdef const hmf_kernel_table* table = hmf_kernels()
    n_threads = hmf_usable_threads(n_threads)
    cdef const double[::1] row_offsets = offsets[0], column_offsets = offsets[1]
    cdef Weights weights = Weights(how.implicit, how.alpha, how.unobserved)
    cdef Py_ssize_t row, rank = row_factors.shape[1]
    out = np.zeros(indptr.shape[0] - 1)
    cdef double[::1] out_view = out
    cdef const double* row_offset = &row_offsets[0] if row_offsets.shape[0] else NULL
    cdef const double* column_offset = &column_offsets[0] if column_offsets.shape[0] else NULL
    cdef const real[::1] entry_weight
    cdef const real* entry_weight_pointer = NULL
    cdef bint weighted = entry_weights is not None
    if ratings.shape[0] == 0:
        return out
    if weighted:
        entry_weight = entry_weights
        entry_weight_pointer = &entry_weight[0]
    for row in prange(indptr.shape[0] - 1, nogil=True, schedule="dynamic", chunksize=64, num_threads=n_threads):
        out_view[row] = _row_loss(table, weights, rank, &row_factors[row, 0], &column_factors[0, 0],
                                  RowEntries(&indices[0] + indptr[row], &ratings[0] + indptr[row],
                                             indptr[row + 1] - indptr[row], 0.0, NULL, <const void*> (
                                                 entry_weight_pointer + indptr[row] * weighted)),
                                  row_offset[row] if row_offset != NULL else 0.0, column_offset)
    return out


cdef double _row_loss(
        const hmf_kernel_table* table, Weights how, Py_ssize_t rank, const real* x, const real* column_factors,
        RowEntries entries, double row_offset, const double* column_offset) noexcept nogil:
    cdef const int32_t* columns = entries.columns
    cdef const real* ratings = <const real*> entries.ratings
    cdef double total = 0, score, error, confidence
    cdef Py_ssize_t k
    for k in range(entries.n):
        score = dot_exact(table, rank, x, column_factors + columns[k] * rank)
        if how.implicit:
            confidence = 1.0 + how.alpha * fabs(ratings[k])
            error = (1.0 if ratings[k] > 0 else 0.0) - score
            total += confidence * error * error - how.unobserved * score * score
        else:
            error = ratings[k] - row_offset - (column_offset[columns[k]] if column_offset != NULL else 0.0) - score
            total += error * error if entries.weights == NULL else (<const real*> entries.weights)[k] * error * error
    return total
