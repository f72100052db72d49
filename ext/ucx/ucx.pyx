# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""The UCX engine (ext/ucx/engine.h); see ucx.pyi for the contract."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move, pair
from libcpp.vector cimport vector


cdef extern from "engine.h" namespace "kvstrata" nogil:
    cdef cppclass UcxItem:
        uint64_t remote_offset, local_offset, length

    enum class UcxEnd(uint8_t):
        pass

    cdef cppclass UcxEvent:
        uint64_t ticket
        UcxEnd end
        string text

    cdef cppclass UcxOptions:
        string library
        vector[pair[string, string]] config
        uint64_t memory, memory_bytes

    cdef cppclass CUcxEngine "kvstrata::UcxEngine":
        CUcxEngine(UcxOptions) except +
        int event_fd()
        vector[UcxEvent] take_events() except +
        void connect(uint64_t ticket, uint64_t connection, string packed, uint64_t memory_bytes) except +
        void read(uint64_t ticket, uint64_t connection, vector[UcxItem] items) except +
        void cancel(uint64_t read_ticket) except +
        void disconnect(uint64_t ticket, uint64_t connection) except +
        void begin_close(uint64_t ticket) except +
        void close()


cdef class UcxEngine:
    cdef unique_ptr[CUcxEngine] engine

    def __cinit__(self, library, config, region):
        cdef UcxOptions options
        options.library = library.encode("utf-8", "surrogateescape")
        for name, value in config.items():
            options.config.push_back(pair[string, string](name.encode(), value.encode()))
        options.memory, options.memory_bytes = region
        self.engine.reset(new CUcxEngine(move(options)))

    def __dealloc__(self):
        if self.engine:
            with nogil:
                self.engine.get().close()

    @property
    def event_fd(self):
        return self.engine.get().event_fd()

    def take_events(self):
        cdef vector[UcxEvent] events = self.engine.get().take_events()
        cdef list taken = []
        cdef size_t i
        for i in range(events.size()):
            taken.append((events[i].ticket, <uint8_t>events[i].end, <bytes>events[i].text))
        return taken

    def connect(self, ticket, connection, bytes packed not None, region_bytes):
        self.engine.get().connect(ticket, connection, packed, region_bytes)

    def read(self, ticket, connection, items):
        cdef vector[UcxItem] wanted
        cdef UcxItem item
        wanted.reserve(len(items))
        for item.remote_offset, item.local_offset, item.length in items:
            wanted.push_back(item)
        self.engine.get().read(ticket, connection, move(wanted))

    def cancel(self, read_ticket):
        self.engine.get().cancel(read_ticket)

    def disconnect(self, ticket, connection):
        self.engine.get().disconnect(ticket, connection)

    def begin_close(self, ticket):
        self.engine.get().begin_close(ticket)

    def close(self):
        with nogil:
            self.engine.get().close()
