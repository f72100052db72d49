# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# For other modules: the C++ hold behind a Python hold. Native code that copies `Hold.held` keeps the extent, and can
# drop the hold without the GIL.
from libcpp.memory cimport shared_ptr

from core_pool cimport CHold


cdef class Hold:
    cdef shared_ptr[CHold] held
