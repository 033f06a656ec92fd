"""Compiled CPU kernels: Cython modules, and the C files that one of them, _kernels, links."""
