# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# For lanes.pyx: the C++ connector behind a Python connector, and the conversion of keys and answers.
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

from core_connector cimport CConnector, Digest, ExistsItem


cdef class NativeConnector:
    cdef shared_ptr[CConnector] connector
    cdef readonly dict capabilities
    cdef size_t per_piece

    cdef vector[ExistsItem] exists_items(self, object keys) except *


cdef int set_key(Digest& key, object value) except -1
cdef list found_of(vector[ExistsItem]& items, object found)
