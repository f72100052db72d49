# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""The copy engine of a GPU (ext/cuda): see cuda.pyi for the contract."""

from libcpp.utility cimport move

from arguments cimport whole
from cpp cimport *
from kvstrata.native.core cimport CALL, ITEMS, LONGEST_WAIT_S, CopyPlan, codes_of, kind_of, raise_for, set_items

from collections import namedtuple
from pathlib import Path

from kvstrata.errors import MediumError


cdef extern from "driver.h" namespace "kvstrata::cuda" nogil:
    ctypedef int Result
    cdef struct StreamTag
    ctypedef StreamTag* Stream

    cdef cppclass Failure:
        Result number
        const char* call
        string text

    cbool is_sticky(Result number)

    cdef cppclass Driver:
        int version
        int devices
        void* copy_batch
        @staticmethod
        Failure load(const Driver** out) except +
        const char* name_of(Result number)
        string explain(const Failure& failure) except +


cdef extern from "device.h" namespace "kvstrata::cuda" nogil:
    cdef cppclass CDeviceFacts "kvstrata::cuda::DeviceFacts":
        int ordinal
        string name
        int capability_major
        int capability_minor
        uint64_t memory_bytes
        string pci_bus_id
        cbool can_register_host

    Failure read_facts(int ordinal, CDeviceFacts* out) except +

    cdef cppclass Device:
        @staticmethod
        Failure open(int ordinal, const string& image, const string& reason, shared_ptr[Device]* out) except +
        int ordinal()

    cdef cppclass CMoment "kvstrata::cuda::Moment":
        Device& device()

    cdef cppclass CHostRegion "kvstrata::cuda::HostRegion":
        @staticmethod
        Failure create(
            shared_ptr[Device] device, uint64_t address, uint64_t length, shared_ptr[CHostRegion]* out
        ) except +
        uint64_t address()
        uint64_t length()
        cbool registered()
        Failure unregister() except +


cdef extern from "plan.h" namespace "kvstrata::cuda" nogil:
    cdef cppclass CudaPlan:
        shared_ptr[const CCopyPlan] copy
        shared_ptr[Device] device
        shared_ptr[CMoment] behind
        cbool layerwise
        @staticmethod
        Failure create(shared_ptr[const CCopyPlan] copy, shared_ptr[Device] device, CudaPlan* out) except +

    cdef cppclass PinnedMemory:
        void add(shared_ptr[CHostRegion] region) except +
        void remove(const CHostRegion* region)


cdef extern from "copy_engine.h" namespace "kvstrata::cuda" nogil:
    enum class Way(uint8_t):
        kDma
        kKernel

    cdef cppclass EngineOptions:
        Way way
        int threads
        unsigned max_sms
        uint64_t staging_bytes
        size_t queue
        cbool rounds

    cdef cppclass CEngine "kvstrata::cuda::CudaCopyEngine":
        @staticmethod
        Failure create(
            shared_ptr[Device] device, const EngineOptions& options, Status* status, shared_ptr[CEngine]* out
        ) except +
        int event_fd()
        Status submit(uint64_t job_id, CopyKind kind, CudaPlan plan, vector[CopyItem] items) except +
        void completions(vector[CopyCompletion]* out) except +
        Status run(CopyKind kind, CudaPlan plan, vector[CopyItem] items, vector[CopyResult]* results) except +
        cbool wait(uint64_t job_id, nanoseconds timeout) except +
        cbool cancel(uint64_t job_id) except +
        void drain() except +
        void close() except +
        Way way()
        const string& reason()
        Failure moment(Stream stream, shared_ptr[CMoment]* out) except +
        Failure await_section(
            uint64_t job_id, size_t section, Stream stream, nanoseconds timeout, cbool* queued
        ) except +
        PinnedMemory& pinned()
        Failure failed() except +


class CudaError(MediumError):
    code = "cuda"

    def __init__(self, message, *, field="", number=0, name="", sticky=False):
        super().__init__(message, field=field)
        self.number = number
        self.name = name
        self.sticky = sticky


class CudaUnavailable(CudaError):
    pass


DriverFacts = namedtuple("DriverFacts", "version devices batched_copies kernels", module=__name__)
DeviceFacts = namedtuple(
    "DeviceFacts",
    "ordinal name capability memory_bytes pci_bus_id can_register_host",
    module=__name__,
)

WAYS = ("dma", "kernel")
FATBIN = Path(__file__).with_name("kvstrata_cuda.fatbin")
NO_FATBIN = "the kernels were left out when kvstrata was built: there was no nvcc (docs/gpu.md)"


cdef const Driver* driver() except NULL:
    """The driver of this process. Raises CudaUnavailable, with advice, if it cannot be used."""
    cdef const Driver* found = NULL
    cdef Failure failure
    with nogil:
        failure = Driver.load(&found)
    if failure.number != 0:
        raise CudaUnavailable(failure.text.decode(errors="replace"), number=max(failure.number, 0))
    return found


cdef object error_of(const Failure& failure):
    cdef const Driver* known = driver()
    text = known.explain(failure).decode(errors="replace")
    if failure.number < 0:
        return CudaError(text, field=text.partition(":")[0].partition("[")[0])
    return CudaError(
        text,
        number=failure.number,
        name=known.name_of(failure.number).decode(),
        sticky=bool(is_sticky(failure.number)),
    )


cdef int check_cuda(const Failure& failure) except -1:
    if failure.number != 0:
        raise error_of(failure)
    return 0


cdef shared_ptr[Device] open_device(object ordinal) except *:
    cdef int number = <int>min(whole(ordinal, "device"), <uint64_t>0x7fffffff)
    cdef shared_ptr[Device] device
    cdef string image, reason
    cdef Failure failure
    driver()
    try:
        image = FATBIN.read_bytes()
    except FileNotFoundError:
        reason = NO_FATBIN.encode()
    with nogil:
        failure = Device.open(number, image, reason, &device)
    check_cuda(failure)
    return device


def driver_facts():
    cdef const Driver* known = driver()
    return DriverFacts(
        known.version, known.devices, known.copy_batch != NULL, "" if FATBIN.exists() else NO_FATBIN
    )


def device_facts(ordinal):
    cdef CDeviceFacts facts
    cdef int number = <int>min(whole(ordinal, "ordinal"), <uint64_t>0x7fffffff)
    cdef Failure failure
    driver()
    with nogil:
        failure = read_facts(number, &facts)
    check_cuda(failure)
    return DeviceFacts(
        facts.ordinal,
        facts.name.decode(errors="replace"),
        (facts.capability_major, facts.capability_minor),
        facts.memory_bytes,
        facts.pci_bus_id.decode(),
        bool(facts.can_register_host),
    )


cdef class HostRegion:
    cdef shared_ptr[CHostRegion] region

    def __cinit__(self, device, address, length):
        cdef shared_ptr[Device] on = open_device(device)
        cdef uint64_t where = whole(address, "address")
        cdef uint64_t count = whole(length, "length")
        cdef Failure failure
        if where == 0 or count == 0:
            raise ValueError("address, length: may not be 0")
        with nogil:
            failure = CHostRegion.create(on, where, count, &self.region)
        check_cuda(failure)

    def __dealloc__(self):
        with nogil:
            self.region.reset()

    @property
    def address(self):
        return self.region.get().address()

    @property
    def length(self):
        return self.region.get().length()

    @property
    def registered(self):
        return bool(self.region.get().registered())

    def unregister(self):
        cdef Failure failure
        with nogil:
            failure = self.region.get().unregister()
        check_cuda(failure)


cdef object MADE_HERE = object()


cdef class Moment:
    cdef shared_ptr[CMoment] moment

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("moments come from CudaCopyEngine.moment()")


cdef class CudaCopyPlan:
    cdef CudaPlan plan
    cdef readonly CopyPlan host_plan

    def __cinit__(self, CopyPlan plan not None, device, *, fp8=None):
        cdef shared_ptr[Device] on
        cdef shared_ptr[const CCopyPlan] copy = plan.plan
        cdef Rounding rounding
        cdef Failure failure
        self.host_plan = plan
        if device is None:  # derived() sets the plan
            return
        if fp8 is not None:
            dtype, *array = fp8
            if dtype not in (1, 2) or len(array) != 4:
                raise ValueError(f"fp8: must be (1 or 2, groups, tokens, heads, dim), not {fp8!r:.100}")
            rounding.type = Fp8Source.kBfloat16 if dtype == 1 else Fp8Source.kFloat16
            rounding.block.blocks = 1
            rounding.block.groups, rounding.block.tokens, rounding.block.heads, rounding.block.dim = array
            raise_for(CCopyPlan.rounded(plan.plan.get()[0], rounding, &copy), CALL)
        on = open_device(device)
        with nogil:
            failure = CudaPlan.create(copy, on, &self.plan)
        check_cuda(failure)

    cdef CudaCopyPlan derived(self):
        cdef CudaCopyPlan other = CudaCopyPlan.__new__(CudaCopyPlan, self.host_plan, None)
        other.plan = self.plan
        return other

    @property
    def device(self):
        return self.plan.device.get().ordinal()

    @property
    def section_count(self):
        return self.host_plan.section_count

    @property
    def num_blocks(self):
        return self.host_plan.num_blocks

    def section_bytes(self, section, n_blocks):
        self.host_plan.section_bytes(section, n_blocks)  # checks both
        return self.plan.copy.get().section_bytes(section, n_blocks)

    @property
    def run_bytes(self):
        cdef uint64_t shortest = 1 << 62
        cdef size_t i
        for i in range(self.plan.copy.get().shapes().size()):
            shortest = min(shortest, self.plan.copy.get().shapes()[i].run_bytes())
        return shortest

    def payload_bytes(self, n_blocks):
        cdef uint64_t result = 0
        raise_for(self.plan.copy.get().payload_bytes(whole(n_blocks, "n_blocks"), &result), CALL)
        return result

    def record_bytes(self, n_blocks):
        cdef uint64_t result = 0
        raise_for(self.plan.copy.get().record_bytes(whole(n_blocks, "n_blocks"), &result), CALL)
        return result

    def behind(self, Moment moment not None):
        cdef CudaCopyPlan other = self.derived()
        other.plan.behind = moment.moment
        return other

    def layerwise(self):
        cdef CudaCopyPlan other = self.derived()
        other.plan.layerwise = True
        return other


cdef class CudaCopyEngine:
    cdef shared_ptr[CEngine] native
    cdef readonly int event_fd
    cdef readonly int threads

    def __cinit__(self, device, *, engine="kernel", threads=8, max_sms=4, staging_bytes=64 << 20, queue=256, fp8=False):
        cdef EngineOptions options
        cdef shared_ptr[Device] on
        cdef Status status
        cdef Failure failure
        if engine not in WAYS:
            raise ValueError(f"engine: must be 'dma' or 'kernel', not {engine!r}")
        options.way = <Way><uint8_t>WAYS.index(engine)
        self.threads = <int>min(whole(threads, "threads"), <uint64_t>1000)  # create() refuses over 64
        options.threads = self.threads
        options.max_sms = <unsigned>min(whole(max_sms, "max_sms"), <uint64_t>100_000)
        options.staging_bytes = whole(staging_bytes, "staging_bytes")
        options.queue = whole(queue, "queue")
        options.rounds = bool(fp8)
        if options.staging_bytes == 0:
            raise ValueError("staging_bytes: may not be 0")
        on = open_device(device)
        with nogil:
            failure = CEngine.create(on, options, &status, &self.native)
        check_cuda(failure)
        raise_for(status, CALL)
        self.event_fd = self.native.get().event_fd()

    def __dealloc__(self):
        with nogil:  # joins the threads
            self.native.reset()

    @property
    def engine(self):
        return WAYS[<uint8_t>self.native.get().way()]

    @property
    def reason(self):
        return self.native.get().reason().decode(errors="replace")

    @property
    def failed(self):
        cdef Failure failure = self.native.get().failed()
        return error_of(failure) if failure.number != 0 else None

    def moment(self, stream):
        cdef Stream on = <Stream><size_t>whole(stream, "stream")
        cdef Moment result = Moment.__new__(Moment, MADE_HERE)
        cdef Failure failure
        with nogil:
            failure = self.native.get().moment(on, &result.moment)
        check_cuda(failure)
        return result

    def await_section(self, job_id, section, stream, timeout_s):
        cdef uint64_t number = whole(job_id, "job_id")
        cdef size_t which = whole(section, "section")
        cdef Stream on = <Stream><size_t>whole(stream, "stream")
        cdef double seconds = min(max(<double>timeout_s, 0.0), LONGEST_WAIT_S)
        cdef cbool queued = False
        cdef Failure failure
        with nogil:
            failure = self.native.get().await_section(
                number, which, on, nanoseconds(<int64_t>(seconds * 1e9)), &queued
            )
        check_cuda(failure)
        return bool(queued)

    def pin(self, HostRegion region not None):
        with nogil:
            self.native.get().pinned().add(region.region)

    def unpin(self, HostRegion region not None):
        with nogil:
            self.native.get().pinned().remove(region.region.get())

    def submit(self, job_id, kind, CudaCopyPlan plan not None, items):
        cdef uint64_t number = whole(job_id, "job_id")
        cdef CopyKind which = kind_of(kind)
        cdef vector[CopyItem] list_of
        cdef Status status
        set_items(list_of, which, items)
        with nogil:
            status = self.native.get().submit(number, which, plan.plan, move(list_of))
        if status.code() == StatusCode.kQueueFull:
            return False
        raise_for(status, ITEMS)
        return True

    def completions(self):
        cdef vector[CopyCompletion] done
        with nogil:
            self.native.get().completions(&done)
        return [(done[i].job_id, codes_of(done[i].results)) for i in range(done.size())]

    def run(self, kind, CudaCopyPlan plan not None, items):
        cdef CopyKind which = kind_of(kind)
        cdef vector[CopyItem] list_of
        cdef vector[CopyResult] results
        cdef Status status
        set_items(list_of, which, items)
        with nogil:
            status = self.native.get().run(which, plan.plan, move(list_of), &results)
        raise_for(status, ITEMS)
        return codes_of(results)

    def wait(self, job_id, timeout_s):
        cdef uint64_t number = whole(job_id, "job_id")
        cdef double seconds = min(max(<double>timeout_s, 0.0), LONGEST_WAIT_S)
        cdef bint done
        with nogil:
            done = self.native.get().wait(number, nanoseconds(<int64_t>(seconds * 1e9)))
        return done

    def cancel(self, job_id):
        cdef uint64_t number = whole(job_id, "job_id")
        cdef bint cancelled
        with nogil:
            cancelled = self.native.get().cancel(number)
        return cancelled

    def drain(self):
        with nogil:
            self.native.get().drain()

    def close(self):
        with nogil:
            self.native.get().close()
