# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# For the copy engines (copying.pyx, cuda.pyx): the C++ spec behind a Python spec.
from core_copying cimport CRecordSpec


cdef class RecordSpec:
    cdef CRecordSpec spec
