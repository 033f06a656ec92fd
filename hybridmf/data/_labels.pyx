"""A hash table of labels: their codes, in the order of first appearance, over any number of blocks of text.

Labels stand one after the other in `text`, label k from starts[k] to before starts[k + 1]. Slots are probed linearly;
one that is taken has the upper half of its label's hash, and 1 more than its code. At most half of them are taken.
"""

import random

import numpy as np

cimport cython

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

ctypedef fused offset_t:
    int32_t
    int64_t

cdef uint64_t LOW = 0xFFFFFFFF
cdef uint64_t FACTOR = 0x9E3779B97F4A7C15


cdef inline uint64_t _first_bytes(uint64_t word, Py_ssize_t n) noexcept nogil:
    """The n < 8 bytes of a word that come first in memory, the others 0."""
    cdef uint64_t one = 1
    if (<uint8_t*> &one)[0]:  # little end first; known to compilers
        return word & ((one << (8 * n)) - 1)
    return word >> (64 - 8 * n) << (64 - 8 * n)


cdef inline uint64_t _hash(
        const uint8_t* label,     # IN   (n,)
        Py_ssize_t n,
        const uint8_t* end,       # where the text ends in which the label is
        uint64_t seed) noexcept nogil:
    cdef uint64_t value = seed ^ <uint64_t> n, word
    while n >= 8:
        memcpy(&word, label, 8)
        value = (value ^ word) * FACTOR
        value ^= value >> 32
        label += 8
        n -= 8
    word = 0
    if n and end - label >= 8:  # eight bytes at once, where a loop would be predicted wrong at labels of other lengths
        memcpy(&word, label, 8)
        word = _first_bytes(word, n)
    elif n:
        memcpy(&word, label, n)
    value = (value ^ word) * FACTOR
    value ^= value >> 29
    return value * FACTOR


@cython.auto_pickle(False)
cdef class LabelTable:
    """Labels that were seen so far.

    Codes do not depend on the seed of the hashes, which is another one in each table: no file can make labels collide.
    """

    cdef uint64_t[::1] slots
    cdef int64_t[::1] starts
    cdef uint8_t[::1] text
    cdef Py_ssize_t count
    cdef uint64_t seed

    def __cinit__(self):
        self.slots = np.zeros(1 << 10, dtype=np.uint64)
        self.starts = np.zeros(1, dtype=np.int64)
        self.text = np.empty(1, dtype=np.uint8)
        self.seed = random.getrandbits(64)

    def __len__(self):
        return self.count

    def codes(self, const offset_t[::1] bounds, const uint8_t[::1] text):
        """Codes of labels; new ones enter the table.

        Parameters
        ----------
        bounds : int32 or int64 array, shape (n + 1,)
            Where each label starts and the last one ends.
        text : uint8 array, not empty
            The labels in UTF-8.

        Returns
        -------
        int32 array, shape (n,)
        """
        cdef Py_ssize_t n = bounds.shape[0] - 1, k
        found = np.empty(n, dtype=np.int32)
        cdef int32_t[::1] out = found
        if n > 0:
            self._reserve(n, bounds[n] - bounds[0])
        with nogil:
            for k in range(n):
                out[k] = self._code(&text[0] + bounds[k], bounds[k + 1] - bounds[k], &text[0] + text.shape[0])
        return found

    def labels(self, Py_ssize_t first=0):
        """Labels from a code on, as a list of strings."""
        cdef const char* text = <const char*> &self.text[0]
        cdef Py_ssize_t k
        return [text[self.starts[k]:self.starts[k + 1]].decode() for k in range(first, self.count)]

    cdef int32_t _code(self, const uint8_t* label, Py_ssize_t n, const uint8_t* end) noexcept nogil:
        """Code of a label, for which there is room."""
        cdef uint64_t value = _hash(label, n, end, self.seed), slot
        cdef uint64_t mask = self.slots.shape[0] - 1
        cdef uint64_t place = value & mask
        cdef int64_t start
        cdef Py_ssize_t code
        while self.slots[place]:
            slot = self.slots[place]
            if (slot ^ value) <= LOW:
                code = <Py_ssize_t> (slot & LOW) - 1
                start = self.starts[code]
                if self.starts[code + 1] - start == n and memcmp(&self.text[start], label, n) == 0:
                    return <int32_t> code
            place = (place + 1) & mask
        code = self.count
        start = self.starts[code]
        memcpy(&self.text[start], label, n)
        self.starts[code + 1] = start + n
        self.count = code + 1
        self.slots[place] = (value & ~LOW) | <uint64_t> self.count
        return <int32_t> code

    cdef int _reserve(self, Py_ssize_t n, Py_ssize_t n_bytes) except -1:
        """Make room for n more labels of so many bytes altogether."""
        cdef Py_ssize_t slots = self.slots.shape[0], code, start
        cdef uint64_t value, place
        cdef const uint8_t* end
        if self.count + n >= 2**31:
            raise OverflowError(f"more than {2**31 - 1} labels")
        self.text = _longer(self.text, self.starts[self.count] + n_bytes + 1)
        self.starts = _longer(self.starts, self.count + n + 1)
        while slots < 2 * (self.count + n):
            slots *= 2
        if slots > self.slots.shape[0]:
            self.slots = np.zeros(slots, dtype=np.uint64)
            end = &self.text[0] + self.text.shape[0]
            with nogil:
                for code in range(self.count):
                    start = self.starts[code]
                    value = _hash(&self.text[start], self.starts[code + 1] - start, end, self.seed)
                    place = value & (slots - 1)
                    while self.slots[place]:
                        place = (place + 1) & (slots - 1)
                    self.slots[place] = (value & ~LOW) | <uint64_t> (code + 1)
        return 0


def _longer(array, Py_ssize_t size):
    """The array itself if it has so many elements, else a copy of at least twice its size."""
    array = np.asarray(array)
    if len(array) >= size:
        return array
    longer = np.empty(max(size, 2 * len(array)), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
