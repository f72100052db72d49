# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Bounded queues and threads for an adapter's blocking work, and the calls of connectors that run in them
# (ext/core/src/lanes). Lanes are numbered in order of precedence: 0 lookup, 1 load, 2 delete, 3 put.

cdef extern from "lanes/lanes.h" namespace "kvstrata" nogil:
    enum class CLane "kvstrata::Lane"(unsigned char):
        pass

    cdef cppclass LaneJob:
        pass

    cdef cppclass LaneOptions:
        string name
        uint32_t common_workers
        uint32_t* own_workers "own_workers.data()"
        uint32_t queue_limit

    cdef cppclass CLanes "kvstrata::Lanes":
        @staticmethod
        Status create(const LaneOptions&, unique_ptr[CLanes]*) noexcept
        int event_fd() noexcept
        Status submit(CLane, unique_ptr[LaneJob]&, cbool) noexcept
        void take_done(vector[unique_ptr[LaneJob]]*) noexcept
        void stop() noexcept
        cbool idle() noexcept
        void close() noexcept
        @staticmethod
        void abandon(unique_ptr[CLanes]) noexcept


cdef extern from "lanes/connector_jobs.h" namespace "kvstrata" nogil:
    cdef cppclass ExistsJob:
        vector[ExistsItem] items
    cdef cppclass PutJob:
        vector[PutItem] items
        vector[Digest] evicted
    cdef cppclass LoadJob:
        vector[LoadItem] items
        vector[Digest] evicted
        double wait_s
        double verify_s


cdef extern from "python_jobs.h" namespace "kvstrata::python":
    unique_ptr[LaneJob] make_call(PyObject*, void (*)(PyObject*) noexcept) except +
    unique_ptr[LaneJob] make_exists(PyObject*, shared_ptr[CConnector], vector[ExistsItem]&) except +
    unique_ptr[LaneJob] make_put "kvstrata::python::make_batch<kvstrata::PutJob>"(
        PyObject*, shared_ptr[CConnector], vector[PutItem]&, size_t
    ) except +
    unique_ptr[LaneJob] make_load "kvstrata::python::make_batch<kvstrata::LoadJob>"(
        PyObject*, shared_ptr[CConnector], vector[LoadItem]&, size_t
    ) except +
    PyObject* token_of(LaneJob*) noexcept
    T* job_as[T](LaneJob*) noexcept
    BytesHold hold_of(shared_ptr[CHold]) except +
    BytesHold hold_of_object(PyObject*) except +


cdef enum Kind:
    CALL, EXISTS, PUT, LOAD


cdef class _Token:
    """The Python side of one submitted job; the job owns a reference to it.

    A Python call has `work` until it has run, then `result` or `error`.  A batch has the items that it settles, and
    the outcome for each status.
    """

    cdef object token
    cdef Kind kind
    cdef object work
    cdef object result
    cdef object error
    cdef object items
    cdef object outcomes

    def __cinit__(self, token, int kind, items=None, outcomes=None):
        self.token = token
        self.kind = <Kind>kind
        self.items = items
        self.outcomes = outcomes


cdef void run_call(PyObject* owned) noexcept with gil:
    cdef _Token call = <_Token><object>owned
    try:
        call.result = call.work()
    except BaseException as error:  # this function supervises the thread: the submitter gets the error
        call.error = error
    call.work = None  # frees the objects of the call now, and not when the event loop reads the result


cdef BytesHold _hold(object hold) except *:
    if isinstance(hold, Hold):
        return hold_of((<Hold>hold).held)
    return hold_of_object(<PyObject*>hold)


ctypedef fused Moved:
    PutItem
    LoadItem


cdef int _fill(vector[Moved]& moved, object items) except -1:
    cdef size_t i = 0
    moved.resize(len(items))
    for item in items:
        hold = item.hold
        set_key(moved[i].key, item.key)
        moved[i].bytes = <uint8_t*><size_t>hold.address
        moved[i].length = hold.length
        moved[i].hold = _hold(hold)
        i += 1
    return 0


cdef int _settle(_Token token, vector[Moved]& moved) except -1:
    cdef size_t i = 0
    for item in token.items:
        item.outcome = token.outcomes[<int>moved[i].status]
        if moved[i].reason[0]:
            item.reason = moved[i].reason.decode()
        i += 1
    return 0


cdef object _outcome(_Token token, LaneJob* job):
    """The result of an ended job, as `submit_put` and `submit_load` describe it; settles the items of a batch."""
    cdef PutJob* put
    cdef LoadJob* load
    if token.kind == CALL:
        return token.result
    if token.kind == EXISTS:
        return presences_of(job_as[ExistsJob](job).items)
    if token.kind == PUT:
        put = job_as[PutJob](job)
        _settle(token, put.items)
        return 0.0, keys_of(put.evicted), 0.0
    load = job_as[LoadJob](job)
    _settle(token, load.items)
    return load.wait_s, keys_of(load.evicted), load.verify_s


cdef class NativeLanes:
    """The four lanes of one adapter. Thread-safe. A thread starts with the first work that needs it.

    If the object is destroyed without `close`, its threads finish the running work by themselves, and do not keep the
    process from ending.
    """

    cdef unique_ptr[CLanes] lanes

    def __cinit__(self, name: str, common_workers: int, own_workers: Sequence[int], queue_limit: int) -> None:
        """A lane has `own_workers[lane]` threads of its own; lanes with 0 share `common_workers` threads.

        At most `queue_limit` pieces of work wait in one lane. Raises ValueError for numbers out of bounds.
        """
        cdef LaneOptions options
        cdef Status status
        options.name = (<str>name).encode()
        options.common_workers = common_workers
        options.queue_limit = queue_limit
        if len(own_workers) != 4:
            raise ValueError(f"own_workers: must have 4 numbers, not {len(own_workers)}")
        for lane, workers in enumerate(own_workers):
            options.own_workers[<int>lane] = <uint32_t>workers
        status = CLanes.create(options, &self.lanes)
        raise_for(status, LANES)

    def __dealloc__(self):
        with nogil:  # joins the threads; leaks them if one is busy, because its job may never end
            CLanes.abandon(move(self.lanes))

    @property
    def event_fd(self) -> int:
        """Readable while work has ended and was not taken, and once when the last thread has left after `stop`."""
        return self.lanes.get().event_fd()

    cdef object _submit(self, int lane, unique_ptr[LaneJob]& job, object beyond_limit):
        cdef Status status
        cdef cbool beyond = bool(beyond_limit)
        if not 0 <= lane < 4:
            raise ValueError(f"lane: must be 0 to 3, not {lane}")
        with nogil:
            status = self.lanes.get().submit(<CLane>lane, job, beyond)
        if status.ok():
            return True
        job.reset()  # while this thread has the GIL; also drops the holds of the job's items
        if status.code() == StatusCode.kQueueFull:
            return False
        raise_for(status, LANES)

    def submit(self, int lane, work: Callable[[], Any], beyond_limit: bool, token: object) -> bool:
        """Queue `work`, to be called once in a thread of that lane; False, and nothing happens, when the lane is full.

        `token` names the work in `take_done`.  With `beyond_limit` the work is queued even if the lane is full.
        Raises RuntimeError after `stop`, OSError when no thread can be started.  The other `submit_…` methods raise
        likewise.
        """
        cdef _Token call = _Token(token, CALL)
        cdef unique_ptr[LaneJob] job
        call.work = work
        job = make_call(<PyObject*>call, run_call)
        return self._submit(lane, job, beyond_limit)

    def submit_exists(self, int lane, NativeConnector connector not None, keys: bytes, token: object) -> bool:
        """Ask which keys exist; the result is that of `NativeConnector.exists_now`."""
        cdef vector[ExistsItem] items = connector.exists_items(keys)
        cdef _Token owner = _Token(token, EXISTS)
        cdef unique_ptr[LaneJob] job
        job = make_exists(<PyObject*>owner, connector.connector, items)
        return self._submit(lane, job, False)

    def submit_put(
        self, int lane, NativeConnector connector not None, items: Sequence[Any], outcomes: Sequence[Any],
        token: object
    ) -> bool:
        """Put records given as items with `key` and `hold`; drops the holds, even if it returns False or raises.

        A hold has `address`, `length` and `drop()`.  `take_done` sets the `outcome` of each item to that of
        `outcomes` with the number of its PutStatus, and its `reason`.  The result is (0.0, keys that the connector's
        cap dropped since it was last asked, 0.0).
        """
        cdef vector[PutItem] batch
        cdef _Token owner = _Token(token, PUT, items, outcomes)
        cdef unique_ptr[LaneJob] job
        _fill(batch, items)
        job = make_put(<PyObject*>owner, connector.connector, batch, connector.per_piece)
        return self._submit(lane, job, False)

    def submit_load(
        self, int lane, NativeConnector connector not None, items: Sequence[Any], outcomes: Sequence[Any],
        token: object
    ) -> bool:
        """Load records into the extents of items; holds and outcomes (by LoadStatus) as in `submit_put`.

        The result is (seconds until a thread of the lane began, keys that the connector's cap dropped since it was
        last asked, seconds of the rest in which records were verified).
        """
        cdef vector[LoadItem] batch
        cdef _Token owner = _Token(token, LOAD, items, outcomes)
        cdef unique_ptr[LaneJob] job
        _fill(batch, items)
        job = make_load(<PyObject*>owner, connector.connector, batch, connector.per_piece)
        return self._submit(lane, job, False)

    def take_done(self) -> list[tuple[Any, Any, BaseException | None]]:
        """(token, result, error) of each job that has ended and was not taken yet, in the order of their ends."""
        cdef vector[unique_ptr[LaneJob]] jobs
        cdef _Token token
        with nogil:
            self.lanes.get().take_done(&jobs)
        done = []
        for i in range(jobs.size()):
            token = <_Token><object>token_of(jobs[i].get())
            done.append((token.token, _outcome(token, jobs[i].get()), token.error))
            jobs[i].reset()
        return done

    def stop(self) -> None:
        """Accept no more work; work accepted before runs to its end."""
        with nogil:
            self.lanes.get().stop()

    @property
    def idle(self) -> bool:
        """Whether the lanes were stopped and no thread is left."""
        return bool(self.lanes.get().idle())

    def close(self) -> None:
        """Stop, wait for all work, and join the threads, without the GIL."""
        with nogil:
            self.lanes.get().close()
