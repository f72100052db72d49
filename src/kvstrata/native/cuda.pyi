"""Copies between the blocks of a GPU's KV cache and records in host memory, by the CUDA driver.

The module loads on any machine: the first call that needs the driver looks for libcuda.so.1.  The GPU's memory
is used through the device's primary context, the one that torch and CuPy use.  Streams are ints
(`torch.cuda.current_stream(device).cuda_stream`), 0 the default stream.  Addresses are as in `copying`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, final

from kvstrata.errors import MediumError
from kvstrata.native.core import CopyPlan, RecordSpec

class CudaError(MediumError):
    """A call of the driver failed.

    The message names the call, the error and, where we know, the remedy.  After a `sticky` error no call of this
    process's GPU context succeeds any more.
    """

    code: str
    number: int
    """CUDA's error number; 0: kvstrata found the error before any call."""
    name: str
    """CUDA's name of the error (`CUDA_ERROR_OUT_OF_MEMORY`)."""
    sticky: bool

class CudaUnavailable(CudaError):
    """The driver or the device is missing, or the driver is too old; the message says which, and what to do."""

class DriverFacts(NamedTuple):
    version: int
    """12080 is 12.8."""
    devices: int
    batched_copies: bool
    """Whether one call of the driver can start many copies (drivers from CUDA 12.8 on)."""
    kernels: str
    """Why this package's kernels cannot be used; "" if they can."""

class DeviceFacts(NamedTuple):
    ordinal: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    pci_bus_id: str
    can_register_host: bool

def driver_facts() -> DriverFacts:
    """Facts about the driver. Touches no device. Raises CudaUnavailable."""

def device_facts(ordinal: int) -> DeviceFacts:
    """Facts about a device. Makes no context. Raises CudaUnavailable, and CudaError if there is no such device."""

@final
class HostRegion:
    """A range of host memory registered with a device (pinned, and mapped into its addresses).

    Registering locks the pages, which takes time if they are not present: create the object in a thread.  The object
    does not keep the memory mapped: call `unregister` before the memory is unmapped.  The registration ends with the
    object at the latest.
    """

    def __new__(cls, device: int, address: int, length: int) -> HostRegion:
        """Raises CudaError naming the limit that refused it."""

    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def registered(self) -> bool: ...
    def unregister(self) -> None:
        """Idempotent. REQUIRES: no copy from or to the region is under way."""

@final
class Moment:
    """A point in the work of a stream, made by `CudaCopyEngine.moment`."""

@final
class CudaCopyPlan:
    """A `CopyPlan` whose sections lie on a device; immutable, for any number of copies and threads."""

    def __new__(
        cls, plan: CopyPlan, device: int, *, fp8: tuple[int, int, int, int, int] | None = None
    ) -> CudaCopyPlan:
        """Raises CudaError naming the first section that is not memory of this device.

        With `fp8`, (dtype, groups, tokens, heads, dim) of one block, records hold
        numbers rounded to 8 bits: for each section its scales and then its codes.  Raises ValueError naming the part of
        `fp8` that does not fit the plan.
        """

    @property
    def host_plan(self) -> CopyPlan: ...
    @property
    def device(self) -> int: ...
    @property
    def section_count(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a block."""

    def section_bytes(self, section: int, n_blocks: int) -> int: ...
    def payload_bytes(self, n_blocks: int) -> int: ...
    def record_bytes(self, n_blocks: int) -> int: ...
    def behind(self, moment: Moment) -> CudaCopyPlan:
        """A plan of the same blocks; each copy with it begins after the stream has passed the moment."""

    def layerwise(self) -> CudaCopyPlan:
        """A plan of the same blocks whose loads copy all items together, section by section; see `await_section`."""

@final
class CudaCopyEngine:
    """The copy threads of a device, with the methods, items and outcomes of `copying.CopyEngine`.

    Loads have a stream and threads of their own, and so have stores.  An item has ended when the GPU has finished with
    its extent and blocks, and its checksums are computed: OK of a store means a sealed record, OK of a load verified
    blocks.  FAILED means an error of CUDA, or a number that cannot be rounded because it is infinite or a NaN.  Only
    that item has failed, unless the error is sticky (`failed`): then all later items fail too.  An item that has begun
    is copied to its end; `cancel` cancels the others.  The part of a record for a negative block id is verified, but
    not written.
    """

    def __new__(
        cls,
        device: int,
        *,
        engine: Literal["dma", "kernel"] = "kernel",
        threads: int = 8,
        max_sms: int = 4,
        staging_bytes: int = 64 << 20,
        queue: int = 256,
        fp8: bool = False,
    ) -> CudaCopyEngine:
        """`engine`: how copies are made. `threads` (1 to 64) compute checksums; a kernel fills at most `max_sms`
        multiprocessors.

        Without kernels, "dma" takes the place of "kernel", and `reason` says why.  With `fp8` the object also takes
        plans that round: it takes `staging_bytes` of device memory for each direction, is never "dma", and raises
        CudaError if that is not possible.  Raises CudaUnavailable, CudaError, ValueError.
        """

    @property
    def event_fd(self) -> int:
        """Readable while completions are unread. Belongs to the object: never close it."""

    @property
    def threads(self) -> int: ...
    @property
    def engine(self) -> str:
        """How copies are made: "dma" or "kernel", by which records in memory that is not registered go by "dma"."""

    @property
    def reason(self) -> str:
        """Why copies are made in another way than was asked for, for a log; otherwise empty."""

    @property
    def failed(self) -> CudaError | None:
        """The sticky error that ended this object's use of the GPU, or None; every item after the error ends FAILED."""

    def moment(self, stream: int) -> Moment:
        """The end of all work that was queued on the caller's `stream` until now. Never waits. Raises CudaError."""

    def await_section(self, job_id: int, section: int, stream: int, timeout_s: float) -> bool:
        """Makes `stream` wait for a section of a load. This thread waits only until the section's copies are queued.

        With a plan that is not layerwise, `stream` waits for all sections.  False: the copies were not queued in time,
        were cancelled, or failed with an error of CUDA; then nothing is known about the blocks.  True for a job whose
        completion was already read.  Only the job's outcomes say which records were good.  Raises CudaError.
        """

    def pin(self, region: HostRegion) -> None:
        """Tells the copy engine that this memory is registered. Copies from and to other memory work, but slowly."""

    def unpin(self, region: HostRegion) -> None:
        """Tells the copy engine to treat the region as unregistered memory in all items submitted from now on."""

    def submit(
        self,
        job_id: int,
        kind: Literal["gather", "scatter"],
        plan: CudaCopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, tuple[bytes, bytes]]],
    ) -> bool: ...
    def completions(self) -> list[tuple[int, list[int]]]: ...
    def run(
        self,
        kind: Literal["gather", "scatter"],
        plan: CudaCopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, tuple[bytes, bytes]]],
    ) -> list[int]:
        """Does a job after those that are queued, and waits for its end."""

    def wait(self, job_id: int, timeout_s: float) -> bool: ...
    def cancel(self, job_id: int) -> bool: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
