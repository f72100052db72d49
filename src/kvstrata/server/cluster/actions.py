"""What each kind of command does in this instance, whichever controller sent it.

Every command uses a bounded share of the instance.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.config.load import shown_environment
from kvstrata.errors import BadRequest
from kvstrata.keys.batch import before, count, part, split
from kvstrata.keys.spans import peek
from kvstrata.p2p.serving import PeerServer
from kvstrata.rpc.command_wire import (
    Argument,
    ClearArgument,
    DrainArgument,
    EvictArgument,
    PinArgument,
    PullArgument,
    RuntimeArgument,
    StatusArgument,
    UnpinArgument,
)
from kvstrata.server.processes import tenant_number

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

PULL_S = 30.0


class LoopLag:
    """How late the event loop has been recently, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note(self, late_s: float) -> None:
        """Note how late a timer fired; greater values of earlier timers fade."""
        self.seconds = max(late_s, self.seconds * 0.99)


class Actions:
    """Carries out the commands of controllers. Belongs to the event loop."""

    def __init__(self, parts: Parts, peer_server: PeerServer) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.own_lane, parts.clock
        self._processes, self._prefetch, self._peer_reads = parts.processes, parts.prefetch, parts.peer_reads
        self._clearing, self._board = parts.clearing, parts.board
        self._peer_server = peer_server
        self.lag = LoopLag()

    async def do(self, argument: Argument) -> dict[str, Any]:
        """Carry out any command but RESYNC. Returns the content of its result. Raises KvstrataError."""
        leases = self._peer_server.leases
        match argument:
            case ClearArgument():
                done = await self._clearing.clear(argument.tier, argument.tenant)
                pending = done.held + done.leased
                return {
                    "count": done.n_chunks,
                    **done.tiers,
                    "pending": pending,
                    "kept": done.kept,
                }
            case EvictArgument():
                return {"count": await asyncio.shield(self._lane.run(self._pool.remove, argument.keys))}
            case PinArgument():
                ttl_s = argument.ttl_ms / 1000
                return {"count": self._peer_server.pin(argument.claim, argument.keys, ttl_s)}
            case UnpinArgument():
                return {"count": leases.unpin(argument.claim)}
            case PullArgument():
                return await self._pull(argument)
            case DrainArgument():
                leases.draining = argument.on
                return {"leases": len(leases)}
            case RuntimeArgument():
                return self._runtime()
            case StatusArgument():
                return self._board.document()
        raise AssertionError(f"{type(argument).__name__} is not an action of an instance")

    async def _pull(self, pull: PullArgument) -> dict[str, Any]:
        """Load the chunks that L1 lacks, as a prewarm does: from the named owner, else from any tier that has them."""
        keys, n_slices, spans = pull.keys, pull.n_slices, pull.spans
        if spans and len(spans) != n_slices:
            raise BadRequest(
                f"spans: found {len(spans)} for {n_slices} slices; send one for each", field="spans"
            )
        pool = self._pool
        names = split(keys)
        reason, loaded = "", 0
        n_there, n_chunks = peek(pool, keys, n_slices, spans), count(keys, n_slices)
        if n_there < n_chunks:
            self._peer_reads.prefer(names, None if pull.owner is None else pull.owner.owner())
            try:
                fetched = await self._prefetch.fetch(
                    part(keys, n_there, n_chunks, n_slices),
                    n_slices,
                    identity=pull.identity,
                    tenant=tenant_number(pull.tenant),
                    parent=before(keys, n_there, n_slices=n_slices),
                    deadline_s=self._clock.monotonic_s() + PULL_S,
                    limits=[self._processes.record_limit_of(pull.identity)] * n_slices,
                    spans=spans,
                )
            finally:
                self._peer_reads.prefer(names, None)
            loaded, reason = fetched.l2_chunks, str(fetched.reason)
        # Counted at the very end: a move drops the chunks at their source only if this number covers them.
        return {"count": peek(pool, keys, n_slices, spans), "loaded": loaded, "reason": reason}

    def _runtime(self) -> dict[str, Any]:
        status = dict(
            line.split(":\t", 1)
            for line in Path("/proc/self/status").read_text().splitlines()
            if ":\t" in line
        )
        return {
            "pid": os.getpid(),
            "threads": int(status.get("Threads", "0")),
            "python_threads": [thread.name for thread in threading.enumerate()],
            "rss_bytes": int(status.get("VmRSS", "0 kB").split()[0]) * 1024,
            "gc_count": list(gc.get_count()),
            "gc_collections": [generation["collections"] for generation in gc.get_stats()],
            "gc_frozen": gc.get_freeze_count(),
            "loop_lag_ms": round(1000 * self.lag.seconds, 3),
            "tasks": len(asyncio.all_tasks()),
            "open_files": len(os.listdir("/proc/self/fd")),
            "environment": shown_environment(os.environ),
        }
