"""Blocks in device memory: chunks go straight between them and the pool, on streams of our own.

    store   engine's stream ──event──▶ store stream: blocks ──▶ extents ──▶ CRCs and header on the host
    load    engine's stream ──event──▶ load stream: extents ──▶ blocks, while the CRCs are verified
            engine's stream ◀──event of a section── when the engine reaches that layer

Both begin after the work that is queued on the engine's stream at the time of the call: a store after the forward pass
that computes its chunks, a load after all kernels that still read, write or zero its blocks.  No stream is ever
synchronised: the engine's thread waits only for the end of loads that its step needs (`vllm.worker.WorkerSide`).

After a sticky error of the driver all copies stop: stores are refused, loads fail, and the engine computes the tokens.

This module does not import torch: a stream is the driver's handle as an int.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kvstrata.client import CacheClient, Identity
from kvstrata.client.copies import Pages, device_copies
from kvstrata.client.handles import LoadItem, LoadJob, StoreJob, StoreOutcome
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.mover import Mover
from kvstrata.connectors.vllm.kv_view import KvView
from kvstrata.connectors.vllm.metadata import Store
from kvstrata.errors import ConfigError
from kvstrata.native.cuda import CudaCopyEngine, CudaCopyPlan, CudaError, driver_facts
from kvstrata.rpc.wire import DeviceCopies
from kvstrata.types import LeaseName

logger = logging.getLogger("kvstrata.connectors")

STAGING_BYTES = 64 << 20
"""Memory of the GPU that rounding takes for each direction; more where a chunk's KV in one layer is longer."""
DMA_RUN_BYTES = 32 << 10
"""The GPU's copy engines move runs of 4 KB at 10 GB/s and of 32 KB at 34 to 48 GB/s, and take no multiprocessor from
the model; a kernel moves both at 41 to 48 GB/s."""
CHECKSUM_THREADS = 8
MAX_SMS = 4
"""More thread blocks of our kernels take more time from the model than they save (docs/gpu.md)."""


def open_engine(
    settings: ClientSettings, view: KvView, device: object, ordinal: int
) -> tuple[CudaCopyEngine, CudaCopyPlan]:
    """Open the copy engine for these blocks; returns it with the plan of its copies.

    `device` is the name of GPU number `ordinal` in errors.  Raises ConfigError if these blocks cannot be copied.
    """
    try:
        plan = CudaCopyPlan(view.plan(), ordinal, fp8=view.rounding)
        by_dma = plan.run_bytes >= DMA_RUN_BYTES and view.rounding is None and driver_facts().batched_copies
        engine = CudaCopyEngine(
            ordinal,
            engine="dma" if by_dma else "kernel",
            threads=CHECKSUM_THREADS,
            max_sms=MAX_SMS,
            staging_bytes=max(STAGING_BYTES, plan.section_bytes(0, view.record_blocks)),
            fp8=view.rounding is not None,
        )
    except CudaError as error:
        raise ConfigError(f"device: KV of {device} cannot be copied: {error}", field="device") from error
    except ValueError as error:
        raise ConfigError(f"fidelity: KV of {device} cannot be rounded: {error}", field="fidelity") from error
    instead = f" ({engine.reason})" if engine.reason else ""
    logger.info(
        "KV of %s is copied by %s, in runs of %d bytes%s", device, engine.engine, plan.run_bytes, instead
    )
    return engine, plan


class DeviceMover(Mover):
    """Moves blocks on a GPU."""

    def __init__(
        self,
        client: CacheClient,
        engine: CudaCopyEngine,
        plan: CudaCopyPlan,
        *,
        pages: Pages,
        sections: Mapping[str, int],
        current_stream: Callable[[], int],
    ) -> None:
        """`engine` (the copy engine) and `pages` are the client's; `sections` maps each layer to its record section.

        `current_stream()` is the stream on which the calling thread gives work to the device.  Raises ValueError if a
        section has no layer that would wait for it.
        """
        if set(sections.values()) != set(range(plan.section_count)):
            raise ValueError(
                f"sections: {sorted(set(sections.values()))} are not all {plan.section_count} sections"
            )
        super().__init__(client, plan)
        self._engine = engine
        self._layerwise_plan = plan.layerwise()
        self._pages = pages
        self._current_stream = current_stream
        self._told = False
        self._counted: DeviceCopies | None = None
        self.sections = sections

    def store(self, identity: Identity, store: Store, blocks: Sequence[Sequence[int]]) -> StoreJob:
        """Begins a store; it reads the blocks after the present work of the current stream."""
        plan = self._behind_now(self._plan)
        if plan is None:
            job = StoreJob(len(blocks), lambda job: None)
            job.refuse(StoreOutcome.UNAVAILABLE)
            return job
        return self._store(identity, store, plan, blocks)

    def load(self, identity: Identity, lease: LeaseName, items: Sequence[LoadItem], *, sync: bool) -> LoadJob:
        """Begins a load, which writes after the present work of the current stream. `sync`: layer after layer."""
        plan = self._behind_now(self._layerwise_plan if sync else self._plan)
        if plan is None:
            job = LoadJob(lambda job: None)
            job.finish(range(len(items)), 0)
            self._client.release([lease])
            return job
        return self._client.load(identity, lease, items, plan, whole=sync)

    def await_section(self, job: LoadJob, section: int | None, timeout_s: float) -> bool:
        """Make the current stream wait for these copies; this thread waits only until the copies are queued."""
        if job.done.is_set():
            return True
        ends_s = time.monotonic() + timeout_s
        which = range(self._plan.section_count) if section is None else (section,)
        stream = self._current_stream()
        try:
            queued = all(
                self._engine.await_section(copy, number, stream, max(0.0, ends_s - time.monotonic()))
                for number in which
                for copy in job.copy_jobs
            )
        except CudaError as error:
            self._tell(error)
            queued = False
        # The copy engine no longer knows a copy that has ended meanwhile; then the job's end gives the answer.
        return queued or job.wait(max(0.0, ends_s - time.monotonic()))

    @property
    def broken(self) -> bool:
        """Whether copying has stopped, for the rest of the process."""
        return self._engine.failed is not None

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call: this worker's way of copying (once), pinned bytes, and refusals to pin."""
        before, now = self._counted, device_copies(self._engine, self._pages)
        self._counted = now
        refused = now.pin_refusal and (before is None or before.pin_refusal != now.pin_refusal)
        return {
            f"copy_{now.engine}_workers": int(before is None),
            "pinned_bytes": max(0, now.pinned_bytes - (before.pinned_bytes if before else 0)),
            "pin_refusals": int(bool(refused)),
        }

    def _behind_now(self, plan: CudaCopyPlan) -> CudaCopyPlan | None:
        """The plan for copies after the present work of the current stream; None if nothing can be copied."""
        if self._engine.failed is None:
            try:
                return plan.behind(self._engine.moment(self._current_stream()))
            except CudaError as error:
                if self._engine.failed is None:
                    logger.warning("a copy of KV cannot begin: %s", error)
                    return None
        if self._engine.failed is not None:
            self._tell(self._engine.failed)
        return None

    def _tell(self, error: CudaError) -> None:
        if self._engine.failed is None:
            logger.warning("KV could not be loaded: %s", error)
        elif not self._told:
            self._told = True
            logger.error(
                "the cache is off for this worker until it is started again; the engine continues without it: %s",
                error,
            )
