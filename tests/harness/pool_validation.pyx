# cython: language_level=3
"""What ext/core/tests/support/pool_validation.h does, for pools of Python."""

from cpp cimport *
from kvstrata.native.core cimport POOL, Pool, raise_for


cdef extern from "support/pool_validation.h" namespace "kvstrata" nogil:
    Status of_pool "kvstrata::validate"(CPool&) noexcept


def validate(Pool pool not None):
    cdef Status status
    with nogil:
        status = of_pool(pool.pool.get()[0])
    raise_for(status, POOL)
