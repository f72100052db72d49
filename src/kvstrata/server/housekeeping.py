"""The instance's background work: on L1 (verify adopted chunks, offer them to L2, learn, allocate memory), on the files
by which processes find it, and on what became of chunks in L1.

Work on L1 runs on a lane of its own, so that no number of requests can starve it.

Pool.l1_changes() ─▶ drain ─▶ CHANGES_PER_TURN in each turn of the loop ─▶ explainer, log, claims
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata.clock import Clock
from kvstrata.config.private_dir import make_private_dir
from kvstrata.config.private_file import write_private_file
from kvstrata.errors import ConfigError, KvstrataError
from kvstrata.memory.paths import LESSONS, RPC_SOCKET, socket_dir
from kvstrata.native.core import Pool
from kvstrata.observability.explain import Explainer
from kvstrata.observability.logging import EventLog
from kvstrata.server.request_log import RequestLog
from kvstrata.types import PoolChange

if TYPE_CHECKING:
    from kvstrata.memory.segment import Segment
    from kvstrata.server.listener import AttachServer
    from kvstrata.server.parts import Parts
    from kvstrata.server.plan import InstanceFacts

TICK_S = 0.1
"""Interval of heartbeats in the index. To readers, a heartbeat older than 1 s means a dead server."""
ROUND_S = 0.1
"""Pause between two rounds, once all adopted chunks are verified."""
VERIFY_BYTES = 64 << 20
"""Number of adopted bytes that one round verifies."""
SECOND_S = 1.0
"""Interval between attempts to get memory that L1's file system refused, and between lessons of the policy."""
FILES_S = 5.0
_ADVICE = (
    "keep the socket directory where no cleanup job removes it: set --socket-dir below a RuntimeDirectory of systemd, "
    "or use `loginctl enable-linger`; see configs/systemd/kvstrata.tmpfiles.conf"
)
CHANGES_PER_TURN = 512
ADOPTED_KEYS = 2
"""Number of adopted chunks that are offered to L2 at a time."""


class PoolEvents:
    """Reads what became of chunks in L1 and passes it on. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        explainer: Explainer,
        clock: Clock,
        records_lost: Callable[[], None],
    ) -> None:
        """`records_lost` is called when a record was found corrupt, and when changes were overwritten unread."""
        self._pool, self._explainer, self._clock = pool, explainer, clock
        self._records_lost = records_lost
        self._cursor = 0
        self._goes_on = False
        """Whether the next turn of the loop reads on."""
        self._drained = asyncio.Event()
        """Set at the next `drain`, which replaces it by a new one."""
        self._log = EventLog("instance")

    def drain(self) -> None:
        """Read the changes of L1 since the last call. Called at every heartbeat, and sometimes in between."""
        drained, self._drained = self._drained, asyncio.Event()
        drained.set()
        if not self._goes_on:
            self._tell()

    async def next_drain(self) -> None:
        """Wait for the next call of `drain`."""
        await self._drained.wait()

    def _tell(self) -> None:
        """Pass on the oldest changes, and the others in later turns of the loop."""
        found = self._pool.l1_changes(self._cursor, CHANGES_PER_TURN)
        if found is None:
            self._explainer.changes_lost()
            self._records_lost()
            self._cursor, self._goes_on = self._pool.next_change, False
            return
        explainer, now_ms, begun = self._explainer, self._clock.unix_ms(), self._cursor
        self._cursor, changes = found
        for change, tag in changes:
            if change == PoolChange.CAME:
                explainer.inserted(tag)
            elif change == PoolChange.CORRUPT:
                explainer.corrupt(tag, now_ms)
                self._records_lost()
                self._log.repeated(logging.WARNING, "corrupt", "chunk_corrupt", key=tag)
            else:
                explainer.left_l1(tag, change, now_ms)
        self._goes_on = self._cursor - begun == CHANGES_PER_TURN
        if self._goes_on:
            asyncio.get_running_loop().call_soon(self._tell)


async def heartbeat(pool: Pool, events: PoolEvents) -> None:
    """Write the heartbeats that readers of the index check, and read the changes of L1, until cancelled."""
    while True:
        pool.heartbeat()
        events.drain()
        await asyncio.sleep(TICK_S)


class Housekeeping:
    """The instance's own work on L1. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._unverified = 1
        self._offering: asyncio.Task[None] | None = None
        self._log = EventLog("server")
        self._missing_bytes = 0
        self._costs: dict[int, float] = {}
        """Logarithms of the costs last passed to the policy, by the number of the model."""
        self._looked_s = float("-inf")
        folder = parts.settings.observability.record
        self._requests = RequestLog(parts.pool, Path(folder), parts.settings.chunk_size) if folder else None

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(0.0 if self._unverified else ROUND_S)

    async def round(self) -> None:
        """Run one round: do all work that is due."""
        lane = self._parts.own_lane
        if self._unverified:
            self._unverified = await asyncio.shield(lane.run(self._parts.pool.verify_next, VERIFY_BYTES))
        offering = self._offering is not None and not self._offering.done()
        if not offering and (verified := self._parts.pool.take_verified()):
            self._offering = self._parts.supervisor.job(self._put_adopted(verified), "puts of adopted chunks")
        if self._parts.tails is not None:
            self._parts.tails.tick()
        if (now_s := self._parts.clock.monotonic_s()) - self._looked_s >= SECOND_S:
            self._looked_s = now_s
            self._tell_costs()
            await asyncio.shield(lane.run(self._learn))
            await self._parts.claims.expire()
            await self._see_to_memory()

    def _tell_costs(self) -> None:
        """Tell the policy the cost of computing a chunk of each layout, as its engines measure it."""
        parts, found = self._parts, {}
        for group in parts.processes.groups:
            if group.prompt_tokens_s and group.complete and (n_bytes := sum(group.record_limits)):
                seconds = group.layout.chunk_tokens / group.prompt_tokens_s
                found[parts.processes.model_number(group.layout)] = seconds / n_bytes
        for model, byte_s in found.items():
            cost = round(math.log2(byte_s * len(found) / sum(found.values())), 1)
            if model and cost != self._costs.get(model, 0.0):
                self._costs[model] = cost
                parts.pool.set_cost(model, 2.0**cost)

    def _learn(self) -> None:
        """Let the policy learn which chunks are worth keeping, and save its state for the next server.

        Also write the log of requests.  Blocks for milliseconds.
        """
        if self._requests is not None:
            self._requests.write()
        if self._parts.pool.learn():
            with contextlib.suppress(
                OSError
            ):  # the next lesson tries again, and OwnFiles reports a lost folder
                path = self._parts.facts.socket_dir / LESSONS
                write_private_file(path, self._parts.pool.lessons(), overwrite=True)

    async def _see_to_memory(self) -> None:
        """Ask again for memory that L1 did not get, and log when a shortage begins or ends."""
        extents_bytes = self._parts.pool.extents_bytes
        missing_bytes = await asyncio.shield(self._parts.own_lane.run(self._parts.pool.retry_missing))
        if missing_bytes and not self._missing_bytes:
            self._log.warning(
                "l1_memory_missing",
                missing_bytes=missing_bytes,
                extents_bytes=extents_bytes,
                advice="L1 is smaller than configured, since its file system is full: free space there (/dev/shm), "
                "enlarge it, or lower --l1-size-gb",
            )
        elif self._missing_bytes and not missing_bytes:
            self._log.info("l1_memory_complete", extents_bytes=extents_bytes)
        self._missing_bytes = missing_bytes

    async def _put_adopted(self, verified: list[bytes]) -> None:
        """Offer verified chunks to L2, since a killed server may not have put them; L2 skips chunks that it has.

        Leased chunks are offered too, since nobody writes to a verified chunk.  The chunks are offered a few at a time,
        so that they never fill the backlog.
        """
        store, chunks = self._parts.store, 0
        for first in range(0, len(verified), ADOPTED_KEYS):
            await store.idle()
            for key in verified[first : first + ADOPTED_KEYS]:
                if self._parts.tails is not None and self._parts.pool.is_tail(key):
                    self._parts.tails.committed([key])
                    continue
                store.committed([key])
                chunks += 1
        self._log.info("adopted_chunks_offered_to_l2", chunks=chunks)


class OwnFiles:
    """Restores the files by which processes find a running server, if another program removes them.

    logind removes /run/user/UID at the user's last logout, and with RemoveIPC the user's files in /dev/shm;
    systemd-tmpfiles removes old files in /tmp.  Attached engines are not affected, but no further engine could attach,
    and the next server would find no pool.

        the socket       is made again in its folder, or in the default folder if its own cannot be made
        server.pid       is made and locked again; if another server has it, no further file is restored
        L1's files       stay without a name: the keeper keeps the memory for the next server that it starts

    Belongs to the event loop.
    """

    def __init__(self, facts: InstanceFacts, segment: Segment, attach: AttachServer) -> None:
        self._folder, self._port = facts.socket_dir, facts.port
        self._segment = segment
        self._attach = attach
        self._log = EventLog("server")

    async def run(self) -> None:
        """Check the files periodically until cancelled."""
        while True:
            await asyncio.sleep(FILES_S)
            await self.round()

    async def round(self) -> None:
        """Check every file once, and restore the missing ones."""
        try:
            if not self._segment.has_lock:
                await self._take_folder()
            if not self._attach.listens():
                path = self._folder / RPC_SOCKET
                self._attach.listen(path)
                self._say("socket_made_anew", path=path, note="it was removed")
            if self._segment.files_are_gone():
                await asyncio.to_thread(self._segment.hold)
                note = "its files were removed; the keeper keeps it for the next server that it starts"
                self._say("l1_held", note=note)
        except (OSError, KvstrataError) as error:
            self._log.repeated(
                logging.ERROR, "lost", "own_files_lost", reason=error, advice=_ADVICE,
                meaning="no further engine can attach, or the next server begins with an empty L1",
            )  # fmt: skip

    async def _take_folder(self) -> None:
        """Make the folder and lock it. Raises KvstrataError: another server has it, or no folder can be made."""
        folder = self._folder
        try:
            make_private_dir(folder, "socket_dir")
        except ConfigError:
            folder = socket_dir(None, self._port)
            make_private_dir(folder, "socket_dir")
        self._segment.lock_again(folder)
        self._say("socket_dir_made_anew", path=folder, note="the folder, or server.pid in it, was removed")
        self._folder = folder

    def _say(self, event: str, **fields: object) -> None:
        self._log.warning(event, **fields, advice=_ADVICE)
