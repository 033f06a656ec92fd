"""The GPU backend: devices, launches and solvers; CuPy is imported at first need."""
