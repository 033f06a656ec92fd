# The module has Cython-level functions only.
