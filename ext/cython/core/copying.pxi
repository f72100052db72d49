# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Copies between a serving engine's blocks and records, and of plain bytes.
#
# Addresses are ints: memory is never touched through Python objects.  The caller keeps an address mapped until the
# call has returned or, for a submitted job, until the job has ended.  Calls that touch payloads drop the GIL.  Every
# ValueError names the argument.

# For fewer bytes, giving up the GIL costs more than the work.
cdef size_t SHORT_BYTES = 16384


cdef int set_blocks(vector[uint32_t]& blocks, object ids, bint may_skip) except -1:
    cdef int64_t block
    cdef Py_ssize_t index = 0
    blocks.reserve(len(ids))
    for block_id in ids:
        try:
            block = block_id
        except OverflowError:
            block = 0xffffffff
        if block < 0 and may_skip:
            blocks.push_back(kSkipBlock)
        elif 0 <= block < <int64_t>0xffffffff:
            blocks.push_back(<uint32_t>block)
        else:
            raise ValueError(f"block_ids: not a block of the plan (got {block_id}, at index {index})")
        index += 1
    return 0


cdef BlockShape shape_of(object dims, object run_bytes, str where) except *:
    cdef vector[CopyDim] outer
    cdef CopyDim dim
    cdef BlockShape shape
    cdef Status status
    for count, stride in dims:
        dim.count = whole(count, where + "dims")
        dim.stride = whole(stride, where + "dims")
        outer.push_back(dim)
    status = BlockShape.create(DimSpan(outer.data(), outer.size()), whole(run_bytes, where + "run_bytes"), &shape)
    raise_for(status, CALL, where)
    return shape


cdef class CopyPlan:
    """Describes an engine's blocks; immutable, for any number of copies and threads.

    A plan has sections, typically one for each layer: `section_bases[i]` is the address of block 0 in section i,
    `block_stride[i]` the bytes from one of its blocks to the next.  The shape of a block is up to three outer
    dimensions `(count, stride in bytes)`, outermost first, around `run_bytes` contiguous bytes.  Either all sections
    have the shape `(dims, run_bytes)`, or section i has the shape `shapes[section_shapes[i]]`.  A section of a record
    holds the runs of each block, packed: blocks in the order given, runs in the order of the dimensions.
    """

    def __cinit__(
        self, section_bases: Sequence[int], num_blocks: int, block_stride: Sequence[int],
        dims: Sequence[tuple[int, int]] = (), run_bytes: int | None = None, *,
        shapes: Sequence[tuple[Sequence[tuple[int, int]], int]] | None = None, section_shapes: Sequence[int] | None = None
    ) -> None:
        cdef vector[CopySection] sections
        cdef vector[BlockShape] all_shapes
        cdef CopySection section
        if shapes is None:
            all_shapes.push_back(shape_of(dims, run_bytes, ""))
            section_shapes = [0] * len(section_bases)
        elif dims or run_bytes is not None:
            raise TypeError("shapes: describe every section, so dims and run_bytes may not be given with them")
        else:
            for index, (dims, run_bytes) in enumerate(shapes):
                all_shapes.push_back(shape_of(dims, run_bytes, f"shapes[{index}]."))
        for name, entries in (("block_stride", block_stride), ("section_shapes", section_shapes)):
            if len(section_bases) != len(entries):
                raise ValueError(
                    f"{name}: must have one entry per section, {len(section_bases)}, not {len(entries)}"
                )
        for base, stride, shape in zip(section_bases, block_stride, section_shapes):
            section.base = whole(base, "section_bases")
            section.block_stride = whole(stride, "block_stride")
            section.shape = whole32(shape, "section_shapes")
            sections.push_back(section)
        raise_for(CCopyPlan.create(move(sections), whole(num_blocks, "num_blocks"), move(all_shapes), &self.plan), CALL)

    @property
    def section_count(self) -> int:
        return self.plan.get().section_count()

    @property
    def num_blocks(self) -> int:
        return self.plan.get().num_blocks()

    def section_bytes(self, section: int, n_blocks: int) -> int:
        """Bytes of one section of a chunk of `n_blocks` blocks; ValueError if a section would have 4 GiB or more."""
        cdef uint64_t which = whole(section, "section")
        cdef uint64_t count = whole(n_blocks, "n_blocks")
        cdef uint64_t payload = 0
        if which >= self.plan.get().section_count():
            raise ValueError(f"section: {which} of a plan with {self.plan.get().section_count()}")
        raise_for(self.plan.get().payload_bytes(count, &payload), CALL)
        return self.plan.get().section_bytes(which, count)

    def payload_bytes(self, n_blocks: int) -> int:
        """Bytes of all sections of a chunk of `n_blocks` blocks."""
        cdef uint64_t result = 0
        raise_for(self.plan.get().payload_bytes(whole(n_blocks, "n_blocks"), &result), CALL)
        return result

    def record_bytes(self, n_blocks: int) -> int:
        """Bytes of the whole record, header included: what an extent needs."""
        cdef uint64_t result = 0
        raise_for(self.plan.get().record_bytes(whole(n_blocks, "n_blocks"), &result), CALL)
        return result


cdef CopyKind kind_of(object kind) except *:
    if kind == "gather":
        return CopyKind.kGather
    if kind == "scatter":
        return CopyKind.kScatter
    raise ValueError(f"kind: must be 'gather' or 'scatter', not {kind!r}")


cdef int set_items(vector[CopyItem]& out, CopyKind kind, object items) except -1:
    cdef Py_ssize_t index = 0
    cdef CopyItem* item
    out.reserve(len(items))
    for block_ids, extent_address, extent_len, what in items:
        try:
            out.emplace_back()
            item = &out.back()
            set_blocks(item.blocks, block_ids, kind == CopyKind.kScatter)
            item.record = <void*><size_t>whole(extent_address, "extent_address")
            item.length = whole(extent_len, "extent_len")
            if kind == CopyKind.kScatter:
                key, identity = what
                set_digest(item.spec.key, key, "key")
                set_digest(item.spec.identity, identity, "identity")
            elif isinstance(what, RecordSpec):
                item.spec = (<RecordSpec>what).spec
            else:
                raise TypeError(f"spec: must be a RecordSpec, not {type(what).__name__}")
        except ValueError as error:
            raise ValueError(f"items[{index}].{error}") from None
        index += 1
    return 0


cdef list codes_of(const vector[CCopyOutcome]& outcomes):
    cdef list codes = []
    for i in range(outcomes.size()):
        codes.append(<int>outcomes[i])
    return codes


cdef class CopyEngine:
    """Native copy threads. Jobs are lists of items of one kind; each item is one record.

    An item of a gather is (block_ids, extent_address, extent_len, RecordSpec), of a scatter (block_ids,
    extent_address, extent_len, (expected key, expected identity root)).  A gather makes a whole sealed record at
    `extent_address`, a multiple of 8.  A scatter verifies the record on the way: the part for a negative block id is
    verified, but written nowhere; after CORRUPT the blocks hold garbage, after any other outcome than OK they are
    untouched.  The engine copies all descriptions; blocks and extents stay the caller's and must stay mapped until the
    job has ended.  Thread-safe.  In a forked child the object does nothing.
    """

    cdef shared_ptr[CCopyEngine] engine
    cdef readonly int event_fd
    cdef readonly int threads

    def __cinit__(self, threads: int = 2, queue: int = 256) -> None:
        """Starts the threads (0 to 64; with 0 only `run` works). At most `queue` jobs may have unread completions."""
        self.threads = <int>min(whole(threads, "threads"), <uint64_t>1000)  # create() refuses over 64
        raise_for(CCopyEngine.create(self.threads, whole(queue, "queue"), &self.engine), CALL)
        self.event_fd = self.engine.get().event_fd()

    def __dealloc__(self):
        with nogil:  # joins the threads
            self.engine.reset()

    def submit(
        self, job_id: int, kind: Literal["gather", "scatter"], CopyPlan plan not None,
        items: Sequence[tuple[Sequence[int], int, int, Any]]
    ) -> bool:
        """Queues a job and never waits. False: the queue is full, read completions and try again.

        Raises ValueError for bad arguments, for a job id whose completion was not read yet, and after `close`; nothing
        is queued then.
        """
        cdef uint64_t number = whole(job_id, "job_id")
        cdef CopyKind which = kind_of(kind)
        cdef vector[CopyItem] list_of
        cdef Status status
        set_items(list_of, which, items)
        with nogil:
            status = self.engine.get().submit(number, which, plan.plan, move(list_of))
        if status.code() == StatusCode.kQueueFull:
            return False
        raise_for(status, ITEMS)
        return True

    def completions(self) -> list[tuple[int, list[int]]]:
        """Takes all ended jobs: (job id, one `CopyOutcome` per item), in the order in which they ended."""
        cdef vector[CopyCompletion] done
        with nogil:
            self.engine.get().completions(&done)
        return [(done[i].job_id, codes_of(done[i].outcomes)) for i in range(done.size())]

    def run(
        self, kind: Literal["gather", "scatter"], CopyPlan plan not None,
        items: Sequence[tuple[Sequence[int], int, int, Any]]
    ) -> list[int]:
        """Does a job now, before all queued ones, on this thread and idle copy threads. Raises as `submit`."""
        cdef CopyKind which = kind_of(kind)
        cdef vector[CopyItem] list_of
        cdef vector[CCopyOutcome] outcomes
        cdef Status status
        set_items(list_of, which, items)
        with nogil:
            status = self.engine.get().run(which, plan.plan, move(list_of), &outcomes)
        raise_for(status, ITEMS)
        return codes_of(outcomes)

    def cancel(self, job_id: int) -> bool:
        """Cancels the items that have not begun (their outcome is CANCELLED); the others are copied to their end.

        The job's completion comes as usual.  Returns whether any item was cancelled.
        """
        cdef uint64_t number = whole(job_id, "job_id")
        cdef bint cancelled
        with nogil:
            cancelled = self.engine.get().cancel(number)
        return cancelled

    def close(self) -> None:
        """Cancels the items that have not begun, waits for the others, ends the threads. Completions stay readable."""
        with nogil:
            self.engine.get().close()


def crc32c(buffer: Buffer, crc: int = 0) -> int:
    """CRC32C of the bytes, continued from `crc`."""
    cdef uint32_t state = whole32(crc, "crc")
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if <size_t>view.len <= SHORT_BYTES:
            return c_crc32c(view.buf, <size_t>view.len, state)
        with nogil:
            state = c_crc32c(view.buf, <size_t>view.len, state)
        return state
    finally:
        PyBuffer_Release(&view)


def crc32c_at(address: int, length: int, crc: int = 0) -> int:
    """CRC32C of memory, continued from `crc`."""
    cdef const void* where = <const void*><size_t>whole(address, "address")
    cdef size_t n = whole(length, "length")
    cdef uint32_t state = whole32(crc, "crc")
    if where == NULL and n != 0:
        raise ValueError("address: may not be 0")
    with nogil:
        state = c_crc32c(where, n, state)
    return state


def copy_strided(
    target_address: int, target_length: int, sources: Sequence[tuple[int, int]],
    copies: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]], int]]
) -> None:
    """Copies runs of bytes from sources, each (address, length), to a target that overlaps none of them.

    A copy is (index of the source, offset in the source, offset in the target, loops, bytes of a run); it has at most
    8 loops, outermost first, each (count, stride in the source, stride in the target).  Raises ValueError, before
    anything is written, when a copy leaves its source or the target.
    """
    cdef vector[ByteSpan] spans
    cdef vector[StridedCopy] all_copies
    cdef StridedCopy* copy
    cdef StridedLoop* loop
    cdef Status status
    cdef unsigned char* target = <unsigned char*><size_t>whole(target_address, "target_address")
    cdef size_t length = whole(target_length, "target_length")
    if target == NULL:
        raise ValueError("target_address: may not be 0")
    for address, n in sources:
        if address == 0:
            raise ValueError("sources: an address may not be 0")
        spans.push_back(ByteSpan(<const unsigned char*><size_t>whole(address, "sources"), whole(n, "sources")))
    for source, source_offset, target_offset, loops, run_bytes in copies:
        if len(loops) > kMaxStridedLoops:
            raise ValueError(f"copies: at most {kMaxStridedLoops} loops, not {len(loops)}")
        all_copies.emplace_back()
        copy = &all_copies.back()
        copy.source = whole32(source, "copies")
        copy.source_offset = whole(source_offset, "copies")
        copy.target_offset = whole(target_offset, "copies")
        copy.run_bytes = whole(run_bytes, "copies")
        copy.loop_count = <uint32_t>len(loops)
        loop = copy.loops_data()
        for count, source_stride, target_stride in loops:
            loop.count = whole(count, "copies")
            loop.source_stride = whole(source_stride, "copies")
            loop.target_stride = whole(target_stride, "copies")
            loop += 1
    with nogil:
        status = c_copy_strided(
            CopySpan(all_copies.data(), all_copies.size()),
            ByteSpans(spans.data(), spans.size()),
            WritableSpan(target, length),
        )
    raise_for(status, CALL)


def libc_copy_at(destination: int, source: int, length: int) -> None:
    """Copies memory with libc's memcpy, which leaves the copy in the cache."""
    cdef void* dst = <void*><size_t>whole(destination, "destination")
    cdef const void* src = <const void*><size_t>whole(source, "source")
    cdef size_t n = whole(length, "length")
    if (dst == NULL or src == NULL) and n != 0:
        raise ValueError("destination, source: may not be 0")
    with nogil:
        memcpy(dst, src, n)


def buffer_address(buffer: Buffer, *, writable: bool = False) -> int:
    """Address of an object's contiguous memory; valid while the object is alive and not resized."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
    cdef size_t address = <size_t>view.buf
    PyBuffer_Release(&view)
    return address


def crc32c_path() -> str:
    """The implementation in use: table, armcrc, sse42, vpclmul256 or vpclmul512."""
    return c_crc32c_path().decode()
