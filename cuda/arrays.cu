// arrays.cu - copies and sums of parts of arrays, each a few lines; CuPy's own array arithmetic includes headers that take NVRTC
//             1.5 s for every operation and type that a process meets first
// grid  : any number of blocks     block : THREADS, one element at a time
// shapes: rows are `ld` elements apart. copy_block, gather_rows: elements are words of 4 bytes, of any type
// copy_block  : target (n_rows, width) <- source (n_rows, width)
// gather_rows : target (n_rows, width) <- source[rows]
// fill_block  : target (n_rows, width) <- value
// add_value   : target (n,) <- source + value, in `real`
// synchronization: none; one thread writes an element, and `target` and `source` do not overlap
#include "common.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef SOURCE
#define SOURCE real          // type of the elements that add_value converts: float or double
#endif
#ifndef ROW
#define ROW int64            // type of the row numbers: int or int64
#endif

__device__ __forceinline__ int64 first_element() { return int64(blockIdx.x) * THREADS + threadIdx.x; }
__device__ __forceinline__ int64 all_threads() { return int64(gridDim.x) * THREADS; }

extern "C" __global__ void __launch_bounds__(THREADS)
copy_block(unsigned* __restrict__ target, const unsigned* __restrict__ source, int64 n_rows, int64 width, int64 target_ld,
           int64 source_ld) {
    for (int64 at = first_element(); at < n_rows * width; at += all_threads())
        target[at / width * target_ld + at % width] = source[at / width * source_ld + at % width];
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather_rows(unsigned* __restrict__ target, const unsigned* __restrict__ source, const ROW* __restrict__ rows, int64 n_rows,
            int64 width) {
    for (int64 at = first_element(); at < n_rows * width; at += all_threads())
        target[at] = source[int64(rows[at / width]) * width + at % width];
}

extern "C" __global__ void __launch_bounds__(THREADS)
fill_block(real* __restrict__ target, int64 n_rows, int64 width, int64 ld, real value) {
    for (int64 at = first_element(); at < n_rows * width; at += all_threads()) target[at / width * ld + at % width] = value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_value(real* __restrict__ target, const SOURCE* __restrict__ source, int64 n, real value) {
    for (int64 at = first_element(); at < n; at += all_threads()) target[at] = real(source[at]) + value;
}
