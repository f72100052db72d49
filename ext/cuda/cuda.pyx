# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False, annotation_typing=False
"""Copies between the blocks of a GPU's KV cache and records in host memory, by the CUDA driver.

The module loads on any machine: the first call that needs the driver looks for libcuda.so.1.  The GPU's memory
is used through the device's primary context, the one that torch and CuPy use.  Streams are ints
(`torch.cuda.current_stream(device).cuda_stream`), 0 the default stream.  Addresses are as in `core/copying.pxi`.
"""

from libcpp.utility cimport move

from arguments cimport whole
from cpp cimport *
from kvstrata.native.core cimport CALL, ITEMS, CopyPlan, codes_of, kind_of, raise_for, set_items

from pathlib import Path
from typing import NamedTuple

from kvstrata.errors import MediumError


cdef extern from "<chrono>" namespace "std::chrono" nogil:
    cdef cppclass nanoseconds:
        nanoseconds(int64_t count)


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

    cdef cppclass CMoment "kvstrata::cuda::Moment":
        Device& device()

    cdef cppclass CHostRegion "kvstrata::cuda::HostRegion":
        @staticmethod
        Failure create(
            shared_ptr[Device] device, uint64_t address, uint64_t length, shared_ptr[CHostRegion]* out
        ) except +
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
        Status run(CopyKind kind, CudaPlan plan, vector[CopyItem] items, vector[CCopyOutcome]* outcomes) except +
        cbool cancel(uint64_t job_id) except +
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
    """A call of the driver failed.

    The message names the call, the error and, where we know, the remedy.  `number` and `name` are CUDA's
    (`CUDA_ERROR_OUT_OF_MEMORY`); 0: kvstrata found the error before any call.  After a `sticky` error no call of this
    process's GPU context succeeds any more.
    """

    code = "cuda"
    number: int
    name: str
    sticky: bool

    def __init__(self, message, *, field="", number=0, name="", sticky=False):
        super().__init__(message, field=field)
        self.number = number
        self.name = name
        self.sticky = sticky


class CudaUnavailable(CudaError):
    """The driver or the device is missing, or the driver is too old; the message says which, and what to do."""


class DriverFacts(NamedTuple):
    """`version`: 12080 is 12.8. `batched_copies`: whether one call can start many copies (drivers from CUDA 12.8 on).

    `kernels`: why this package's kernels cannot be used; "" if they can.
    """

    version: int
    devices: int
    batched_copies: bool
    kernels: str


class DeviceFacts(NamedTuple):
    ordinal: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    pci_bus_id: str
    can_register_host: bool


WAYS = ("dma", "kernel")
LONGEST_WAIT_S = 31_536_000.0
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


def driver_facts() -> DriverFacts:
    """Facts about the driver. Touches no device. Raises CudaUnavailable."""
    cdef const Driver* known = driver()
    return DriverFacts(
        known.version, known.devices, known.copy_batch != NULL, "" if FATBIN.exists() else NO_FATBIN
    )


def device_facts(ordinal: int) -> DeviceFacts:
    """Facts about a device. Makes no context. Raises CudaUnavailable, and CudaError if there is no such device."""
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
    """A range of host memory registered with a device (pinned, and mapped into its addresses).

    Registering locks the pages, which takes time if they are not present: create the object in a thread.  The object
    does not keep the memory mapped: call `unregister` before the memory is unmapped.  The registration ends with the
    object at the latest.
    """

    cdef shared_ptr[CHostRegion] region

    def __cinit__(self, device: int, address: int, length: int) -> None:
        """Raises CudaError naming the limit that refused it."""
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

    def unregister(self) -> None:
        """Idempotent. REQUIRES: no copy from or to the region is under way."""
        cdef Failure failure
        with nogil:
            failure = self.region.get().unregister()
        check_cuda(failure)


cdef object MADE_HERE = object()


cdef class Moment:
    """A point in the work of a stream, made by `CudaCopyEngine.moment`."""

    cdef shared_ptr[CMoment] moment

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("moments come from CudaCopyEngine.moment()")


cdef class CudaCopyPlan:
    """A `CopyPlan` whose sections lie on a device; immutable, for any number of copies and threads."""

    cdef CudaPlan plan
    cdef readonly CopyPlan host_plan

    def __cinit__(
        self, CopyPlan plan not None, device: int, *, fp8: tuple[int, int, int, int, int] | None = None
    ) -> None:
        """Raises CudaError naming the first section that is not memory of this device.

        With `fp8`, (dtype, groups, tokens, heads, dim) of one block, records hold
        numbers rounded to 8 bits: for each section its scales and then its codes.  Raises ValueError naming the part of
        `fp8` that does not fit the plan.
        """
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
    def section_count(self) -> int:
        return self.host_plan.section_count

    def section_bytes(self, section: int, n_blocks: int) -> int:
        self.host_plan.section_bytes(section, n_blocks)  # checks both
        return self.plan.copy.get().section_bytes(section, n_blocks)

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a block."""
        cdef uint64_t shortest = 1 << 62
        cdef size_t i
        for i in range(self.plan.copy.get().shapes().size()):
            shortest = min(shortest, self.plan.copy.get().shapes()[i].run_bytes())
        return shortest

    def payload_bytes(self, n_blocks: int) -> int:
        cdef uint64_t result = 0
        raise_for(self.plan.copy.get().payload_bytes(whole(n_blocks, "n_blocks"), &result), CALL)
        return result

    def record_bytes(self, n_blocks: int) -> int:
        cdef uint64_t result = 0
        raise_for(self.plan.copy.get().record_bytes(whole(n_blocks, "n_blocks"), &result), CALL)
        return result

    def behind(self, Moment moment not None) -> CudaCopyPlan:
        """A plan of the same blocks; each copy with it begins after the stream has passed the moment."""
        cdef CudaCopyPlan other = self.derived()
        other.plan.behind = moment.moment
        return other

    def layerwise(self) -> CudaCopyPlan:
        """A plan of the same blocks whose loads copy all items together, section by section; see `await_section`."""
        cdef CudaCopyPlan other = self.derived()
        other.plan.layerwise = True
        return other


cdef class CudaCopyEngine:
    """The copy threads of a device, with the methods, items and outcomes of `copying.CopyEngine`.

    Loads have a stream and threads of their own, and so have stores.  An item has ended when the GPU has finished with
    its extent and blocks, and its checksums are computed: OK of a store means a sealed record, OK of a load verified
    blocks.  FAILED means an error of CUDA, or a number that cannot be rounded because it is infinite or a NaN.  Only
    that item has failed, unless the error is sticky (`failed`): then all later items fail too.  An item that has begun
    is copied to its end; `cancel` cancels the others.  The part of a record for a negative block id is verified, but
    not written.
    """

    cdef shared_ptr[CEngine] native
    cdef readonly int event_fd
    cdef readonly int threads

    def __cinit__(
        self, device: int, *, engine: Literal["dma", "kernel"] = "kernel", threads: int = 8, max_sms: int = 4,
        staging_bytes: int = 64 << 20, queue: int = 256, fp8: bool = False
    ) -> None:
        """`engine`: how copies are made. `threads` (1 to 64) compute checksums; a kernel fills at most `max_sms`
        multiprocessors.

        Without kernels, "dma" takes the place of "kernel", and `reason` says why.  With `fp8` the object also takes
        plans that round: it takes `staging_bytes` of device memory for each direction, is never "dma", and raises
        CudaError if that is not possible.  Raises CudaUnavailable, CudaError, ValueError.
        """
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
    def engine(self) -> str:
        """How copies are made: "dma" or "kernel", by which records in memory that is not registered go by "dma"."""
        return WAYS[<uint8_t>self.native.get().way()]

    @property
    def reason(self) -> str:
        """Why copies are made in another way than was asked for, for a log; otherwise empty."""
        return self.native.get().reason().decode(errors="replace")

    @property
    def failed(self) -> CudaError | None:
        """The sticky error that ended this object's use of the GPU, or None; every item after the error ends FAILED."""
        cdef Failure failure = self.native.get().failed()
        return error_of(failure) if failure.number != 0 else None

    def moment(self, stream: int) -> Moment:
        """The end of all work that was queued on the caller's `stream` until now. Never waits. Raises CudaError."""
        cdef Stream on = <Stream><size_t>whole(stream, "stream")
        cdef Moment result = Moment.__new__(Moment, MADE_HERE)
        cdef Failure failure
        with nogil:
            failure = self.native.get().moment(on, &result.moment)
        check_cuda(failure)
        return result

    def await_section(self, job_id: int, section: int, stream: int, timeout_s: float) -> bool:
        """Makes `stream` wait for a section of a load. This thread waits only until the section's copies are queued.

        With a plan that is not layerwise, `stream` waits for all sections.  False: the copies were not queued in time,
        were cancelled, or failed with an error of CUDA; then nothing is known about the blocks.  True for a job whose
        completion was already read.  Only the job's outcomes say which records were good.  Raises CudaError.
        """
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

    def pin(self, HostRegion region not None) -> None:
        """Tells the copy engine that this memory is registered. Copies from and to other memory work, but slowly."""
        with nogil:
            self.native.get().pinned().add(region.region)

    def unpin(self, HostRegion region not None) -> None:
        """Tells the copy engine to treat the region as unregistered memory in all items submitted from now on."""
        with nogil:
            self.native.get().pinned().remove(region.region.get())

    def submit(
        self, job_id: int, kind: Literal["gather", "scatter"], CudaCopyPlan plan not None,
        items: Sequence[tuple[Sequence[int], int, int, Any]]
    ) -> bool:
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

    def completions(self) -> list[tuple[int, list[int]]]:
        cdef vector[CopyCompletion] done
        with nogil:
            self.native.get().completions(&done)
        return [(done[i].job_id, codes_of(done[i].outcomes)) for i in range(done.size())]

    def run(
        self, kind: Literal["gather", "scatter"], CudaCopyPlan plan not None,
        items: Sequence[tuple[Sequence[int], int, int, Any]]
    ) -> list[int]:
        """Does a job after those that are queued, and waits for its end."""
        cdef CopyKind which = kind_of(kind)
        cdef vector[CopyItem] list_of
        cdef vector[CCopyOutcome] outcomes
        cdef Status status
        set_items(list_of, which, items)
        with nogil:
            status = self.native.get().run(which, plan.plan, move(list_of), &outcomes)
        raise_for(status, ITEMS)
        return codes_of(outcomes)

    def cancel(self, job_id: int) -> bool:
        cdef uint64_t number = whole(job_id, "job_id")
        cdef bint cancelled
        with nogil:
            cancelled = self.native.get().cancel(number)
        return cancelled

    def close(self) -> None:
        with nogil:
            self.native.get().close()
