"""The CPU backend: solvers that own their workspaces, beside their kernels."""
