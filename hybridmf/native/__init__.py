"""Compiled kernels of the CPU: Cython modules and the C files that they link."""
