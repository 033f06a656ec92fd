"""Compiled CPU kernels: Cython modules and the C files they link."""
