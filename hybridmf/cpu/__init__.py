"""Solvers on the CPU: they own their workspaces and call the kernels of `hybridmf.native`."""
