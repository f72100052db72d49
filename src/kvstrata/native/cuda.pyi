"""Copies between the blocks of a GPU's KV cache and records in host memory, by the CUDA driver.

Loads on any machine: the driver (libcuda.so.1) is looked for by the first call that needs it.  The GPU's memory
is used through the device's primary context, the one that torch and CuPy use.  Streams are ints
(`torch.cuda.current_stream(device).cuda_stream`), 0 the default stream.  Addresses as in `copying`.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, final

from kvstrata.errors import KvstrataError
from kvstrata.native.copying import CopyPlan, RecordSpec

class CudaError(KvstrataError):
    """A call of the driver failed.

    The message names the call, the error and, where we know, the remedy.  After a `sticky` error no call of this
    process's GPU context succeeds any more.
    """

    code: ClassVar[str]
    number: int
    """CUDA's number of the error; 0: found by us before any call."""
    name: str
    """CUDA's name of it (`CUDA_ERROR_OUT_OF_MEMORY`)."""
    sticky: bool

class CudaUnavailable(CudaError):
    """No driver, no device, or a driver too old; the message says which and what to do."""

class DriverFacts(NamedTuple):
    version: int
    """12080 is 12.8."""
    devices: int
    batched_copies: bool
    """Whether many copies go in one call (drivers from CUDA 12.8 on)."""
    kernels: str
    """"", or why there are no kernels."""

class DeviceFacts(NamedTuple):
    ordinal: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    copy_engines: int
    pci_bus_id: str
    numa_node: int
    """The host's node next to it; -1: unknown, or there is only one."""
    can_register_host: bool

def driver_facts() -> DriverFacts:
    """Raises CudaUnavailable. Touches no device."""

def device_facts(ordinal: int) -> DeviceFacts:
    """Raises CudaUnavailable, CudaError for an ordinal that is none. Makes no context."""

@final
class HostRegion:
    """A range of host memory registered with a device (pinned, and mapped into its addresses).

    Registering locks the pages, which takes time where they are not present; it belongs on a thread.  The object
    does not keep the memory: unregister it before the memory is unmapped.  It ends with the object at the latest.
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
        """Idempotent. The caller has seen to it that no copy from or to it is under way."""

@final
class Moment:
    """A point in the work of a stream, made by `CudaCopyEngine.moment`."""

@final
class CudaCopyPlan:
    """A `CopyPlan` whose sections lie on a device; one description for every engine; immutable."""

    def __new__(
        cls, plan: CopyPlan, device: int, *, fp8: tuple[int, int, int, int, int] | None = None
    ) -> CudaCopyPlan:
        """CudaError names the first section that is not memory of this device.

        With `fp8`, (dtype, groups, tokens, heads, dim) of one block as `codec.fp8_encode` takes them, records hold
        numbers rounded to 8 bits: for each section its scales and then its codes.  Raises ValueError naming what does
        not fit the plan.
        """

    @property
    def host_plan(self) -> CopyPlan: ...
    @property
    def device(self) -> int: ...
    @property
    def section_count(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def section_bytes(self, section: int, n_blocks: int) -> int: ...
    def payload_bytes(self, n_blocks: int) -> int: ...
    def record_bytes(self, n_blocks: int) -> int: ...
    def behind(self, moment: Moment) -> CudaCopyPlan:
        """The same blocks; copies with the result begin after the moment."""

    def layerwise(self) -> CudaCopyPlan:
        """The same blocks; the items of a load go together, section by section, see `await_section`."""

@final
class CudaCopyEngine:
    """The copy threads of a device: methods, items and outcomes as of `copying.CopyEngine`.

    Loads and stores have a stream and threads each.  An item has ended when the GPU is done with its extent and
    its blocks and the checksums are: OK of a store means a sealed record, OK of a load verified blocks.  FAILED is
    an error of CUDA, or a number that cannot be rounded (infinite or none); it costs that item, unless it is sticky
    (`failed`), then all that follow.  An item that has
    begun is copied to its end; `cancel` takes the others.  A negative block id of a load is verified, not written.
    """

    def __new__(
        cls,
        device: int,
        *,
        engine: Literal["auto", "dma", "kernel", "staged"] = "auto",
        threads: int = 2,
        max_sms: int = 4,
        staging_bytes: int = 64 << 20,
        queue: int = 256,
        fp8: bool = False,
    ) -> CudaCopyEngine:
        """`threads` (1 to 64) compute checksums; a kernel fills at most `max_sms` multiprocessors.

        `staging_bytes` of device memory for each direction, taken only where the engine is "staged".  What cannot be
        (no kernels, no room for staging) becomes "dma", and `reason` says why.  An engine with `fp8` takes plans that
        round, too; it has its staging always, is never "dma", and what cannot be raises CudaError.  Raises
        CudaUnavailable, CudaError, ValueError.
        """

    @property
    def event_fd(self) -> int:
        """Readable while completions are unread; the object's own, never close it."""

    @property
    def threads(self) -> int: ...
    @property
    def engine(self) -> str:
        """How copies go now: "dma", "kernel" or "staged"; single records fall back to "dma"."""

    @property
    def reason(self) -> str:
        """Why so, in a sentence for a log."""

    @property
    def measured(self) -> dict[str, float]:
        """GB/s of the engines that `choose` tried."""

    @property
    def failed(self) -> CudaError | None:
        """The sticky error that ended this engine's use of the GPU; every job after it ends FAILED."""

    def choose(
        self, plan: CopyPlan | CudaCopyPlan, host_address: int, length: int, blocks: Sequence[int]
    ) -> None:
        """Measures the engines with records of so many blocks and, where "auto" was asked for, takes the best.

        Of the plan only the shapes count, and whether it rounds: it works on device memory of its own and on `length`
        bytes at `host_address`, which must be nobody else's now (length 0: on pinned memory of its own).  Takes some
        10 ms without the GIL; copies under way go on.  Raises CudaError, and then nothing changes.
        """

    def moment(self, stream: int) -> Moment:
        """What was queued on the caller's `stream` until now. Never waits. Raises CudaError."""

    def await_section(self, job_id: int, section: int, stream: int, timeout_s: float) -> bool:
        """Makes `stream` wait for a section of a load, and this thread only until its copies are queued.

        With a plan that is not layerwise it waits for all sections.  False: not queued in time, or cancelled, or
        hit by an error of CUDA; then nothing may be concluded about the blocks.  True for a job whose completion was
        already read.  The outcome of the job still says which records were good.  Raises CudaError.
        """

    def pin(self, region: HostRegion) -> None:
        """Tells the engine of registered memory. Copies from and to other memory work and are slow."""

    def unpin(self, region: HostRegion) -> None:
        """No item submitted later counts on the region."""

    def submit(
        self,
        job_id: int,
        kind: Literal["gather", "scatter"],
        plan: CudaCopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, bytes]],
    ) -> bool: ...
    def completions(self) -> list[tuple[int, list[int]]]: ...
    def run(
        self,
        kind: Literal["gather", "scatter"],
        plan: CudaCopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, bytes]],
    ) -> list[int]:
        """`submit` and `wait`, in turn with what is queued."""

    def wait(self, job_id: int, timeout_s: float) -> bool: ...
    def cancel(self, job_id: int) -> bool: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
