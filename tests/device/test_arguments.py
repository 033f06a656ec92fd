"""C structs among the arguments of kernels."""

from __future__ import annotations

import ctypes

import numpy as np

from hybridmf.device.arguments import passed


class Struct(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32),
        ("array", ctypes.c_void_p),
        ("rate", ctypes.c_float),
        ("total", ctypes.c_int64),
        ("last", ctypes.c_int16),
    )


def test_a_tuple_has_the_layout_of_a_c_struct():
    array = np.arange(3)
    fields = (np.int32(7), array, np.float32(0.25), np.int64(-1), np.int16(5))
    packed = passed(fields, lambda found: found.ctypes.data)
    assert (packed.shape, packed.nbytes) == ((), ctypes.sizeof(Struct))
    struct = Struct.from_buffer_copy(packed.tobytes())
    assert (struct.count, struct.array, struct.rate, struct.total, struct.last) == (7, array.ctypes.data, 0.25, -1, 5)


def test_other_arguments_stay_as_they_are():
    array, scalar = np.arange(3), np.int32(4)
    assert passed(array, id) is array
    assert passed(scalar, id) is scalar
