"""Solvers and launches on a GPU; CuPy is imported at first need."""
