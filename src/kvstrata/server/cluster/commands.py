"""Carries out the operations that a controller orders this instance to do (rpc/cluster_wire.py).

Nothing here waits for a controller, and each operation uses a bounded share of the instance.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.errors import BadRequest, KvstrataError, NotPermitted, Refused, Unavailable
from kvstrata.keys.batch import count
from kvstrata.keys.spans import peek
from kvstrata.observability.logging import EventLog
from kvstrata.p2p.serving import PeersServed
from kvstrata.process.operations import Claiming
from kvstrata.rpc.cluster_wire import (
    AskClaims,
    AskShared,
    Claim,
    Clear,
    Do,
    Drain,
    Evict,
    Freeze,
    Operation,
    Outcome,
    Pull,
    Release,
)
from kvstrata.server.cluster import shared
from kvstrata.server.processes import tenant_number
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

MAX_DOING = 64
"""Maximum number of operations under way; further ones are refused."""
PULL_S = 30.0
LAG_S = 0.01
"""Length of a sleep whose delay shows how late the event loop is."""


def check(operation: Operation) -> None:
    """Raise BadRequest, which names the field, unless keys and numbers fit the number of slices."""
    if isinstance(operation, Pull) and operation.identity is None:
        raise BadRequest(
            "tokens: chunks that are named by keys cannot be copied; name tokens", field="tokens"
        )
    n_slices = getattr(operation, "n_slices", 1)
    if len(keys := getattr(operation, "keys", b"")) % (n_slices * KEY_BYTES):
        raise BadRequest(
            f"keys: must be whole keys of {KEY_BYTES} bytes, and a multiple of n_slices ({n_slices}) of them, found "
            f"{len(keys)} bytes",
            field="keys",
        )
    for field in ("spans", "record_bytes"):
        if (numbers := getattr(operation, field, ())) and len(numbers) != n_slices:
            raise BadRequest(
                f"{field}: found {len(numbers)} for {n_slices} slices; send one for each", field=field
            )


class Actions:
    """Carries out the operations of all controllers. Belongs to the event loop."""

    def __init__(self, parts: Parts, peers: PeersServed) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.own_lane, parts.clock
        self._facts, self._loop, self._frozen_by = parts.facts, parts.loop, parts.frozen_by
        self._prefetch, self._shared = parts.prefetch, parts.shared
        self._clearing, self._board, self._claims = parts.clearing, parts.board, parts.claims
        self._peers = peers
        self.leader = (0, 0)
        """The greatest (cluster id, token) that any controller has sent, which names the latest leadership."""
        self._doing = 0
        self._thaw: asyncio.TimerHandle | None = None
        self._log = EventLog("cluster")

    async def carry_out(self, asked: Do) -> Outcome:
        """Carry out an operation of the latest leader, within its deadline. Raises KvstrataError.

        Operations that take longer (a clear, a claim) continue after the deadline.
        """
        self.leader = max(self.leader, (asked.cluster_id, asked.token))
        try:
            if (asked.cluster_id, asked.token) != self.leader:
                raise NotPermitted(
                    f"token: {asked.token} of cluster {asked.cluster_id} belongs to "
                    f"{'an earlier leader' if asked.token else 'no leader'} (seen: {self.leader[1]} of cluster "
                    f"{self.leader[0]}); ask the controllers who leads",
                    field="token",
                )
            if self._doing >= MAX_DOING:
                raise Refused(
                    f"{MAX_DOING} operations are under way here; ask again later", retry_after_s=1.0
                )
            check(asked.operation)
            self._doing += 1
            try:
                async with asyncio.timeout(asked.deadline_ms / 1000):
                    body = await self._do(asked.operation)
            except TimeoutError:
                raise Unavailable(
                    f"{asked.operation.kind} has not ended within {asked.deadline_ms} ms"
                ) from None
            finally:
                self._doing -= 1
        except KvstrataError as error:
            self._log.repeated(
                logging.WARNING, f"command {asked.operation.kind}", "command_refused",
                command=asked.operation.kind, message=error.message,
            )  # fmt: skip
            raise
        return Outcome(asked.seq, self._facts.epoch, body)

    def thaw(self) -> None:
        """Accept stores again. Idempotent."""
        if self._thaw is not None:
            self._thaw.cancel()
            self._thaw = None
        self._frozen_by.clear()

    def _freeze(self, seconds: float) -> None:
        self.thaw()
        if seconds:
            self._frozen_by.add("controller")
            self._thaw = self._loop.call_later(seconds, self.thaw)
            self._log.info("frozen", at_most_s=seconds)

    async def _do(self, operation: Operation) -> dict[str, Any]:
        match operation:
            case Freeze():
                self._freeze(operation.freeze_ms / 1000)
                return {}
            case Clear():
                done = await self._clearing.clear(operation.tier, operation.tenant)
                pending = done.held + done.leased
                return {"count": done.n_chunks, **done.tiers, "pending": pending, "kept": done.kept}
            case Evict():
                return {"count": await asyncio.shield(self._lane.run(self._pool.remove, operation.keys))}
            case Claim():
                asked = Claiming(tenant=operation.tenant, ttl_s=operation.ttl_s, bytes=operation.max_bytes)
                root = operation.identity or b""
                claim = await self._claims.claim(
                    operation.keys, operation.n_slices, operation.spans, root, asked
                )
                return claim.document()
            case AskClaims():
                return self._claims.listed()
            case Release():
                return {"count": int(await self._claims.release(operation.claim) is not None)}
            case Pull():
                return await self._pull(operation)
            case Drain():
                self._peers.drain(operation.on)
                return {"sending_bytes": self._peers.sending()[0]}
            case AskShared() if self._shared is not None:
                return await self._lane.run(shared.body_of, *self._shared.take(), operation)
        began_s = self._loop.time()
        await asyncio.sleep(LAG_S)
        return {**self._board.document(), "runtime": _runtime(self._loop.time() - began_s - LAG_S)}

    async def _pull(self, pull: Pull) -> dict[str, Any]:
        """Load the chunks that L1 lacks, as a prewarm does: from the named owner, else from any tier that has them."""
        keys, n_slices, spans = pull.keys, pull.n_slices, pull.spans
        fetched = await self._prefetch.fetch(
            keys,
            n_slices,
            identity=pull.identity or b"",
            tenant=tenant_number(pull.tenant),
            deadline_s=self._clock.monotonic_s() + PULL_S,
            limits=pull.record_bytes or [0] * n_slices,
            spans=spans,
            owner=b"" if pull.owner is None else msgspec.msgpack.encode(pull.owner),
        )
        # Counted last, because a move drops the chunks at their source only if this number covers them.
        n = peek(self._pool, keys, n_slices, spans)
        reason = "" if n == count(keys, n_slices) else str(fetched.reason)
        return {"count": n, "loaded": fetched.l2_chunks, "reason": reason}


def _runtime(lag_s: float) -> dict[str, Any]:
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {
        "pid": os.getpid(),
        "threads": int(status.get("Threads", "0")),
        "python_threads": [thread.name for thread in threading.enumerate()],
        "rss_bytes": int(status.get("VmRSS", "0 kB").split()[0]) * 1024,
        "gc_count": list(gc.get_count()),
        "gc_collections": [generation["collections"] for generation in gc.get_stats()],
        "gc_frozen": gc.get_freeze_count(),
        "loop_lag_ms": round(1000 * max(0.0, lag_s), 3),
        "tasks": len(asyncio.all_tasks()),
        "open_files": len(os.listdir("/proc/self/fd")),
    }
