# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Lanes and the connectors that work in them (ext/core/include/kvstrata/{lanes,connector}.h); see lanes.pyi."""

import os

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetDestructor, PyCapsule_SetName
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from core_status cimport Status, StatusCode
from kvstrata.native.pool cimport CHold, Hold


cdef extern from "kvstrata/lanes.h" namespace "kvstrata" nogil:
    enum class CLane "kvstrata::Lane"(unsigned char):
        pass

    cdef cppclass LaneJob:
        pass

    cdef cppclass LaneOptions:
        string name
        uint32_t common_workers
        uint32_t* own_workers "own_workers.data()"
        uint32_t queue_limit

    cdef cppclass LaneCounts:
        uint64_t waiting, running, refused, done

    cdef cppclass CLanes "kvstrata::Lanes":
        @staticmethod
        Status create(const LaneOptions&, unique_ptr[CLanes]*) noexcept
        int event_fd() noexcept
        Status submit(CLane, unique_ptr[LaneJob]&, cbool) noexcept
        Status take_done(vector[unique_ptr[LaneJob]]*) noexcept
        LaneCounts counts(CLane) noexcept
        void stop() noexcept
        cbool idle() noexcept
        void close() noexcept
        @staticmethod
        void abandon(unique_ptr[CLanes]) noexcept


cdef extern from "kvstrata/connector.h" namespace "kvstrata" nogil:
    const char* connector_capsule_name

    cdef cppclass Digest:
        unsigned char* data()

    # Enums are read as the numbers that they are.
    enum class Presence(unsigned char):
        pass
    enum class PutStatus(unsigned char):
        pass
    enum class LoadStatus(unsigned char):
        pass
    enum class Quiesce(unsigned char):
        kNever

    cdef cppclass BytesHold:
        pass

    cdef cppclass ExistsItem:
        Digest key
        Presence presence
        uint32_t record_bytes
        const char* reason

    const uint32_t kHeadBytes

    cdef cppclass HeadItem:
        Digest key
        uint32_t length
        uint8_t* bytes

    cdef cppclass PutItem:
        PutStatus status
        const char* reason

    cdef cppclass LoadItem:
        LoadStatus status
        const char* reason

    cdef cppclass DeleteItem:
        Digest key
        cbool removed

    cdef cppclass ConnectorCapabilities:
        cbool persistent, shared, can_delete, can_clear, wants_registered_memory, exists_is_quick
        cbool has_heads, lists
        Quiesce quiesce
        uint32_t max_batch, items_per_piece

    cdef cppclass ConnectorContext:
        ConnectorContext() except +
        string instance_id
        uint8_t* region
        uint64_t region_bytes

    cdef cppclass ConnectorUsage:
        uint64_t used_bytes, capacity_bytes, records

    cdef cppclass ConnectorNote:
        cbool warning
        string text

    cdef cppclass ConnectorCount:
        const char* name
        uint64_t value

    cdef cppclass CConnector "kvstrata::Connector":
        ConnectorCapabilities capabilities() noexcept
        cbool ready() noexcept
        void take_notes(vector[ConnectorNote]*) noexcept
        void counts(vector[ConnectorCount]*) noexcept


cdef extern from *:
    """
    static void exists_now(kvstrata::Connector& connector, std::vector<kvstrata::ExistsItem>& items) {
      connector.exists(items);
    }
    """
    void exists_now(CConnector&, vector[ExistsItem]&) noexcept nogil


cdef extern from "kvstrata/connector_jobs.h" namespace "kvstrata" nogil:
    cdef cppclass ExistsJob:
        vector[ExistsItem] items
    cdef cppclass HeadsJob:
        vector[HeadItem] items
    cdef cppclass ListJob:
        uint64_t cursor
        vector[Digest] keys
    cdef cppclass PutJob:
        vector[PutItem] items
        vector[Digest] evicted
    cdef cppclass LoadJob:
        vector[LoadItem] items
        vector[Digest] evicted
    cdef cppclass DeleteJob:
        vector[DeleteItem] items
    cdef cppclass CallConnectorJob:
        string wrong
        uint64_t cleared
        ConnectorUsage usage


cdef extern from "python_jobs.h" namespace "kvstrata::python":
    unique_ptr[LaneJob] make_call(PyObject*, void (*)(PyObject*) noexcept) except +
    unique_ptr[LaneJob] make_exists(PyObject*, shared_ptr[CConnector], vector[ExistsItem]&) except +
    unique_ptr[LaneJob] make_heads(PyObject*, shared_ptr[CConnector], vector[HeadItem]&) except +
    unique_ptr[LaneJob] make_list(PyObject*, shared_ptr[CConnector], uint64_t, size_t) except +
    cdef cppclass BytesItem:
        Digest key
        uint8_t* bytes
        uint32_t length
        BytesHold hold

    unique_ptr[LaneJob] make_batch[Job](
        PyObject*, shared_ptr[CConnector], vector[BytesItem]&, size_t
    ) except +
    unique_ptr[LaneJob] make_delete(PyObject*, shared_ptr[CConnector], vector[DeleteItem]&) except +
    unique_ptr[LaneJob] make_connector_call(
        PyObject*, shared_ptr[CConnector], int, const ConnectorContext&
    ) except +
    PyObject* token_of(LaneJob*) noexcept
    T* job_as[T](LaneJob*) noexcept
    BytesHold hold_of(shared_ptr[CHold]) except +
    BytesHold hold_of_object(PyObject*) except +


cdef enum Kind:
    CALL, EXISTS, HEADS, LIST, PUT, LOAD, DELETE, OPEN, CLEAR, USAGE, CLOSE


cdef class _Token:
    """Work on its way. Of a Python call: `work` before, `result` or `error` after it has run.

    Of an exists: `work` makes the result of each key.
    """

    cdef object token
    cdef Kind kind
    cdef object work
    cdef object result
    cdef object error

    def __cinit__(self, token, int kind):
        self.token = token
        self.kind = <Kind>kind


cdef void run_call(PyObject* owned) noexcept with gil:
    cdef _Token call = <_Token><object>owned
    try:
        call.result = call.work()
    except BaseException as error:  # the supervisor of this thread: who submitted it gets the error
        call.error = error
    call.work = None  # whatever it owns ends here, not when the loop reads its result


cdef object _error(Status status):
    text = status.message().decode()
    if status.code() == StatusCode.kOsError:
        return OSError(status.detail(0), f"{text}: {os.strerror(status.detail(0))}")
    if status.code() == StatusCode.kNoSpace:
        return MemoryError(text)
    if status.code() == StatusCode.kClosed:
        return RuntimeError(text)
    return ValueError(f"{text}, not {status.detail(0)}")


cdef int _set_key(Digest& key, object value) except -1:
    cdef const unsigned char[::1] view
    if PyBytes_CheckExact(value) and PyBytes_GET_SIZE(value) == 32:  # what a key nearly always is
        memcpy(key.data(), PyBytes_AS_STRING(value), 32)
        return 0
    view = value
    if view.shape[0] != 32:
        raise ValueError(f"key: must have 32 bytes, not {view.shape[0]}")
    memcpy(key.data(), &view[0], 32)
    return 0


cdef object _keys(vector[Digest]& keys):
    return [(<char*>keys[i].data())[:32] for i in range(keys.size())]


cdef BytesHold _hold(object hold) except *:
    if isinstance(hold, Hold):
        return hold_of((<Hold>hold).held)
    return hold_of_object(<PyObject*>hold)


cdef vector[BytesItem] _batch(object items) except *:
    cdef vector[BytesItem] batch
    cdef Py_ssize_t i = 0
    batch.resize(len(items))
    for key, hold in items:
        _set_key(batch[i].key, key)
        batch[i].bytes = <uint8_t*><size_t>hold.address
        batch[i].length = hold.length
        batch[i].hold = _hold(hold)
        i += 1
    return batch


cdef list _found(vector[ExistsItem]& items, object found):
    """What `found(presence, record_bytes, reason)` makes of each; equal ones after one another share one."""
    cdef Py_ssize_t count = <Py_ssize_t>items.size()
    cdef list made = [None] * count
    # What was made last of each presence: most records of a medium are equally long.
    cdef list last = [None, None, None]
    cdef Py_ssize_t[3] at = [-1, -1, -1]
    cdef Py_ssize_t i
    cdef int presence
    for i in range(count):
        presence = <int>items[i].presence
        if (
            at[presence] < 0
            or items[i].record_bytes != items[at[presence]].record_bytes
            or items[i].reason != items[at[presence]].reason
        ):
            at[presence] = i
            last[presence] = found(presence, items[i].record_bytes, items[i].reason.decode())
        made[i] = last[presence]
    return made


cdef list _heads(vector[HeadItem]& items):
    return [
        (<char*>items[i].bytes)[:min(items[i].length, kHeadBytes)] for i in range(items.size())
    ]


cdef object _outcome(_Token token, LaneJob* job):
    """What a job that is done says, as lanes.pyi has it."""
    cdef ListJob* listed
    cdef PutJob* put
    cdef LoadJob* load
    cdef DeleteJob* gone
    cdef CallConnectorJob* called
    if token.kind == CALL:
        return token.result
    if token.kind == EXISTS:
        return _found(job_as[ExistsJob](job).items, token.work)
    if token.kind == HEADS:
        return _heads(job_as[HeadsJob](job).items)
    if token.kind == LIST:
        listed = job_as[ListJob](job)
        return _keys(listed.keys), listed.cursor
    if token.kind == PUT:
        put = job_as[PutJob](job)
        outcomes = [
            (<int>put.items[i].status, put.items[i].reason.decode()) for i in range(put.items.size())
        ]
        return outcomes, _keys(put.evicted)
    if token.kind == LOAD:
        load = job_as[LoadJob](job)
        outcomes = [
            (<int>load.items[i].status, load.items[i].reason.decode()) for i in range(load.items.size())
        ]
        return outcomes, _keys(load.evicted)
    if token.kind == DELETE:
        gone = job_as[DeleteJob](job)
        return sum([gone.items[i].removed for i in range(gone.items.size())])
    called = job_as[CallConnectorJob](job)
    if token.kind == OPEN:
        return called.wrong.decode(errors="replace")
    if token.kind == CLEAR:
        return called.cleared
    if token.kind == USAGE:
        return called.usage.used_bytes, called.usage.capacity_bytes, called.usage.records
    return None


cdef class NativeConnector:
    """See lanes.pyi."""

    cdef shared_ptr[CConnector] connector
    cdef readonly dict capabilities
    cdef size_t per_piece

    def __cinit__(self, capsule):
        cdef ConnectorCapabilities can
        if not PyCapsule_IsValid(capsule, connector_capsule_name):
            raise ValueError(
                f"connector: must be an unused capsule named {connector_capsule_name.decode()!r}, made with the "
                f"headers of this version of kvstrata; found {capsule!r:.100}"
            )
        self.connector.reset(<CConnector*>PyCapsule_GetPointer(capsule, connector_capsule_name))
        # The connector is this object's now. The capsule's destructor is for one that nobody took: it would
        # free the connector a second time, or fail on the new name.
        PyCapsule_SetDestructor(capsule, NULL)
        PyCapsule_SetName(capsule, "kvstrata.Connector.taken")
        can = self.connector.get().capabilities()
        if can.items_per_piece == 0 or can.max_batch == 0:
            raise ValueError("connector: capabilities: items_per_piece and max_batch must be at least 1")
        self.per_piece = can.items_per_piece
        self.capabilities = {
            "persistent": bool(can.persistent),
            "shared": bool(can.shared),
            "can_delete": bool(can.can_delete),
            "can_clear": bool(can.can_clear),
            "wants_registered_memory": bool(can.wants_registered_memory),
            "has_heads": bool(can.has_heads),
            "lists": bool(can.lists),
            "quiesce": "never" if can.quiesce == Quiesce.kNever else "drain",
            "exists_is_quick": bool(can.exists_is_quick),
            "max_batch": can.max_batch,
        }

    @property
    def ready(self):
        return bool(self.connector.get().ready())

    def exists_now(self, keys, found):
        cdef vector[ExistsItem] items
        if not self.connector.get().ready():
            return None
        items = self._exists_items(keys)
        with nogil:
            exists_now(self.connector.get()[0], items)
        return _found(items, found)

    def counts(self):
        cdef vector[ConnectorCount] counts
        cdef size_t i
        self.connector.get().counts(&counts)
        return {counts[i].name.decode(): counts[i].value for i in range(counts.size())}

    def take_notes(self):
        cdef vector[ConnectorNote] notes
        cdef size_t i
        self.connector.get().take_notes(&notes)
        return [(bool(notes[i].warning), notes[i].text.decode(errors="replace")) for i in range(notes.size())]

    cdef vector[ExistsItem] _exists_items(self, object keys) except *:
        cdef vector[ExistsItem] items
        cdef Py_ssize_t i = 0
        items.resize(len(keys))
        for key in keys:
            _set_key(items[i].key, key)
            i += 1
        return items


cdef class NativeLanes:
    """See lanes.pyi."""

    cdef unique_ptr[CLanes] lanes

    def __cinit__(self, name, common_workers, own_workers, queue_limit):
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
        if not status.ok():
            raise _error(status)

    def __dealloc__(self):
        with nogil:  # joins the threads, unless one of them is busy: it may be so for ever
            CLanes.abandon(move(self.lanes))

    @property
    def event_fd(self):
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
        job.reset()  # with the GIL, and with the holds of its items
        if status.code() == StatusCode.kQueueFull:
            return False
        raise _error(status)

    def submit(self, int lane, work, token, beyond_limit):
        cdef _Token call = _Token(token, CALL)
        cdef unique_ptr[LaneJob] job
        call.work = work
        job = make_call(<PyObject*>call, run_call)
        return self._submit(lane, job, beyond_limit)

    def submit_exists(self, int lane, NativeConnector connector not None, keys, found, token):
        cdef vector[ExistsItem] items = connector._exists_items(keys)
        cdef _Token owner = _Token(token, EXISTS)
        cdef unique_ptr[LaneJob] job
        owner.work = found
        job = make_exists(<PyObject*>owner, connector.connector, items)
        return self._submit(lane, job, False)

    def submit_heads(self, int lane, NativeConnector connector not None, keys, token):
        cdef vector[HeadItem] items
        cdef _Token owner = _Token(token, HEADS)
        cdef Py_ssize_t i = 0
        cdef unique_ptr[LaneJob] job
        items.resize(len(keys))
        for key in keys:
            _set_key(items[i].key, key)
            i += 1
        job = make_heads(<PyObject*>owner, connector.connector, items)
        return self._submit(lane, job, False)

    def submit_list(self, int lane, NativeConnector connector not None, cursor, most, token):
        cdef _Token owner = _Token(token, LIST)
        cdef unique_ptr[LaneJob] job
        if most < 1:
            raise ValueError(f"most: must be at least 1, not {most}")
        job = make_list(<PyObject*>owner, connector.connector, cursor, most)
        return self._submit(lane, job, False)

    def submit_put(self, int lane, NativeConnector connector not None, items, token):
        cdef vector[BytesItem] batch = _batch(items)
        cdef _Token owner = _Token(token, PUT)
        cdef unique_ptr[LaneJob] job
        job = make_batch[PutJob](<PyObject*>owner, connector.connector, batch, connector.per_piece)
        return self._submit(lane, job, False)

    def submit_load(self, int lane, NativeConnector connector not None, items, token):
        cdef vector[BytesItem] batch = _batch(items)
        cdef _Token owner = _Token(token, LOAD)
        cdef unique_ptr[LaneJob] job
        job = make_batch[LoadJob](<PyObject*>owner, connector.connector, batch, connector.per_piece)
        return self._submit(lane, job, False)

    def submit_delete(self, int lane, NativeConnector connector not None, keys, token):
        cdef vector[DeleteItem] batch
        cdef _Token owner = _Token(token, DELETE)
        cdef Py_ssize_t i = 0
        cdef unique_ptr[LaneJob] job
        batch.resize(len(keys))
        for key in keys:
            _set_key(batch[i].key, key)
            i += 1
        job = make_delete(<PyObject*>owner, connector.connector, batch)
        return self._submit(lane, job, True)

    def submit_open(self, int lane, NativeConnector connector not None, instance_id, region, region_bytes, token):
        cdef ConnectorContext context
        context.instance_id = (<str>instance_id).encode()
        context.region = <uint8_t*><size_t>region
        context.region_bytes = region_bytes
        return self._submit_call(lane, connector, OPEN, context, token)

    def submit_clear(self, int lane, NativeConnector connector not None, token):
        return self._submit_call(lane, connector, CLEAR, ConnectorContext(), token)

    def submit_usage(self, int lane, NativeConnector connector not None, token):
        return self._submit_call(lane, connector, USAGE, ConnectorContext(), token)

    def submit_close(self, int lane, NativeConnector connector not None, token):
        return self._submit_call(lane, connector, CLOSE, ConnectorContext(), token)

    cdef object _submit_call(
        self, int lane, NativeConnector connector, Kind kind, ConnectorContext context, object token
    ):
        cdef _Token owner = _Token(token, kind)
        cdef unique_ptr[LaneJob] job = make_connector_call(
            <PyObject*>owner, connector.connector, kind - OPEN, context
        )
        return self._submit(lane, job, True)

    def take_done(self):
        cdef vector[unique_ptr[LaneJob]] jobs
        cdef Status status
        cdef _Token token
        with nogil:
            status = self.lanes.get().take_done(&jobs)
        if not status.ok():
            raise _error(status)
        done = []
        for i in range(jobs.size()):
            token = <_Token><object>token_of(jobs[i].get())
            done.append((token.token, _outcome(token, jobs[i].get()), token.error))
            jobs[i].reset()
        return done

    def counts(self, int lane):
        cdef LaneCounts counts
        if not 0 <= lane < 4:
            raise ValueError(f"lane: must be 0 to 3, not {lane}")
        counts = self.lanes.get().counts(<CLane>lane)
        return {
            "waiting": counts.waiting,
            "running": counts.running,
            "refused": counts.refused,
            "done": counts.done,
        }

    def stop(self):
        with nogil:
            self.lanes.get().stop()

    @property
    def idle(self):
        return bool(self.lanes.get().idle())

    def close(self):
        with nogil:
            self.lanes.get().close()
