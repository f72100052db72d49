"""Has a prefix that is read from peers again and again copied to one more instance, through a controller.

An engine that lacks a prefix reads it from a peer if that is the cheapest way, and has a copy afterwards.  A second
read of the same prefix within the life of a block shows that its holder cannot serve all who want it.  From then on
each read has it copied to one more instance, so that the next request finds it in that instance's memory.

1. One copy at a time leaves an instance, for at most ORDER_S: copies must not take the link from requests that wait.
2. An order that fails is not repeated; the next read of the prefix makes another one.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import NamedTuple

from kvstrata.gateway.controllers.directory import Kind
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.observability.logging import EventLog
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import Replicate
from kvstrata.types import KEY_BYTES, RequestIdentity

ORDER_S = 10.0
"""Time for which a copy is taken to be under way."""
MAX_ORDERED = 1_024
MAX_PREFIXES = 4_096


class Read(NamedTuple):
    """A prompt whose prefix an engine is about to read from a peer."""

    prompt: Prompt
    kind: Kind
    request: RequestIdentity
    tokens: int
    source: str
    """The instance that has it."""
    lacking: dict[str, float]
    """Other instances of the model's engines that do not have it, with the shortest queue of their engines."""


class Replicas:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        send: Callable[[Replicate], Awaitable[str | None]],
        supervisor: Supervisor,
        hashing: Executor,
        now_s: Callable[[], float],
    ) -> None:
        """`send` gives an order to the controller that leads; returns why none took it."""
        self._send = send
        self._supervisor = supervisor
        self._hashing = hashing
        self._now_s = now_s
        self._read_s: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        """When a prefix was last read from a peer."""
        self._busy_until_s: dict[str, float] = {}
        """By the instance that a copy leaves."""
        self._ordered: dict[tuple[bytes, str], float] = {}
        """When a prefix was last ordered for an instance."""
        self.counts = {"ordered": 0, "failed": 0}
        self._log = EventLog("replicas")

    def read(self, gateway: str, read: Read, life_s: float) -> None:
        """An engine reads a prefix from a peer. `life_s`: measured life of a block."""
        chunks, now_s = read.tokens // read.kind.chunk_tokens, self._now_s()
        if not chunks:
            return
        prefix = read.prompt.keys(read.kind.chunk_tokens)[(chunks - 1) * KEY_BYTES : chunks * KEY_BYTES]
        before_s = self._read_s.pop(prefix, float("-inf"))
        self._read_s[prefix] = now_s
        if len(self._read_s) > MAX_PREFIXES:
            self._read_s.popitem(last=False)
        if now_s - before_s > life_s or self._busy_until_s.get(read.source, 0.0) > now_s:
            return
        lacking = {
            name: queue_s
            for name, queue_s in read.lacking.items()
            if now_s - self._ordered.get((prefix, name), -life_s) >= life_s
        }
        if not lacking:
            return
        to = min(lacking, key=lambda name: (lacking[name], name))
        self._busy_until_s[read.source] = now_s + ORDER_S
        if len(self._ordered) >= MAX_ORDERED:
            self._ordered = {key: at_s for key, at_s in self._ordered.items() if now_s - at_s < life_s}
        self._ordered[prefix, to] = now_s
        self._supervisor.job(self._order(gateway, read, chunks, to), "replicate")

    async def _order(self, gateway: str, read: Read, chunks: int, to: str) -> None:
        loop, kind = asyncio.get_running_loop(), read.kind
        keys = await loop.run_in_executor(self._hashing, kind.keys, read.prompt, read.request, chunks)
        why = await self._send(
            Replicate(
                0, gateway, read.source, to, keys, len(kind.told.slices), kind.told.spans, kind.root(read.request),
                read.request.tenant, kind.told.record_bytes,
            )
        )  # fmt: skip
        self.counts["failed" if why else "ordered"] += 1
        self._log.info(
            "not_replicated" if why else "replicates", source=read.source, to=to, chunks=chunks, why=why
        )
