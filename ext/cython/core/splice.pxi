# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Passing answers on in a thread (ext/core/src/splice).

cdef extern from "splice/chunks.h" namespace "kvstrata" nogil:
    cdef cppclass CChunkReader "kvstrata::ChunkReader":
        size_t decode(uint8_t*, size_t, size_t*) noexcept
        cbool done() noexcept
        cbool broken() noexcept


cdef extern from "splice/splicer.h" namespace "kvstrata" nogil:
    enum class SpliceEnd(unsigned char):
        kNone

    cdef cppclass SpliceOptions:
        int engine_fd, client_fd
        int64_t silence_ns, stalled_ns
        cbool events

    cdef cppclass CSplice "kvstrata::Splice":
        SpliceEnd end
        cbool exact
        uint64_t id
        uint64_t body_bytes, events
        int64_t last_ns
        vector[uint32_t] gaps
        int64_t gaps_ns
        string tail

    cdef cppclass CSplicer "kvstrata::Splicer":
        @staticmethod
        Status create(vector[int64_t], unique_ptr[CSplicer]*) noexcept
        int event_fd() noexcept
        Status start(const SpliceOptions&, ByteSpan, ByteSpan, shared_ptr[CSplice]*, cbool*) noexcept
        void stop(uint64_t) noexcept
        shared_ptr[CSplice] take_ended() noexcept
        void close() noexcept


cdef tuple SPLICE_ENDS = ("", "done", "engine_closed", "engine_failed", "not_chunked", "silent", "client_gone", "stalled", "stopped")


cdef class Splice:
    cdef shared_ptr[CSplice] core
    cdef readonly bint is_over

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("splices come from Splicer.start")

    @property
    def number(self):
        return self.core.get().id

    @property
    def end(self):
        return SPLICE_ENDS[<int>self.core.get().end]

    @property
    def exact(self):
        return self.core.get().exact

    @property
    def body_bytes(self):
        return self.core.get().body_bytes

    @property
    def events(self):
        return self.core.get().events

    @property
    def last_s(self):
        return self.core.get().last_ns / 1e9

    @property
    def gaps(self):
        return self.core.get().gaps

    @property
    def gaps_s(self):
        return self.core.get().gaps_ns / 1e9

    @property
    def tail(self):
        return <bytes>self.core.get().tail


cdef class Splicer:
    cdef unique_ptr[CSplicer] core
    cdef dict open

    def __cinit__(self, bounds_s):
        cdef vector[int64_t] bounds_ns = [round(bound_s * 1e9) for bound_s in bounds_s]
        raise_for(CSplicer.create(move(bounds_ns), &self.core), CALL)
        self.open = {}

    @property
    def event_fd(self):
        return self.core.get().event_fd()

    def __len__(self):
        return len(self.open)

    def start(self, int engine_fd, int client_fd, head, early, *, double silence_s, double stalled_s, bint events):
        cdef BorrowedBuffer first, second
        cdef SpliceOptions options
        cdef Splice splice = Splice.__new__(Splice, MADE_HERE)
        cdef cbool under_way = False
        options.engine_fd, options.client_fd = engine_fd, client_fd
        options.silence_ns, options.stalled_ns = <int64_t>(silence_s * 1e9), <int64_t>(stalled_s * 1e9)
        options.events = events
        first.take(head)
        second.take(early)
        raise_for(
            self.core.get().start(
                options,
                ByteSpan(first.data(), first.bytes()),
                ByteSpan(second.data(), second.bytes()),
                &splice.core,
                &under_way,
            ),
            CALL,
        )
        splice.is_over = not under_way
        if under_way:
            self.open[splice.core.get().id] = splice
        return splice

    def stop(self, Splice splice not None):
        self.core.get().stop(splice.core.get().id)

    def take_ended(self):
        cdef shared_ptr[CSplice] ended
        cdef Splice splice
        cdef list found = []
        while True:
            ended = self.core.get().take_ended()
            if not ended:
                return found
            splice = self.open.pop(ended.get().id)
            splice.is_over = True
            found.append(splice)

    def close(self):
        with nogil:
            self.core.get().close()


def decoded(bytes coded not None):
    cdef CChunkReader reader
    cdef bytearray kept = bytearray(coded)
    cdef uint8_t* start = kept
    cdef size_t used = 0
    cdef size_t count = reader.decode(start, len(kept), &used)
    return bytes(kept[:count]), used, "done" if reader.done() else "broken" if reader.broken() else "more"
