"""Prewarms: load the chunks of a prompt from L2 before any request asks for them.

A prewarm is listed from its start until `MAX_JOBS` newer ones are listed.  Its `reason` says why it stopped early; it
is empty when all chunks were loaded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.errors import BadRequest, InternalError, KvstrataError, NotFound, Refused
from kvstrata.keys.batch import count
from kvstrata.keys.chunking import ChunkHasher
from kvstrata.native.core import storage_keys
from kvstrata.process.operations import Weights, keys_of
from kvstrata.server.processes import EngineGroup, tenant_number
from kvstrata.tiers.fetch import Spent
from kvstrata.types import LayoutIdentity, adapter_of, identity_root

if TYPE_CHECKING:
    from kvstrata.server.admin.operations import Prompt
    from kvstrata.server.parts import Parts

MAX_JOBS = 256
MAX_RUNNING_JOBS = 8


class Job(Spent, kw_only=True):
    """One prewarm and its outcome so far, as an admin gets it."""

    job: int
    state: str = "running"
    """Or "done"."""
    reason: str = ""
    chunks: int = 0
    l1_chunks: int = 0
    """Number of leading chunks that were in L1."""
    l2_chunks: int = 0
    """Number of chunks that it loaded."""
    begun_s: float
    """Start time by the server's monotonic clock."""
    seconds: float = 0.0
    """Duration from its start to its end."""

    def report(self) -> dict[str, Any]:
        """The document that an admin gets."""
        found = msgspec.structs.asdict(self)
        del found["begun_s"]
        rounded = {word: round(seconds, 6) for word, seconds in self.phases.items()}
        return found | {"phases": rounded, "seconds": round(self.seconds, 6)}


class Work(NamedTuple):
    """The slices of each chunk that a prewarm loads for one engine, whose processes may end at any time."""

    layout: LayoutIdentity
    root: bytes
    slices: bytes
    limits: list[int]
    spans: tuple[int, ...]

    def derive(self, tokens: Any) -> bytes:
        """The storage keys of a prompt, chunk-major. Any thread."""
        hasher = ChunkHasher(self.root, self.layout.chunk_tokens, lookahead_tokens=self.layout.lookahead)
        hasher.feed(tokens)
        return storage_keys(self.root, hasher.chain, self.slices)


class Prewarms:
    """The prewarms of an instance. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._processes, self._lane = parts.processes, parts.lane
        self._prefetch, self._clock, self._supervisor = parts.prefetch, parts.clock, parts.supervisor
        self._jobs: dict[int, Job] = {}
        self._next = 1

    async def prewarm(self, ask: Prompt) -> Job:
        """Start loading the chunks of a prompt. Raises BadRequest, NotFound or Refused.

        The adapter may be the name of a LoRA adapter, or empty for the model itself: the engine's newest requests for
        it determine the weights.
        """
        if (ask.tokens is None) == (ask.keys is None):
            raise BadRequest("tokens: give either tokens or keys", field="tokens")
        work = self.work(ask)
        if ask.keys is None:
            keys = await asyncio.shield(self._lane.run(work.derive, ask.tokens))
        elif len(keys := keys_of(ask.keys)) % len(work.slices):
            what = f"{len(ask.keys)} keys for {len(work.limits)} slices; name each chunk in all slices of the engine"
            raise BadRequest(f"keys: {what}", field="keys")
        job = self._begin(count(keys, len(work.limits)))
        name = f"prewarm-{job.job}"
        self._supervisor.job(self._run(job, ask, work, keys, tenant_number(ask.tenant)), name)
        return job

    def work(self, ask: Weights) -> Work:
        """The engine and the identity that a request names. Raises BadRequest or Refused."""
        group, request = self._group_of(ask.model), ask.request()
        if not group.complete:
            raise Refused("engine_slices: not all slices of this engine are attached; try later")
        request = msgspec.structs.replace(request, adapter=adapter_of(request.adapter, group.adapters))
        root = identity_root(group.layout, request)
        return Work(group.layout, root, group.packed_slices, group.record_limits, group.spans)

    def _begin(self, n_chunks: int) -> Job:
        running = sum(job.state == "running" for job in self._jobs.values())
        if running >= MAX_RUNNING_JOBS:
            raise Refused(f"{running} prewarm jobs are running; try again when some have ended")
        job = self._jobs[self._next] = Job(job=self._next, chunks=n_chunks, begun_s=self._clock.monotonic_s())
        self._next += 1
        if len(self._jobs) > MAX_JOBS:
            del self._jobs[next(at for at, one in self._jobs.items() if one.state == "done")]
        return job

    def job(self, number: int) -> Job:
        """A prewarm and its outcome so far. Raises NotFound."""
        if (job := self._jobs.get(number)) is None:
            raise NotFound(f"job: {number} is not a recent prewarm")
        return job

    def documents(self) -> list[dict[str, Any]]:
        """All listed prewarms, oldest first."""
        return [job.report() for job in self._jobs.values()]

    async def _run(self, job: Job, ask: Prompt, work: Work, keys: bytes, tenant: int) -> None:
        limits, n_slices, reason = work.limits, len(work.limits), InternalError.code
        try:
            n, job.l2_chunks, why, detail, _ = await self._prefetch.fetch(
                keys,
                n_slices,
                identity=work.root,
                tenant=tenant,
                deadline_s=job.begun_s + ask.budget_s,
                budget_bytes=ask.budget_bytes,
                limits=limits,
                spans=work.spans,
                prewarm=job,
            )
            reason = str(detail or why)
            job.l1_chunks = n - job.l2_chunks
        except KvstrataError as error:
            reason = error.code
        finally:
            job.seconds = self._clock.monotonic_s() - job.begun_s
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
