"""Branch-free scan of delimited text for ids that must be read as labels, not as numbers."""

from libc.stdint cimport uint8_t

cdef enum:
    TAB = 9
    LINE_FEED = 10
    RETURN = 13
    BLANK = 32
    PLUS = 43
    MINUS = 45
    POINT = 46
    ZERO = 48

# A test is 0 if it holds, so "or" is the minimum and "and" is |. Compilers vectorize these, which is ten times as fast
# as equality tests, which they compile to shifts.


cdef inline uint8_t _either(uint8_t a, uint8_t b) noexcept nogil:
    return a if a < b else b


cdef inline uint8_t _not_separator(uint8_t byte, uint8_t delimiter) noexcept nogil:
    return _either(_either(byte ^ LINE_FEED, byte ^ RETURN), byte ^ delimiter)


cdef inline uint8_t _not_odd(uint8_t byte, uint8_t delimiter) noexcept nogil:
    return _either(_either(byte ^ BLANK, byte ^ TAB), byte ^ PLUS) | (byte == delimiter)


cdef uint8_t _no_fault(
        const uint8_t* text,      # IN   (n + 3,)
        Py_ssize_t n,
        uint8_t delimiter) noexcept nogil:
    """0 if an odd field begins or ends at one of n positions."""
    cdef uint8_t no_fault = 255, apart, odd, zero, minus, behind
    cdef Py_ssize_t k
    for k in range(n):
        apart = _not_separator(text[k], delimiter)
        odd = _not_odd(text[k + 1], delimiter)
        zero = (text[k + 1] ^ ZERO) | (_not_separator(text[k + 2], delimiter) == 0) | (text[k + 2] == POINT)
        minus = (text[k + 1] ^ MINUS) | (text[k + 2] ^ ZERO) | (text[k + 3] == POINT)
        behind = _not_odd(text[k], delimiter) | _not_separator(text[k + 1], delimiter)
        no_fault = _either(no_fault, _either(apart | _either(_either(odd, zero), minus), behind))
    return no_fault


cdef uint8_t _paired(
        const uint8_t* text,      # IN   (n + 2,)
        Py_ssize_t n,
        uint8_t byte) noexcept nogil:
    """0 if at one of n positions, from the second on, `byte` has an equal neighbour on both sides or on neither."""
    cdef uint8_t no_fault = 255
    cdef Py_ssize_t k
    for k in range(1, n + 1):
        no_fault = _either(no_fault, (text[k] ^ byte) | ((text[k - 1] == byte) ^ (text[k + 1] == byte)))
    return no_fault


# Separate scans of a block's ends: padding the block with line ends would copy it, and the copy's new pages take three
# times as long as the scan.


def spelled_plainly(bytes block, bytes delimiter):
    """Whether no field begins like 007, -0, 0x7 or +7, or touches white space: such ids are labels, not numbers.

    Parameters
    ----------
    block : bytes
        Whole lines.
    delimiter : bytes
        One byte.

    Returns
    -------
    bool
    """
    cdef Py_ssize_t n = len(block)
    cdef const uint8_t* text = block
    cdef bytes begin = b"\n" + block[:3] + b"\n\n\n", end = block[max(n - 3, 0):] + b"\n\n\n"
    cdef const uint8_t* first = begin
    cdef const uint8_t* last = end
    cdef uint8_t between = delimiter[0]
    cdef uint8_t no_fault
    with nogil:
        no_fault = _either(_no_fault(first, 1, between), _no_fault(last, min(n, 3), between))
        no_fault = _either(no_fault, _no_fault(text, n - 3, between))
    return no_fault != 0


def only_in_pairs(bytes block, bytes byte):
    """Whether every `byte` is one of exactly two in a row.

    Parameters
    ----------
    block, byte : bytes

    Returns
    -------
    bool
    """
    cdef Py_ssize_t n = len(block)
    cdef const uint8_t* text = block
    cdef bytes begin = b"\n" + block[:2] + b"\n", end = block[max(n - 2, 0):] + b"\n"
    cdef const uint8_t* first = begin
    cdef const uint8_t* last = end
    cdef uint8_t wanted = byte[0]
    cdef uint8_t no_fault
    with nogil:
        no_fault = _either(_paired(first, 1, wanted), _paired(last, min(n - 1, 1), wanted))
        no_fault = _either(no_fault, _paired(text, n - 2, wanted))
    return no_fault != 0
