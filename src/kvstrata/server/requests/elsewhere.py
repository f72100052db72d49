"""Loads for a lookup the chunks that other instances have in their L2 tiers or compute now (p2p/awaiting.py).

    missing ─▶ controller: who has them in L2 ─▶ that instance loads them into its L1 ─▶ they are read into ours
            ─▶ controller: who computes them  ─▶ each is read once it is stored, while the next one is awaited

Chunks in the L1 of another instance are loaded by the tier of peers, as by any other tier.

Requests never wait for each other in a cycle.  Within an instance a lookup waits for older promises only.  If its own
engine has promised the chunks, it waits only for instances with a smaller id; if it has not, no lookup waits for it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvstrata.keys.batch import part
from kvstrata.p2p.awaiting import AwaitedPeers, End
from kvstrata.rpc.cluster_wire import MAX_AWAITED, MAX_AWAITED_SLICES, MAX_TAGS, Await, tags_of
from kvstrata.server.requests.promises import LOOKED_BACK, STAGED_BYTES, Waited
from kvstrata.tiers.choice import SAVES_S
from kvstrata.tiers.fetch import FetchOutcome

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts
    from kvstrata.server.requests.lookup import Asked

T = TypeVar("T")

AGAIN_S = 60.0
"""Time after which peers' L2 tiers that were slower than computing are tried again."""
LEAST_WAIT_MS = 100
"""Minimum waiting time of a lookup that asks for promises of other instances; with less, computing is as fast."""
PEER_LOADS = 2
"""Maximum number of concurrent loads of one lookup, of chunks that an engine of another instance computes."""


class Elsewhere:
    """Loads chunks of lookups from other instances. Belongs to the event loop."""

    def __init__(self, parts: Parts, peers: AwaitedPeers) -> None:
        self._peers, self._clock = peers, parts.clock
        self._promises, self._prefetch = parts.grants.promises, parts.prefetch
        self._auto = parts.settings.l2.load == "auto"
        self._instance_id, self._reads = parts.facts.instance_id, parts.peer_reads
        self._tiers = parts.tiers

    def ask_for_disks(self, asked: Asked, n_chunks: int) -> asyncio.Task[tuple[str, int]] | None:
        """Ask which instance has the chunks after `n_chunks` in its L2 tiers, while our own tiers are asked."""
        keys = asked.keys
        if asked.request.source or keys.spans or keys.n_slices > MAX_AWAITED_SLICES:
            return None
        left_s = asked.deadline_s - self._clock.monotonic_s()
        missing = keys.part(n_chunks, min(asked.n_chunks, n_chunks + MAX_TAGS // keys.n_slices))
        return asyncio.create_task(self._peers.on_disks(missing, keys.n_slices, left_s))

    async def from_disks(
        self,
        asked: Asked,
        before: int,
        n_chunks: int,
        found: asyncio.Task[tuple[str, int]],
    ) -> AsyncGenerator[Waited]:
        """Load the chunks after `n_chunks` that are in the L2 tiers of another instance, unless computing is faster.

        `found` was asked for those after `before`.  Yields as `from_instance` does.
        """
        instance, n_there = await found
        end = min(before + n_there, asked.n_chunks)
        limits, times, begun_s = asked.limits, self._peers.disk_times, self._clock.monotonic_s()
        if end <= n_chunks or begun_s >= asked.deadline_s or not all(limits):
            return
        n_bytes = (end - n_chunks) * sum(limits)
        compute_s = asked.compute_s(n_chunks) if self._auto else None
        expected_s = times.expected_s(n_bytes)
        lately = begun_s < times.measured_s + AGAIN_S
        if lately and compute_s and expected_s and expected_s > compute_s(0, end - n_chunks) + SAVES_S:
            return
        n_loads = 0
        ends = self.from_instance(instance, asked, n_chunks, asked.deadline_s, limits=limits)
        async with contextlib.aclosing(ends):
            async for one in ends:
                n_loads += one == "ready"
                yield one
        if n_loads:
            times.measured(n_bytes, self._clock.monotonic_s() - begun_s, self._clock.monotonic_s())

    async def promiser(self, asked: Asked, n_chunks: int) -> str:
        """Id of an instance whose engine computes the chunk after `n_chunks`, if waiting for it pays; else ""."""
        keys, request, missing = asked.keys, asked.request, asked.n_chunks - n_chunks
        if request.wait_ms < LEAST_WAIT_MS or not missing or keys.spans or keys.n_slices > MAX_AWAITED_SLICES:
            return ""
        tier, compute_s = self._tiers.get(self._reads.name), asked.compute_s(n_chunks)
        if tier is None or not self._promises.may_wait(asked.process):
            return ""
        read_s = tier.load_times.expected_s(missing * sum(asked.limits))
        if self._auto and read_s and compute_s and read_s > compute_s(0, missing):
            return ""
        firsts = keys.of([0], max(0, n_chunks - LOOKED_BACK + 1), n_chunks + 1)
        tags = memoryview(tags_of(firsts)).cast("Q")[::-1].tobytes()  # the nearest first
        instance = await self._peers.promiser(tags, request.wait_ms / 1000)
        if instance > self._instance_id and self._promises.promises_itself(
            asked.process, keys.root, keys.chain, n_chunks
        ):
            return ""
        return instance

    async def from_instance(
        self,
        source: str,
        asked: Asked,
        n_chunks: int,
        ends_s: float,
        *,
        limits: Sequence[int] = (),
    ) -> AsyncGenerator[Waited]:
        """Load the chunks after `n_chunks` that an instance has or gets; with `limits`, also those in its L2 tiers.

        Only an instance that the request names may take longer than the lookup waits.

        Yields `ready` after each load, and last how the wait has ended.  While chunks are loaded, the instance is asked
        for the next ones, and at most PEER_LOADS loads are under way.  The number of chunks that it loads from its L2
        tiers for one request is known, so the next request is sent before that one is answered.
        """
        keys, identity = asked.keys, asked.identity
        if keys.spans or keys.n_slices > MAX_AWAITED_SLICES or not self._promises.may_wait(asked.process):
            return

        def ask(n: int, *, expects: bool) -> asyncio.Task[tuple[int, End, bytes]]:
            first = max(0, n - LOOKED_BACK)
            chain = part(keys.chain, first, first + MAX_AWAITED)
            left_s = ends_s - self._clock.monotonic_s()
            within_ms = 0 if n > n_first or asked.request.source or limits else max(1, round(1000 * left_s))
            question = Await(
                0, keys.root, chain, keys.slices, n - first, 0, expects, within_ms, [*limits],
                identity.request.tenant,
            )  # fmt: skip
            return asyncio.create_task(self._peers.wait(source, question, left_s))

        def load(n: int, end: int, owner: bytes) -> asyncio.Task[FetchOutcome]:
            fetch = self._prefetch.fetch(
                keys.part(n, end),
                keys.n_slices,
                identity=identity.root,
                tenant=identity.tenant,
                parent=keys.part(n - 1, n) if n else b"",
                deadline_s=ends_s,
                limits=asked.limits,
                owner=owner,
            )
            return asyncio.create_task(fetch)

        end: End = "ready"
        n_first = n_chunks
        loads: collections.deque[asyncio.Task[FetchOutcome]] = collections.deque()
        most = max(1, STAGED_BYTES // sum(limits)) if limits else MAX_AWAITED  # chunks of one answer
        questions = collections.deque([ask(n_chunks, expects=asked.request.expects and not limits)])
        try:
            with self._promises.counted(asked.process):
                while end == "ready" and n_chunks < asked.n_chunks:
                    n_told = n_chunks + most
                    if limits and len(questions) == 1 and n_told < asked.n_chunks:
                        questions.append(ask(n_told, expects=False))
                    n, end, owner = await questions.popleft()
                    n = min(n + max(0, n_chunks - LOOKED_BACK), n_told)
                    if end == "ready":
                        loads.append(load(n_chunks, n, owner))
                        n_chunks = n
                        if n < n_told:
                            _end(questions)
                        if n < asked.n_chunks and not questions:
                            questions.append(ask(n, expects=False))
                    is_last = end != "ready" or n_chunks == asked.n_chunks
                    while loads and (is_last or len(loads) == PEER_LOADS):
                        asked.choices.extend((await loads[0]).choices)
                        loads.popleft()
                        yield "ready"
        finally:
            _end(questions)
            _end(loads)
        if end == "none":
            if (
                n_chunks == n_first or not asked.request.source
            ):  # no engine computes it, or the common chunks have arrived
                return
            end = "broken"  # some of its chunks have arrived, and its promise has ended
        self._promises.waits[end] += not limits
        if end != "ready":
            yield end


def _end(tasks: collections.deque[asyncio.Task[T]]) -> None:
    while tasks:
        tasks.pop().cancel()
