// basis.cu - the basis in which gram + ridge is the identity: inverse = L^-1, where gram + ridge = L L^T
//            In it, rows y of the fixed side become L^-1 y, and a solution w corresponds to x = L^-T w (docs/methods.md).
// grid  : one block                    block : EDGE x EDGE threads, each with every EDGE-th row and column in registers
// shapes: inverse (LD, LD), zeros beyond RANK and above the diagonal  failed (1,)  gram (RANK16, RANK16)  ridge (RANK,)
// flops : 2/3 RANK^3, in float64; the elimination that computes L replaces it by L^-1 in place
// limits: RANK <= 128, because of registers
// failed: the leading minor that is not positive definite, NON_FINITE, or 0.
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef LD
#define LD ((RANK + 3) / 4 * 4)
#endif

constexpr int EDGE = 32, EACH = ceil_div(RANK, EDGE);
constexpr int RANK16 = round_up(RANK, 16);
constexpr int NON_FINITE = -1;

static_assert(RANK <= 128, "the matrix must fit in the registers of a block");

extern "C" __global__ void __launch_bounds__(EDGE * EDGE)
inverse_root(float* inverse, int* failed, const float* gram, const float* ridge, double epsilon) {
    __shared__ double column[2][EDGE * EACH], row[2][EDGE * EACH];  // for this step and the next
    __shared__ double roots[EDGE * EACH];
    const int y = threadIdx.x / EDGE, x = threadIdx.x % EDGE;
    double a[EACH][EACH];  // [p][q]: row y + EDGE p, column x + EDGE q
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int q = 0; q < EACH; q++) {
            const int r = y + EDGE * p, c = x + EDGE * q;
            a[p][q] = r < RANK && c < RANK ? double(gram[r * RANK16 + c]) + (r == c ? double(ridge[r]) : 0.0) : 0.0;
        }
    int failing = 0;
    for (int j = 0; j < RANK; j++) {  // columns before j already belong to the inverse
        double(&l)[EDGE * EACH] = column[j % 2], (&u)[EDGE * EACH] = row[j % 2];
#pragma unroll
        for (int p = 0; p < EACH; p++)
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                const int r = y + EDGE * p, c = x + EDGE * q;
                if (c == j) l[r] = a[p][q];
                if (r == j) u[c] = a[p][q];
            }
        __syncthreads();
        const double diagonal = double(gram[j * RANK16 + j]) + double(ridge[j]), pivot = l[j];
        const bool finite = isfinite(pivot), good = finite && pivot > epsilon * diagonal;
        if (!good && !failing) failing = finite ? j + 1 : NON_FINITE;
        const double reciprocal = good ? 1.0 / pivot : 0.0;
        if (threadIdx.x == 0) roots[j] = good ? rsqrt(pivot) : 0.0;
#pragma unroll
        for (int p = 0; p < EACH; p++) {
            const int r = y + EDGE * p;
            const double multiple = l[r] * reciprocal;
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                const int c = x + EDGE * q;
                if (r == j && c == j) a[p][q] = 1.0;
                if (r > j) a[p][q] = c == j ? -multiple : a[p][q] - multiple * (c > j ? l[c] : u[c]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int q = 0; q < EACH; q++) {
            const int r = y + EDGE * p, c = x + EDGE * q;
            if (r < LD && c < LD) inverse[r * LD + c] = r < RANK && c <= r ? float(a[p][q] * roots[r]) : 0.0f;
        }
    if (threadIdx.x == 0) *failed = failing;
}
