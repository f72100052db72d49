"""The transfer engine that reads peers, which is replaced by a new one when other network devices become usable.

UCX never uses a device whose link was down when the engine was opened.  So a new engine is opened

    devices       when an address or port is usable that was not usable when the engine was opened, and
    unreachable   when peers answer messages, but for a while no read has succeeded and several reads or connections
                  have failed.

A lost device is no reason for a new engine: the engine uses its other devices, and the lost one again when it is back.

    a new engine is opened ─▶ it connects the peers ─▶ it becomes the current one ─▶ `linger_s` ─▶ the old one is closed

Invariants
1. If no new engine can be opened, the current one stays.  A current engine may be missing only after a start: if no
   device that UCX_NET_DEVICES allows was usable then, and UCX could not open an engine without one.  The first engine
   is opened as soon as a device is usable.
2. Both engines have registered the same regions, so reads and leases under way are not disturbed.  Reads that are still
   under way when the old engine is closed are forced to their end, as by any `close`.
3. At most two engines are open.  The pause between two openings doubles up to `max_pause_s`.  The time without a
   successful read that leads to `unreachable` doubles too, up to `max_unreachable_s`, so that dead peers cost little.
4. `metadata` comes from the current engine.  Peers that have older metadata are served for `linger_s`; after that their
   reads fail cleanly, and they ask for the new metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.errors import TransferError
from kvstrata.p2p.engines.base import Region, TransferEngine
from kvstrata.p2p.engines.links import Devices, LinkWatch, find_devices
from kvstrata.storage.base import MAX_REMARK_CHARS

if TYPE_CHECKING:
    from kvstrata.clock import Clock

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Time between two looks at the devices while the kernel reports no change."""
SETTLE_S = 0.5
"""Time from a change to the look at the devices; a link that comes up gets its addresses one after the other."""
MAX_SHOWN = 200


class Limits(NamedTuple):
    """The bounds of ReopenPolicy; see the module."""

    first_pause_s: float = 5.0
    max_pause_s: float = 300.0
    calm_s: float = 600.0
    """After this long without an opening, the next pause is `first_pause_s` again."""
    unreachable_s: float = 10.0
    max_unreachable_s: float = 600.0
    min_failures: int = 3


LIMITS = Limits()


class Cause(enum.StrEnum):
    """Why a new engine was opened."""

    DEVICES = "devices"
    UNREACHABLE = "unreachable"


class ReopenPolicy:
    """Decides when to open a new engine. The caller passes times and observations; no I/O."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._pause_s = limits.first_pause_s
        self._unreachable_s = limits.unreachable_s
        self._begun_s: float | None = None
        self._not_before_s = float("-inf")
        self._with: frozenset[str] = frozenset()
        self._failures = 0
        self._failing_since_s = 0.0

    def opened(self, devices: frozenset[str], now_s: float, cause: Cause | None = None) -> None:
        """Note the usable devices with which the current engine is opened; `cause` is None for the first engine."""
        self._with = devices
        self._failures = 0
        if cause is not None:
            self._pause(now_s)
        if cause is Cause.UNREACHABLE:
            self._unreachable_s = min(2 * self._unreachable_s, self._limits.max_unreachable_s)

    def not_opened(self, now_s: float) -> None:
        """A new engine could not be opened."""
        self._pause(now_s)

    def reached(self) -> None:
        """A read from a peer succeeded."""
        self._failures = 0
        self._unreachable_s = self._limits.unreachable_s

    def failed(self, now_s: float) -> None:
        """The engine could not reach a peer that answers messages."""
        if not self._failures:
            self._failing_since_s = now_s
        self._failures += 1

    def due(self, devices: frozenset[str], now_s: float) -> tuple[Cause, str] | None:
        """The cause for opening a new engine now, and a sentence about it; None: open none. `devices` are usable."""
        if now_s < self._not_before_s:
            return None
        added = ", ".join(sorted(devices - self._with))
        if added:
            return Cause.DEVICES, f"devices that became usable: {added[:MAX_SHOWN]}"
        failing_s = now_s - self._failing_since_s
        if self._failures >= self._limits.min_failures and failing_s >= self._unreachable_s:
            return Cause.UNREACHABLE, f"no peer was reached for {failing_s:.0f} s in {self._failures} tries"
        return None

    def _pause(self, now_s: float) -> None:
        if self._begun_s is not None and now_s - self._begun_s >= self._limits.calm_s:
            self._pause_s = self._limits.first_pause_s
        self._begun_s = now_s
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._limits.max_pause_s)


class PeerEngine:
    """See the module. Everything except the look at devices runs on the loop."""

    def __init__(
        self,
        name: str,
        make: Callable[[], TransferEngine],
        *,
        linger_s: float,
        policy: ReopenPolicy | None = None,
        look: Callable[[], Devices] = find_devices,
    ) -> None:
        """`make` may raise TransferError; `look` runs in a thread and may raise OSError."""
        self.metadata = b""
        """The current engine's metadata, by which peers reach the regions; empty while no engine is current."""
        self._name = name
        self._make = make
        self._linger_s = linger_s
        self._policy = policy or ReopenPolicy()
        self._look = look
        self._current: TransferEngine | None = None
        self._coming: TransferEngine | None = None
        self._leaving: TransferEngine | None = None
        self._watch: LinkWatch | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._counts = {f"reopened_{cause}": 0 for cause in Cause} | {"reopen_failures": 0}
        self._last = ""

    @property
    def current(self) -> TransferEngine:
        """The transfer engine for connections and reads from now on. Raises TransferError while none is open."""
        if self._current is None:
            raise TransferError("no network device of this instance can be used", field="engine")
        return self._current

    async def open(self, regions: Sequence[Region], clock: Clock) -> None:
        """Open the first engine. Raises TransferError.

        If it cannot be opened only because no network device is usable, this is logged instead.  The task that `start`
        begins then opens it as soon as a device is usable.
        """
        self._regions, self._clock = tuple(regions), clock
        devices = Devices(frozenset(), frozenset())
        with contextlib.suppress(OSError):
            devices = await asyncio.to_thread(self._look)
        self._policy.opened(devices.usable, self._now_s())
        engine = self._make()
        try:
            self.metadata = await engine.open(regions)
        except TransferError as error:
            idle = ", ".join(sorted(devices.idle))[:MAX_SHOWN]
            if error.field != "network" or devices.usable or not idle:
                raise
            self._last = f"waits until one of these devices has a link: {idle}"
            log.warning(
                "%s: no peers are read until one of the network devices (%s) has a link: %s",
                self._name,
                idle,
                error.message,
            )
        else:
            self._current = engine

    def start(self, move: Callable[[TransferEngine], Awaitable[Callable[[], None]]]) -> None:
        """Open new engines from now on when they are due.

        `move` connects a new engine to the peers, and returns a function to call when that engine is the current one.
        """
        self._move = move
        try:
            self._watch = LinkWatch(self.look_now)
        except OSError as error:
            log.warning(
                "%s: the kernel does not report changes of network devices; they are noticed within %.0f s: %s",
                self._name,
                LOOK_S,
                error,
            )
        self._keeper = asyncio.create_task(self._keep_up(), name=f"{self._name}-engine")
        self._keeper.add_done_callback(self._ended)

    def look_now(self) -> None:
        """Look at the devices soon, since they may have changed."""
        self._changed.set()

    def failed(self) -> None:
        """The current engine could not reach a peer that answers messages."""
        self._policy.failed(self._now_s())

    def reached(self) -> None:
        """A read by the current engine succeeded."""
        self._policy.reached()

    def numbers(self) -> dict[str, int]:
        """How often a new engine was opened, by cause, and how often none could be opened."""
        return dict(self._counts)

    def remarks(self) -> dict[str, str]:
        """Why a new engine was opened last, or why it could not be opened."""
        return {"reopened": self._last} if self._last else {}

    async def close(self) -> None:
        """Open no more engines, and close those that are open. Idempotent."""
        if self._watch is not None:
            self._watch.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        for engine in (self._coming, self._leaving, self._current):
            if engine is not None:
                await engine.close()

    def _now_s(self) -> float:
        return self._clock.monotonic_s()

    async def _keep_up(self) -> None:
        usable: frozenset[str] = frozenset()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
                await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            with contextlib.suppress(OSError):
                usable = (await asyncio.to_thread(self._look)).usable
            due = self._policy.due(usable, self._now_s())
            if due is not None:
                await self._reopen(*due, usable)

    def _ended(self, keeper: asyncio.Task[None]) -> None:
        """Log a failure of the task, which is a bug: the current engine stays, and no new one will be opened."""
        if keeper.cancelled() or (error := keeper.exception()) is None:
            return
        self._last = f"no new engine will be opened: {error!r}"[:MAX_REMARK_CHARS]
        log.error("%s: the task that opens new transfer engines has failed", self._name, exc_info=error)

    async def _reopen(self, cause: Cause, why: str, usable: frozenset[str]) -> None:
        try:
            self._coming = coming = self._make()
            metadata = await coming.open(self._regions)
        except (TransferError, OSError, RuntimeError) as error:  # RuntimeError: no thread for native code
            self._counts["reopen_failures"] += 1
            self._last = f"failed: {why}; {error}"[:MAX_REMARK_CHARS]
            log.warning("%s: no new transfer engine could be opened (%s): %s", self._name, why, error)
            self._policy.not_opened(self._now_s())
            self._coming = None  # an engine that could not be opened has closed itself
            return
        moved = await self._move(coming)
        # No await until `moved` has returned, so that reads and connections see either the old engine or the new one.
        self._leaving, self._current, self._coming = self._current, coming, None
        self.metadata = metadata
        self._counts[f"reopened_{cause}"] += 1
        self._last = f"{cause}: {why}"
        self._policy.opened(usable, self._now_s(), cause)
        moved()
        log.warning("%s: a new transfer engine was opened: %s", self._name, why)
        if self._leaving is not None:
            await asyncio.sleep(self._linger_s)
            await self._leaving.close()
            self._leaving = None
