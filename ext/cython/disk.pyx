# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""The disk log (ext/core/src/disk/log.h); see disk.pyi for the contract."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string


cdef extern from "disk/log.h" namespace "kvstrata" nogil:
    const char* connector_capsule_name

    cdef cppclass DiskOptions:
        string folder
        uint64_t capacity_bytes, segment_bytes, min_free_bytes
        cbool direct
        uint32_t reinsert_percent
        uint64_t scrub_bytes_per_s

    cdef cppclass CDiskLog "kvstrata::DiskLog":
        CDiskLog(DiskOptions) except +

    uint64_t kMinDiskBytes

    # A capsule holds a Connector*, which is not the address of every DiskLog*.
    cdef cppclass CConnector "kvstrata::Connector":
        pass


MIN_CAPACITY_BYTES = kMinDiskBytes


def disk_connector(
    folder, *, capacity_bytes, segment_bytes=0, min_free_bytes=0, direct=True, reinsert_percent=20, scrub_bytes_per_s=0
):
    """See disk.pyi."""
    cdef DiskOptions options
    options.folder = folder.encode("utf-8", "surrogateescape")
    options.capacity_bytes = capacity_bytes
    options.segment_bytes = segment_bytes
    options.min_free_bytes = min_free_bytes
    options.direct = direct
    options.reinsert_percent = reinsert_percent
    options.scrub_bytes_per_s = scrub_bytes_per_s
    cdef CConnector* made = <CConnector*>new CDiskLog(options)
    return PyCapsule_New(made, connector_capsule_name, NULL)
