# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""The KV blocks of a simulated engine: see engine_blocks.pyi for the contract."""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_GetBuffer
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport make_unique, unique_ptr
from libcpp.vector cimport vector


cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass TokenSpan "std::span<const std::uint32_t>":
        TokenSpan()
        TokenSpan(const uint32_t*, size_t)
        size_t size()
        const uint32_t& operator[](size_t)

    cdef cppclass DecoderSpan "std::span<kvstrata::sim::Decoder>":
        DecoderSpan()
        DecoderSpan(Decoder*, size_t)


cdef extern from "sim/engine_blocks.h" namespace "kvstrata::sim" nogil:
    cdef cppclass CoreSequence "kvstrata::sim::Sequence":
        TokenSpan tokens
        uint64_t root
        vector[uint64_t] keys
        vector[uint32_t] blocks
        size_t stored
        void derive_keys(size_t, size_t) except +

    struct Change:
        size_t step
        size_t number
        size_t full
        size_t removed

    struct Decoder:
        CoreSequence* sequence
        size_t computed

    cdef cppclass CoreBlocks "kvstrata::sim::EngineBlocks":
        CoreBlocks(size_t, size_t, cpp_bool) except +
        CoreBlocks(const CoreBlocks&) except +
        size_t count()
        size_t free()
        Py_ssize_t admit(CoreSequence&, size_t) except +
        size_t find(CoreSequence&, size_t) except +
        cpp_bool reserve(CoreSequence&, size_t, vector[uint64_t]&) except +
        cpp_bool grow(CoreSequence&, size_t, vector[uint64_t]&) except +
        void decode(DecoderSpan, size_t, vector[Change]&, vector[uint64_t]&) except +
        cpp_bool fits(DecoderSpan, size_t)
        void release(CoreSequence&) except +
        cpp_bool clear()
        TokenSpan users()
        uint64_t key(size_t)
        cpp_bool keyed(size_t)
        vector[uint32_t] free_order() except +
        uint32_t found(uint64_t)


cdef class Sequence:
    cdef CoreSequence core
    cdef Py_buffer view
    cdef bint viewed
    cdef bint decodes

    def __cinit__(self, tokens, uint64_t root=0):
        PyObject_GetBuffer(tokens, &self.view, PyBUF_FORMAT | PyBUF_ND)
        self.viewed = True
        if self.view.itemsize != 4 or self.view.format == NULL or self.view.format[0] != b"I":
            raise TypeError("tokens: must be an array of type 'I'")
        self.core.tokens = TokenSpan(<const uint32_t*>self.view.buf, <size_t>self.view.len // 4)
        self.core.root = root

    def __dealloc__(self):
        if self.viewed:
            PyBuffer_Release(&self.view)

    @property
    def blocks(self):
        return list(self.core.blocks)

    @property
    def stored(self):
        return self.core.stored

    def keys(self, Py_ssize_t first, Py_ssize_t end, Py_ssize_t block_tokens):
        self.derive(first, end, block_tokens)
        return [self.core.keys[i] for i in range(first, end)]

    def stored_parts(self, Py_ssize_t first, Py_ssize_t end, Py_ssize_t block_tokens):
        self.derive(first, end, block_tokens)
        return self.parts(first, end, block_tokens)

    def copy(self):
        cdef Sequence made = Sequence(<object>self.view.obj, self.core.root)
        made.core = self.core
        return made

    cdef int derive(self, Py_ssize_t first, Py_ssize_t end, Py_ssize_t block_tokens) except -1:
        if not 0 <= first <= end or block_tokens < 1 or <size_t>(end * block_tokens) > self.core.tokens.size():
            raise ValueError(f"blocks {first} to {end} of {block_tokens} tokens: not all are full")
        self.core.derive_keys(end, block_tokens)
        return 0

    cdef tuple parts(self, Py_ssize_t first, Py_ssize_t end, Py_ssize_t block_tokens):
        cdef Py_ssize_t i
        keys = [self.core.keys[i] for i in range(first, end)]
        tokens = [self.core.tokens[i] for i in range(first * block_tokens, end * block_tokens)]
        return keys, self.core.keys[first - 1] if first else None, tokens


cdef class EngineBlocks:
    cdef unique_ptr[CoreBlocks] core
    cdef vector[uint64_t] removed
    cdef vector[Change] changes
    cdef vector[Decoder] decoders
    cdef list joined
    cdef Py_ssize_t block_tokens

    def __cinit__(self, Py_ssize_t count, Py_ssize_t block_tokens, *, bint finds):
        if not 0 < count < 1 << 31 or block_tokens < 1:
            raise ValueError(f"{count} blocks of {block_tokens} tokens: both must be positive and below 2**31")
        self.joined = []
        self.block_tokens = block_tokens
        self.core = make_unique[CoreBlocks](<size_t>count, <size_t>block_tokens, <cpp_bool>finds)

    @property
    def count(self):
        return self.core.get().count()

    @property
    def free(self):
        return self.core.get().free()

    def admit(self, Sequence sequence not None, size_t known):
        self.check(sequence, known)
        if known == 0 or not sequence.core.blocks.empty():
            raise ValueError("only a sequence with known tokens and without blocks can be admitted")
        return self.core.get().admit(sequence.core, known)

    def find(self, Sequence sequence not None, size_t known):
        self.check(sequence, known)
        if known == 0:
            raise ValueError("a sequence without known tokens finds nothing")
        return self.core.get().find(sequence.core, known)

    def reserve(self, Sequence sequence not None, size_t tokens):
        self.check(sequence, tokens)
        self.removed.clear()
        if not self.core.get().reserve(sequence.core, tokens, self.removed):
            return None
        return self.taken(0, self.removed.size())

    def grow(self, Sequence sequence not None, size_t tokens):
        self.check(sequence, tokens)
        cdef size_t before = sequence.core.stored
        self.removed.clear()
        if not self.core.get().grow(sequence.core, tokens, self.removed):
            return None
        return sequence.core.stored - before, self.taken(0, self.removed.size())

    def join(self, Sequence sequence not None, size_t computed):
        self.check(sequence, computed)
        if sequence.decodes:
            raise ValueError("the sequence decodes already")
        sequence.decodes = True
        self.joined.append(sequence)
        self.decoders.push_back(Decoder(&sequence.core, computed))

    def leave(self, Py_ssize_t number):
        if not 0 <= number < len(self.joined):
            raise IndexError(f"there is no decoder {number}")
        cdef Sequence sequence = self.joined.pop(number)
        sequence.decodes = False
        self.decoders.erase(self.decoders.begin() + number)

    def fits(self, size_t steps):
        return self.core.get().fits(DecoderSpan(self.decoders.data(), self.decoders.size()), steps)

    def decode(self, size_t steps, *, bint tell):
        cdef size_t i, at = 0
        cdef Sequence sequence
        cdef DecoderSpan decoders = DecoderSpan(self.decoders.data(), self.decoders.size())
        if not self.core.get().fits(decoders, steps):
            raise ValueError(f"{steps} steps: the decoders have fewer tokens, or too few blocks are free")
        self.removed.clear()
        self.changes.clear()
        self.core.get().decode(decoders, steps, self.changes, self.removed)
        told = []
        if not tell:
            return told
        for i in range(self.changes.size()):
            change = &self.changes[i]
            if change.full or change.removed:
                parts = None
                if change.full:
                    sequence = self.joined[change.number]
                    parts = sequence.parts(change.full - 1, change.full, self.block_tokens)
                told.append((change.step, change.number, self.taken(at, at + change.removed), parts))
                at += change.removed
        return told

    def release(self, Sequence sequence not None):
        if sequence.decodes:
            raise ValueError("a sequence that decodes must leave before it is released")
        self.core.get().release(sequence.core)

    def copy(self):
        cdef EngineBlocks made = EngineBlocks(1, self.block_tokens, finds=False)
        made.core = make_unique[CoreBlocks](self.core.get()[0])
        return made

    def clear(self):
        return self.core.get().clear()

    def stored_keys(self):
        counts = {}
        for block in range(self.core.get().count()):
            if self.core.get().keyed(block):
                key = self.core.get().key(block)
                counts[key] = counts.get(key, 0) + 1
        return counts

    def free_order(self):
        return list(self.core.get().free_order())

    def validate(self, held):
        cdef CoreBlocks* core = self.core.get()
        users = [0] * core.count()
        for block in held:
            users[block] += 1
        for block in range(core.count()):
            assert users[block] == core.users()[block]
            assert not core.keyed(block) or core.key(core.found(core.key(block))) == core.key(block)
        order = self.free_order()
        assert len(order) == core.free()
        assert sorted(order) == [block for block in range(core.count()) if not users[block]]

    cdef int check(self, Sequence sequence, size_t tokens) except -1:
        if tokens > sequence.core.tokens.size():
            raise ValueError(f"{tokens} tokens of a sequence that has {sequence.core.tokens.size()}")
        return 0

    cdef tuple taken(self, size_t first, size_t end):
        if first == end:
            return ()
        return tuple([self.removed[i] for i in range(first, end)])
