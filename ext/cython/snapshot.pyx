# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Reads an index file for inspection (ext/core/src/pool/snapshot.h); see snapshot.pyi for the contract."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from core_status cimport Status
from kvstrata.native.status cimport SNAPSHOT, raise_for_format


cdef extern from "pool/snapshot.h" namespace "kvstrata" nogil:
    cdef uint32_t kRowCount
    cdef uint32_t kRowBits
    cdef uint64_t kIndexFlagHasL2
    cdef uint64_t kRowFlagRegistersMemory
    cdef uint32_t kNoEntry

    cdef cppclass FormatMismatch:
        const char* field
        uint64_t found
        uint64_t expected

    cdef cppclass CKey "kvstrata::Key":
        void store(void*) noexcept

    cdef cppclass IndexHeader:
        uint32_t format_version
        uint8_t pool_id[16]
        uint64_t extents_bytes, entry_capacity, epoch, heartbeat_ns, flags, slab_bytes

    cdef cppclass RowRecord:
        uint64_t claimed
        uint8_t session[16]
        uint8_t group[16]
        uint64_t epoch, pid, flags

    cdef cppclass CEntry "kvstrata::IndexSnapshot::Entry":
        uint32_t number
        uint8_t state
        cbool changing
        CKey key
        uint64_t offset
        uint32_t length, generation, parent
        uint64_t rows[2]
        uint8_t identity[16]
        uint64_t owner, tenant

    cdef cppclass CRun "kvstrata::IndexSnapshot::Run":
        uint32_t first_slab, slabs
        uint64_t extent_bytes

    cdef cppclass CIndexSnapshot "kvstrata::IndexSnapshot":
        @staticmethod
        Status open(int, CIndexSnapshot*, FormatMismatch*) except +
        const IndexHeader& header() noexcept
        const RowRecord& row(uint32_t) noexcept
        uint64_t file_bytes() noexcept
        uint32_t entries_touched() noexcept
        vector[CRun] runs() except +
        Status read(int, uint32_t, vector[CEntry]*, uint32_t*) except +


ROW_BITS = kRowBits


cdef bytes _id(const uint8_t* bytes):
    return PyBytes_FromStringAndSize(<const char*>bytes, 16)


cdef class IndexSnapshot:
    """See snapshot.pyi."""

    cdef CIndexSnapshot snapshot
    cdef int index_fd

    def __cinit__(self, int index_fd):
        cdef FormatMismatch mismatch
        cdef Status status = CIndexSnapshot.open(index_fd, &self.snapshot, &mismatch)
        raise_for_format(status, SNAPSHOT, mismatch.field, mismatch.found, mismatch.expected)
        self.index_fd = index_fd

    def header(self):
        header = self.snapshot.header()
        return {
            "file_bytes": self.snapshot.file_bytes(),
            "format_version": header.format_version,
            "pool_id": _id(header.pool_id),
            "extents_bytes": header.extents_bytes,
            "entry_capacity": header.entry_capacity,
            "entries_touched": self.snapshot.entries_touched(),
            "epoch": header.epoch,
            "heartbeat_ns": header.heartbeat_ns,
            "has_l2": bool(header.flags & kIndexFlagHasL2),
            "slab_bytes": header.slab_bytes,
        }

    def runs(self):
        return [(run.first_slab, run.slabs, run.extent_bytes) for run in self.snapshot.runs()]

    def rows(self):
        found = []
        for number in range(kRowCount):
            row = &self.snapshot.row(number)
            if row.claimed:
                found.append(
                    {
                        "row": number,
                        "session": _id(row.session),
                        "group": _id(row.group),
                        "pid": row.pid,
                        "epoch": row.epoch,
                        "registers_memory": bool(row.flags & kRowFlagRegistersMemory),
                    }
                )
        return found

    def read(self, uint32_t first):
        cdef vector[CEntry] entries
        cdef uint32_t following = 0
        cdef FormatMismatch mismatch
        cdef Status status
        cdef uint8_t key[32]
        with nogil:
            status = self.snapshot.read(self.index_fd, first, &entries, &following)
        raise_for_format(status, SNAPSHOT, mismatch.field, mismatch.found, mismatch.expected)
        found = []
        for entry in entries:
            entry.key.store(key)
            found.append(
                (
                    entry.number,
                    entry.state,
                    bool(entry.changing),
                    PyBytes_FromStringAndSize(<const char*>key, 32),
                    entry.offset,
                    entry.length,
                    entry.generation,
                    None if entry.parent == kNoEntry else entry.parent,
                    entry.rows[0] | (<object>entry.rows[1] << 64),
                    _id(entry.identity),
                    entry.owner,
                    entry.tenant,
                )
            )
        return found, following
