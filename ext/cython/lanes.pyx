# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Lanes (ext/core/include/kvstrata/lanes.h) for work written in Python; see lanes.pyi for the contract."""

import os

from cpython.ref cimport PyObject, Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from core_status cimport Status, StatusCode


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


cdef extern from *:
    """
    // A Python callable as a job. Owns a `_Call`, which it lets go of with the GIL wherever it ends.
    struct CallJob final : kvstrata::LaneJob {
      PyObject* call;
      void (*run_call)(PyObject*);

      CallJob(PyObject* owned, void (*run)(PyObject*)) noexcept : call(owned), run_call(run) {}
      ~CallJob() override {
        if (call == nullptr) return;
        const PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(call);
        PyGILState_Release(state);
      }
      void run(std::size_t) override { run_call(call); }
      // The caller gets the reference.
      PyObject* release() noexcept {
        PyObject* owned = call;
        call = nullptr;
        return owned;
      }
    };

    static std::unique_ptr<kvstrata::LaneJob> make_call_job(PyObject* call, void (*run)(PyObject*)) {
      return std::make_unique<CallJob>(call, run);
    }
    static PyObject* release_call(kvstrata::LaneJob& job) noexcept {
      return static_cast<CallJob&>(job).release();
    }
    """
    unique_ptr[LaneJob] make_call_job(PyObject*, void (*)(PyObject*) noexcept) except +
    PyObject* release_call(LaneJob&) noexcept


cdef class _Call:
    """Work on its way: `result` or `error` once it has run, `token` for who submitted it."""

    cdef object work
    cdef object token
    cdef object result
    cdef object error


cdef void run_call(PyObject* owned) noexcept with gil:
    cdef _Call call = <_Call><object>owned
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

    def submit(self, int lane, work, token, beyond_limit):
        cdef _Call call = _Call.__new__(_Call)
        cdef unique_ptr[LaneJob] job
        cdef Status status
        cdef cbool beyond = bool(beyond_limit)
        if not 0 <= lane < 4:
            raise ValueError(f"lane: must be 0 to 3, not {lane}")
        call.work = work
        call.token = token
        Py_INCREF(call)
        try:
            job = make_call_job(<PyObject*>call, run_call)
        except BaseException:
            Py_DECREF(call)
            raise
        with nogil:
            status = self.lanes.get().submit(<CLane>lane, job, beyond)
        if status.ok():
            return True
        job.reset()
        if status.code() == StatusCode.kQueueFull:
            return False
        raise _error(status)

    def take_done(self):
        cdef vector[unique_ptr[LaneJob]] jobs
        cdef Status status
        cdef _Call call
        cdef PyObject* owned
        with nogil:
            status = self.lanes.get().take_done(&jobs)
        if not status.ok():
            raise _error(status)
        done = []
        for i in range(jobs.size()):
            owned = release_call(jobs[i].get()[0])
            call = <_Call><object>owned
            Py_DECREF(call)
            done.append((call.token, call.result, call.error))
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
