# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""Conversion of numbers that the modules get from Python."""

from cpython.long cimport PyLong_AsLongLong
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp.vector cimport vector


cdef inline uint64_t whole(object value, str name) except? 0xffffffffffffffff:
    """Converts `value` to an unsigned number below 2**63. Raises ValueError or TypeError that names the argument."""
    cdef object number
    cdef long long result
    try:
        number = value.__index__()
    except AttributeError:
        raise TypeError(f"{name}: must be an int, not {type(value).__name__}") from None
    try:
        result = PyLong_AsLongLong(number)
    except OverflowError:
        result = -1
    if result < 0:
        raise ValueError(f"{name}: must be between 0 and 2**63 - 1, not {value!r}")
    return <uint64_t>result


cdef inline uint32_t whole32(object value, str name) except? 0xffffffff:
    """Converts `value` to an unsigned number below 2**32; raises as whole() does."""
    cdef uint64_t result = whole(value, name)
    if result > <uint64_t>0xffffffff:
        raise ValueError(f"{name}: must be below 2**32, not {value!r}")
    return <uint32_t>result


cdef inline vector[uint32_t] spans_of(object spans, size_t n_keys) except *:
    """The spans of slices. Raises ValueError unless there is at least one, and n_keys is a multiple of their count."""
    cdef vector[uint32_t] each
    for span in spans:
        each.push_back(whole32(span, "spans"))
    if each.size() == 0 or n_keys % each.size():
        raise ValueError(f"spans: {each.size()} spans for {n_keys} keys")
    return each


cdef inline vector[uint32_t] spans_or_zeros(object spans, size_t n_slices, size_t n_keys) except *:
    """The spans of n_slices slices; zeros if `spans` is empty. Raises ValueError as spans_of(), or for another count."""
    if not spans:
        return vector[uint32_t](n_slices, 0)
    cdef vector[uint32_t] each = spans_of(spans, n_keys)
    if each.size() != n_slices:
        raise ValueError(f"spans: {each.size()} spans for {n_slices} slices")
    return each
