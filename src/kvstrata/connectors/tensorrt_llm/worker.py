"""The worker's side: copies chunks between this rank's blocks and the pool, as the step's plan says.

Loads end before the forward pass begins.  Stores begin behind it and go on beside the next ones; a finished request
whose blocks a store still reads is reported once the store has read them (`finished`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.client import LoadItem, StoreJob
from kvstrata.client.identities import Identity
from kvstrata.connectors.mover import HostMover, Mover
from kvstrata.connectors.tensorrt_llm.plan import Load, StepPlan, Store
from kvstrata.errors import InternalError, MediumError
from kvstrata.keys import batch
from kvstrata.types import RequestIdentity, unpack_extents

logger = logging.getLogger("kvstrata.connectors.tensorrt_llm")

LOAD_S = 30.0
"""Longest wait for the copies of a step's loads, which take milliseconds."""

Opened = tuple[Mover, Callable[[RequestIdentity], Identity], Callable[[], None]]
"""Of one engine group: the mover, `CacheClient.identity`, and what ends them."""


class WorkerSide:
    """One rank's blocks, in the thread that runs the forward pass."""

    def __init__(self, digest: bytes, attach: Callable[[bytes], Opened]) -> None:
        """`digest` is this rank's slice. `attach(group)` makes and starts its client."""
        self._digest = digest
        self._attach = attach
        self._opened: Opened | None = None
        self._loads: list[Load] = []
        self._stores: list[Store] = []
        self._reading: dict[int, list[StoreJob]] = {}
        self._finishing: set[int] = set()

    def begin(self, plan: StepPlan | None) -> None:
        """Take the plan of the next step; the first one makes this side attach to the server."""
        self._loads, self._stores = ([], []) if plan is None else (list(plan.loads), list(plan.stores))
        if plan is not None and self._opened is None:
            self._opened = self._attach(plan.group)

    def load(self) -> None:
        """Do the step's loads. Raises MediumError if a chunk that was promised cannot be loaded whole."""
        loads, self._loads = self._loads, []
        if not loads:
            return
        if self._opened is None:
            raise InternalError("loads were planned before this worker attached")
        mover, identity, _ = self._opened
        jobs = [
            mover.load(identity(load.identity), load.lease, self._items(load), sync=False) for load in loads
        ]
        ends_s = time.monotonic() + LOAD_S
        for job in jobs:
            if not job.wait(max(0.0, ends_s - time.monotonic())) or job.failed:
                raise MediumError(
                    f"{len(job.failed) or 'some'} chunks of KV that TensorRT-LLM was promised could not be loaded, and "
                    "it cannot compute them instead; restart it, and look for damaged records in the server's log"
                )

    def store(self) -> None:
        """Begin the step's stores."""
        stores, self._stores = self._stores, []
        if self._opened is None:
            return
        mover, identity, _ = self._opened
        for store in stores:
            job = mover.store(identity(store.identity), store, store.blocks)
            self._reading.setdefault(store.request_id, []).append(job)

    def finished(self, request_ids: Sequence[int]) -> list[int]:
        """Requests, among these and earlier ones, whose blocks no store reads any more."""
        self._finishing.update(request_ids)
        for request, jobs in list(self._reading.items()):
            jobs[:] = [job for job in jobs if not job.gathered.is_set()]
            if not jobs:
                del self._reading[request]
        done = [request for request in self._finishing if request not in self._reading]
        self._finishing.difference_update(done)
        return done

    def close(self) -> None:
        """End the client and the mover."""
        if self._opened is not None:
            self._opened[2]()
            self._opened = None

    def _items(self, load: Load) -> list[LoadItem]:
        """The load's chunks in this rank's slice."""
        mine = unpack_extents(load.extents)[load.slices.index(self._digest) :: len(load.slices)]
        return [
            LoadItem(key, extent.offset_bytes, extent.length_bytes, blocks)
            for key, extent, blocks in zip(batch.split(load.chain), mine, load.blocks, strict=True)
        ]


def attach_host(client: Any, plan: Any) -> Opened:
    """Start a client whose blocks are in host memory."""
    client.start()
    return HostMover(client, plan), client.identity, client.close
