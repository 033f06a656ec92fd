"""A scan of delimited text for ids that other readers take for labels, not numbers: one pass without branches."""

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

# Tests are 0 where they hold, so that "or" is the minimum and "and" is |: compilers vectorize these, which reads ten
# times as fast as tests of equality, of which they make shifts.


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
    """0 if at one of n places a separator and an odd field meet."""
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
    """0 if at one of the n places from the second on `byte` has it on both sides, or on neither."""
    cdef uint8_t no_fault = 255
    cdef Py_ssize_t k
    for k in range(1, n + 1):
        no_fault = _either(no_fault, (text[k] ^ byte) | ((text[k - 1] == byte) ^ (text[k + 1] == byte)))
    return no_fault


# The ends of a block are scanned separately: surrounding the block with line ends would copy it, and the new pages take
# three times as long as the scan.


def spelled_plainly(bytes block, bytes delimiter):
    """Whether no field begins like 007, -0, 0x7 or +7, or is beside white space: such ids are labels, not numbers.

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
    """Whether no `byte` stands alone, or beside more than one other.

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
