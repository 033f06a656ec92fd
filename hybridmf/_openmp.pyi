# Cython-level functions only; they are reached through this.
__pyx_capi__: dict[str, object]
