# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""Costs of routing (ext/core/src/routing): see routing.pyi for the contract."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector


cdef extern from *:
    """
    #include <structmember.h>

    // Where an object of `type` keeps the reference of a field that is a plain slot; -1 with TypeError: it is none.
    static Py_ssize_t kvstrata_slot(PyObject* type, PyObject* name) {
      PyObject* found = PyObject_GetAttr(type, name);
      if (found == NULL) {
        return -1;
      }
      Py_ssize_t place = -1;
      if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        const PyMemberDef* member = ((PyMemberDescrObject*)found)->d_member;
        if (member->type == T_OBJECT_EX) {
          place = member->offset;
        }
      }
      Py_DECREF(found);
      if (place < 0) {
        PyErr_Format(PyExc_TypeError, "%R: field %R is not a plain slot", type, name);
      }
      return place;
    }

    // A borrowed reference; NULL with AttributeError: the field is not set.
    static inline PyObject* kvstrata_borrowed(PyObject* object, Py_ssize_t place) {
      PyObject* value = *(PyObject**)((char*)object + place);
      if (value == NULL) {
        PyErr_Format(PyExc_AttributeError, "%R: a field is not set", (PyObject*)Py_TYPE(object));
      }
      return value;
    }

    static inline PyObject* kvstrata_field(PyObject* object, Py_ssize_t place) {
      return Py_XNewRef(kvstrata_borrowed(object, place));
    }

    static inline double kvstrata_seconds(PyObject* object, Py_ssize_t place) {
      PyObject* value = kvstrata_borrowed(object, place);
      if (value == NULL) {
        return -1.0;
      }
      return PyFloat_CheckExact(value) ? PyFloat_AS_DOUBLE(value) : PyFloat_AsDouble(value);
    }

    static inline long long kvstrata_count(PyObject* object, Py_ssize_t place) {
      PyObject* value = kvstrata_borrowed(object, place);
      return value == NULL ? -1 : PyLong_AsLongLong(value);
    }
    """
    Py_ssize_t kvstrata_slot(object of, str name) except -1
    object kvstrata_field(object of, Py_ssize_t place)
    double kvstrata_seconds(object of, Py_ssize_t place) except? -1.0
    long long kvstrata_count(object of, Py_ssize_t place) except? -1


cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass copies_span "std::span<const kvstrata::PrefixCopy>":
        copies_span(const PrefixCopy*, size_t)

    cdef cppclass costs_span "std::span<const double>":
        costs_span(const double*, size_t)

    cdef cppclass hashes_span "std::span<const std::uint64_t>":
        hashes_span(const uint64_t*, size_t)


cdef extern from "routing/cost.h" namespace "kvstrata" nogil:
    enum class Certainty(unsigned char):
        kExact
        kDegraded
        kPredicted
        kUnconfirmed

    cdef cppclass EngineLoad:
        double tokens_s, backlog_tokens, at_s, moved_s
        int64_t behind_tokens, prefill_tokens, context_tokens, kv_tokens
        cbool may_be_late

    cdef cppclass PrefixCopy:
        int64_t tokens, queued_tokens
        double age_s, ready_at_s, latency_s, load_tokens_s
        Certainty certainty
        cbool is_load

    cdef cppclass Moment:
        int64_t tokens
        double now_s, block_life_s, event_lag_s

    cdef cppclass CEstimate "kvstrata::Estimate":
        double queue_s, load_s, compute_s, preemption_s
        int copy
        int64_t cached_tokens, load_tokens
        double cost_s() noexcept

    double c_queue_s "kvstrata::queue_s"(const EngineLoad&, double) noexcept
    CEstimate c_estimate "kvstrata::estimate"(const Moment&, const EngineLoad&, int64_t, copies_span) noexcept


cdef extern from "routing/lowest.h" namespace "kvstrata" nogil:
    cdef cppclass LowestCosts:
        double limit, last

    LowestCosts c_lowest_costs "kvstrata::lowest_costs"(costs_span, size_t, double) except +


cdef extern from "routing/rendezvous.h" namespace "kvstrata" nogil:
    size_t c_ranked_first "kvstrata::ranked_first"(uint64_t, hashes_span) noexcept


cdef dict CERTAINTIES = {
    "exact": <int>Certainty.kExact,
    "degraded": <int>Certainty.kDegraded,
    "predicted": <int>Certainty.kPredicted,
    "unconfirmed": <int>Certainty.kUnconfirmed,
}


def ranked_first(uint64_t key, list hashes not None):
    if not hashes:
        raise ValueError("hashes: is empty")
    cdef vector[uint64_t] found
    found.reserve(len(hashes))
    for one in hashes:
        found.push_back(<uint64_t>one)
    return c_ranked_first(key, hashes_span(found.data(), found.size()))


def lowest(list costs not None, size_t count, double near_share):
    if not costs or not count:
        raise ValueError(f"costs: {len(costs)} of them, and count: {count}; both must be at least 1")
    cdef vector[double] read
    cdef double cost
    read.reserve(len(costs))
    for one in costs:
        cost = one
        if cost != cost:
            raise ValueError("costs: one is not a number")
        read.push_back(cost)
    cdef LowestCosts found = c_lowest_costs(costs_span(read.data(), read.size()), count, near_share)
    cdef list near = [], below = [], tied = []
    cdef size_t i
    for i in range(read.size()):
        cost = read[i]
        if cost <= found.limit:
            near.append(i)
        if cost < found.last:
            below.append(i)
        elif cost == found.last:
            tied.append(i)
    return near, below, tied


cdef class Costs:
    cdef object _engine, _copy, _path
    # Of an engine.
    cdef Py_ssize_t _name, _tokens_s, _backlog, _at, _moved, _behind, _prefill, _waiting, _context, _kv, _paths
    # Of a copy.
    cdef Py_ssize_t _tier, _tokens, _certainty, _age, _ready
    # Of a path.
    cdef Py_ssize_t _latency, _rate, _queued

    def __cinit__(self, engine, copy, path):
        self._engine, self._copy, self._path = engine, copy, path
        self._name = kvstrata_slot(engine, "name")
        self._tokens_s = kvstrata_slot(engine, "prefill_tokens_s")
        self._backlog = kvstrata_slot(engine, "backlog_tokens")
        self._at = kvstrata_slot(engine, "at_s")
        self._moved = kvstrata_slot(engine, "moved_s")
        self._behind = kvstrata_slot(engine, "behind_tokens")
        self._prefill = kvstrata_slot(engine, "prefill_tokens")
        self._waiting = kvstrata_slot(engine, "waiting")
        self._context = kvstrata_slot(engine, "context_tokens")
        self._kv = kvstrata_slot(engine, "kv_tokens")
        self._paths = kvstrata_slot(engine, "paths")
        self._tier = kvstrata_slot(copy, "tier")
        self._tokens = kvstrata_slot(copy, "tokens")
        self._certainty = kvstrata_slot(copy, "certainty")
        self._age = kvstrata_slot(copy, "age_s")
        self._ready = kvstrata_slot(copy, "ready_at_s")
        self._latency = kvstrata_slot(path, "latency_s")
        self._rate = kvstrata_slot(path, "tokens_s")
        self._queued = kvstrata_slot(path, "queued_tokens")

    def queue_s(self, engine, double now_s):
        cdef EngineLoad load
        self._read_engine(engine, &load)
        return c_queue_s(load, now_s)

    def scores(self, list engines not None, tuple moment not None, *, dict cached not None, dict own not None, list shared not None):
        cdef EngineLoad load
        cdef Moment at = _moment(moment)
        cdef vector[PrefixCopy] copies
        cdef bint known = bool(cached)
        cdef bint copied = bool(own) or bool(shared)
        cdef int64_t held = 0
        cdef list costs = []
        for engine in engines:
            self._read_engine(engine, &load)
            if known:
                held = <int64_t>cached.get(kvstrata_field(engine, self._name), 0)
            if copied:
                self._read_copies(engine, own, shared, &copies)
            costs.append(c_estimate(at, load, held, copies_span(copies.data(), copies.size())).cost_s())
        return costs

    def estimate(self, engine, tuple moment not None, *, dict cached not None, dict own not None, list shared not None):
        cdef EngineLoad load
        cdef Moment at = _moment(moment)
        cdef vector[PrefixCopy] copies
        self._read_engine(engine, &load)
        name = kvstrata_field(engine, self._name)
        self._read_copies(engine, own, shared, &copies)
        found = c_estimate(at, load, cached.get(name, 0), copies_span(copies.data(), copies.size()))
        copy = None
        if found.copy >= 0:
            copy = [*own.get(name, ()), *shared][found.copy]
        return (
            found.queue_s,
            found.load_s,
            found.compute_s,
            found.preemption_s,
            copy,
            found.cached_tokens,
            found.load_tokens,
        )

    cdef int _read_engine(self, engine, EngineLoad* load) except -1:
        if type(engine) is not self._engine:
            raise TypeError(f"engine: must be {self._engine.__name__}, not {type(engine).__name__}")
        load.tokens_s = kvstrata_seconds(engine, self._tokens_s)
        if not load.tokens_s > 0.0:
            raise ValueError(f"prefill_tokens_s: {load.tokens_s} of engine {engine.name!r}; it must be above 0")
        load.backlog_tokens = kvstrata_seconds(engine, self._backlog)
        load.at_s = kvstrata_seconds(engine, self._at)
        load.behind_tokens = kvstrata_count(engine, self._behind)
        load.context_tokens = kvstrata_count(engine, self._context)
        load.kv_tokens = kvstrata_count(engine, self._kv)
        load.may_be_late = False
        if kvstrata_count(engine, self._waiting) and kvstrata_field(engine, self._moved) is not None:
            load.may_be_late = True
            load.moved_s = kvstrata_seconds(engine, self._moved)
            load.prefill_tokens = kvstrata_count(engine, self._prefill)
        return 0

    cdef int _read_copies(self, engine, dict own, list shared, vector[PrefixCopy]* out) except -1:
        """All copies that the engine may have, in their order, those included that are of no use to it."""
        out.clear()
        cdef PrefixCopy read
        paths = kvstrata_field(engine, self._paths)
        if own:
            for copy in own.get(kvstrata_field(engine, self._name), ()):
                self._read_copy(copy, paths, True, &read)
                out.push_back(read)
        for copy in shared:
            self._read_copy(copy, paths, False, &read)
            out.push_back(read)
        return 0

    cdef int _read_copy(self, copy, paths, bint is_own, PrefixCopy* out) except -1:
        if type(copy) is not self._copy:
            raise TypeError(f"copy: must be {self._copy.__name__}, not {type(copy).__name__}")
        out.certainty = <Certainty><int>CERTAINTIES[kvstrata_field(copy, self._certainty)]
        out.age_s = kvstrata_seconds(copy, self._age)
        out.ready_at_s = kvstrata_seconds(copy, self._ready)
        tier = kvstrata_field(copy, self._tier)
        out.is_load = tier != "l0"
        # A load without a path, and another engine's own cache, are copies of nothing.
        path = (<dict?>paths).get(tier) if out.is_load else None
        if path is None:
            out.tokens = kvstrata_count(copy, self._tokens) if is_own and not out.is_load else 0
            return 0
        if type(path) is not self._path:
            raise TypeError(f"path: must be {self._path.__name__}, not {type(path).__name__}")
        out.tokens = kvstrata_count(copy, self._tokens)
        out.latency_s = kvstrata_seconds(path, self._latency)
        out.load_tokens_s = kvstrata_seconds(path, self._rate)
        out.queued_tokens = kvstrata_count(path, self._queued)
        return 0


cdef Moment _moment(tuple values) except *:
    """Of (tokens, now_s, block_life_s, event_lag_s)."""
    cdef Moment moment
    moment.tokens, moment.now_s, moment.block_life_s, moment.event_lag_s = values
    return moment
