__pyx_capi__: dict[str, object]  # the C functions, for cimport
