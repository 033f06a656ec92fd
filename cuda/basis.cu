// basis.cu - the basis in which gram + ridge is the unit matrix: inverse = L^-1, where gram + ridge = L L^T
//            rows y of the fixed side become L^-1 y there, and a solution w is x = L^-T w (docs/methods.md)
// grid  : one block                    block : THREADS threads; thread c computes column c of the inverse
// shapes: inverse (LD, LD), zeros beyond RANK and above the diagonal  failed (1,)  gram (RANK16, RANK16)  ridge (RANK,)
//         work (RANK, RANK): the inverse in float64
// shared: RANK (RANK + 1) / 2 * 8 bytes: L, packed by rows    flops: 2/3 RANK^3, in float64
// limits: RANK <= THREADS, RANK <= 128: a matrix of 66 KB
// failed: the leading minor that is not positive definite, NON_FINITE, or 0.
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef LD
#define LD ((RANK + 3) / 4 * 4)
#endif
#ifndef THREADS
#define THREADS 256
#endif

static_assert(RANK <= THREADS, "a thread computes a column");

constexpr int RANK16 = round_up(RANK, 16);
constexpr int NON_FINITE = -1;

__device__ __forceinline__ int packed(int row, int column) { return row * (row + 1) / 2 + column; }

extern "C" __global__ void __launch_bounds__(THREADS)
inverse_root(float* inverse, int* failed, double* work, const float* gram, const float* ridge, double epsilon) {
    __shared__ int failed_shared;
    double* l = shared_memory<double>();
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    if (thread == 0) failed_shared = 0;
    for (int r = warp; r < RANK; r += THREADS / WARP)
        for (int c = lane; c <= r; c += WARP) l[packed(r, c)] = double(gram[r * RANK16 + c]) + (r == c ? double(ridge[r]) : 0.0);
    __syncthreads();
    for (int j = 0; j < RANK; j++) {
        const double pivot = l[packed(j, j)];
        const bool finite = isfinite(pivot);
        const double diagonal = double(gram[j * RANK16 + j]) + double(ridge[j]);
        const bool good = finite && pivot > epsilon * diagonal;
        const double root = good ? sqrt(pivot) : 1.0;
        __syncthreads();  // all have read the pivot
        if (thread == 0) {
            l[packed(j, j)] = root;
            if (!good && !failed_shared) failed_shared = finite ? j + 1 : NON_FINITE;
        }
        for (int r = j + 1 + thread; r < RANK; r += THREADS) l[packed(r, j)] /= root;
        __syncthreads();
        for (int r = j + 1 + warp; r < RANK; r += THREADS / WARP)
            for (int c = j + 1 + lane; c <= r; c += WARP) l[packed(r, c)] -= l[packed(r, j)] * l[packed(c, j)];
        __syncthreads();
    }
    const int c = thread;
    if (c < RANK)
        for (int r = c; r < RANK; r++) {
            double sum = r == c;
            for (int k = c; k < r; k++) sum -= l[packed(r, k)] * work[k * RANK + c];
            work[r * RANK + c] = sum / l[packed(r, r)];
        }
    if (c < LD)
        for (int r = 0; r < LD; r++) inverse[r * LD + c] = c <= r && r < RANK ? float(work[r * RANK + c]) : 0.0f;
    if (thread == 0) *failed = failed_shared;
}
