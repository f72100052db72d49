"""Prewarms: chunks of a prompt that are loaded from L2 before any request asks for them.

A prewarm is listed from its start until `MAX_JOBS` younger ones are listed.  Its `reason` says why it loaded no more;
it is empty when all chunks were loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.errors import BadRequest, InternalError, KvstrataError, Refused
from kvstrata.keys.batch import before, count, part
from kvstrata.keys.chunking import ChunkHasher
from kvstrata.keys.spans import peek
from kvstrata.native.core import storage_keys
from kvstrata.server.processes import EngineGroup, tenant_number
from kvstrata.types import KEY_BYTES, RequestIdentity, adapter_of, identity_root

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

MAX_JOBS = 256
MAX_RUNNING_JOBS = 8


class Job(msgspec.Struct):
    """One prewarm and its outcome so far, as an admin gets it."""

    job: int
    state: str = "running"
    """Or "done"."""
    chunks: int = 0
    l1_chunks: int = 0
    l2_chunks: int = 0
    reason: str = ""


class GroupSlices(NamedTuple):
    """What a prewarm loads of each chunk, for one engine."""

    packed: bytes
    limits: list[int]
    spans: tuple[int, ...]


class Prewarms:
    """The prewarms of an instance. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._processes, self._pool, self._lane = parts.processes, parts.pool, parts.lane
        self._prefetch, self._clock, self._supervisor = parts.prefetch, parts.clock, parts.supervisor
        self._jobs: dict[int, Job] = {}
        self._next = 1

    async def prewarm(
        self, *, model: str, request: RequestIdentity, tokens: Sequence[int], budget_bytes: int, ttl_ms: int
    ) -> int:
        """Start loading the chunks of a prompt; returns the job's number.

        `request.adapter` may be the name of a LoRA adapter, or empty for the model itself: the engine's newest requests
        for it say which weights are meant.  `model`: of an attached engine, empty for the only one.  Raises BadRequest
        or Refused.
        """
        group = self._group_of(model)
        request = msgspec.structs.replace(request, adapter=adapter_of(request.adapter, group.adapters))
        root = identity_root(group.layout, request)
        layout = group.layout
        hasher = ChunkHasher(root, layout.chunk_tokens, lookahead_tokens=layout.lookahead)
        await asyncio.shield(self._lane.run(hasher.feed, tokens))
        return self.start(group, root, tenant_number(request.tenant), hasher.chain, budget_bytes, ttl_ms)

    def start(
        self,
        group: EngineGroup,
        root: bytes,
        tenant: int,
        chain: bytes,
        budget_bytes: int,
        ttl_ms: int,
    ) -> int:
        """Start loading the chunks of these chain keys; returns the job's number. Raises Refused."""
        if not group.complete:
            raise Refused("engine_slices: not all slices of this engine are attached; try later")
        running = [job for job in self._jobs.values() if job.state == "running"]
        if len(running) >= MAX_RUNNING_JOBS:
            raise Refused(f"{len(running)} prewarm jobs are running; try again when some have ended")
        job = Job(self._next, chunks=len(chain) // KEY_BYTES)
        self._next += 1
        self._jobs[job.job] = job
        if len(self._jobs) > MAX_JOBS:
            ended = (number for number, other in self._jobs.items() if other.state == "done")
            del self._jobs[next(ended)]
        # The group's processes may end at any time, so what the prewarm needs of it is read here.
        slices = GroupSlices(group.packed_slices, group.record_limits, group.spans)
        work = self._run(job, slices, root, tenant, chain, budget_bytes, ttl_ms)
        self._supervisor.job(work, f"prewarm-{job.job}")
        return job.job

    def job(self, number: int) -> dict[str, Any] | None:
        """The outcome of a prewarm so far; None if it is not listed."""
        job = self._jobs.get(number)
        return None if job is None else msgspec.structs.asdict(job)

    def documents(self) -> list[dict[str, Any]]:
        """All listed prewarms, oldest first."""
        return [msgspec.structs.asdict(job) for job in self._jobs.values()]

    async def _run(
        self, job: Job, group: GroupSlices, root: bytes, tenant: int, chain: bytes, budget_bytes: int, ttl_ms: int
    ) -> None:  # fmt: skip
        slices, limits, spans = group
        n_slices, reason = len(limits), InternalError.code
        deadline_s = self._clock.monotonic_s() + ttl_ms / 1000
        try:
            keys = await asyncio.shield(self._lane.run(storage_keys, root, chain, slices))
            job.l1_chunks = peek(self._pool, keys, n_slices, spans)
            n_chunks, reason = count(keys, n_slices), ""
            if job.l1_chunks < n_chunks:
                reason = InternalError.code
                fetched = await self._prefetch.fetch(
                    part(keys, job.l1_chunks, n_chunks, n_slices),
                    n_slices,
                    identity=root,
                    tenant=tenant,
                    parent=before(keys, job.l1_chunks, n_slices=n_slices),
                    deadline_s=deadline_s,
                    budget_bytes=budget_bytes or None,
                    limits=limits,
                    spans=spans,
                )
                job.l2_chunks, reason = fetched.l2_chunks, fetched.reason
        except KvstrataError as error:
            reason = error.code
        finally:
            job.reason, job.state = reason, "done"

    def _group_of(self, model: str) -> EngineGroup:
        groups = self._processes.groups
        found = [group for group in groups if model in ("", group.layout.model)]
        if len({group.layout for group in found}) != 1:
            names = ", ".join(sorted({group.layout.model for group in groups})) or "none"
            raise BadRequest(
                f"model: {model!r:.80} must name the one attached engine to load for; attached: {names}",
                field="model",
            )
        return next((group for group in found if group.complete), found[0])
