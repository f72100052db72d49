"""The transfer engine that reads peers: opened with the network devices that can be used, and anew with others.

UCX never uses a device whose link was down when its engine was opened.  So the engine is opened anew

    devices       when an address or a port can be used that could not be when it was opened, and
    unreachable   when for a while no read and no connection of any peer has come about, though peers have answered.

A device that is lost is no reason: the engine goes on over the others, and over this one once it is back.

    another engine is opened ─▶ it connects the peers ─▶ it takes its place ─▶ `linger_s` ─▶ the first one is closed

Invariants
1. Where another engine cannot be opened the one in place stays.  There is none only from the start to the first moment
   that one of the devices that UCX_NET_DEVICES names can be used, where UCX opens none without.
2. Both have the same region registered, so what is being read or leased is neither cut nor moved; what the first one
   has under way when it is closed is forced to its end as its contract says, as by any `close`.
3. At most two engines are open.  Between two openings is a pause that doubles up to `max_pause_s`, and for
   `unreachable` a wait that doubles up to `max_unreachable_s`, so peers that are dead for ever cost little.
4. Metadata are those of the engine that is in place.  Peers with older ones are served for `linger_s`; their reads then
   fail cleanly, and they ask for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.errors import TransferError
from kvstrata.p2p.engines.base import Region, TransferEngine
from kvstrata.p2p.engines.links import Devices, LinkWatch, find_devices
from kvstrata.storage.base import MAX_REMARK_CHARS

if TYPE_CHECKING:
    from kvstrata.clock import Clock

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Between two looks at the devices where the kernel tells of no change."""
SETTLE_S = 0.5
"""From a change to the look at it: a link that comes up gets its addresses one after the other."""
MAX_SHOWN = 200


class Limits(NamedTuple):
    """See the module."""

    first_pause_s: float = 5.0
    max_pause_s: float = 300.0
    calm_s: float = 600.0
    """After so long without another opening the pauses begin anew."""
    unreachable_s: float = 10.0
    max_unreachable_s: float = 600.0
    min_failures: int = 3


LIMITS = Limits()


class Cause(enum.StrEnum):
    """Why an engine was opened anew."""

    DEVICES = "devices"
    UNREACHABLE = "unreachable"


class ReopenPolicy:
    """When to open the engine anew. The caller brings times and what it has seen; no I/O."""

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
        """An engine has taken its place that was opened when these devices could be used; `cause` None: the first."""
        self._with = devices
        self._failures = 0
        if cause is not None:
            self._pause(now_s)
        if cause is Cause.UNREACHABLE:
            self._unreachable_s = min(2 * self._unreachable_s, self._limits.max_unreachable_s)

    def not_opened(self, now_s: float) -> None:
        """Another engine could not be opened."""
        self._pause(now_s)

    def reached(self) -> None:
        """A read of a peer came about."""
        self._failures = 0
        self._unreachable_s = self._limits.unreachable_s

    def failed(self, now_s: float) -> None:
        """A peer that answers was not reached by the engine."""
        if not self._failures:
            self._failing_since_s = now_s
        self._failures += 1

    def due(self, devices: frozenset[str], now_s: float) -> tuple[Cause, str] | None:
        """Whether to open another engine now that these devices can be used, and a sentence that says why."""
        if now_s < self._not_before_s:
            return None
        added = ", ".join(sorted(devices - self._with))
        if added:
            return Cause.DEVICES, f"usable since it was opened: {added[:MAX_SHOWN]}"
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
    """See the module. Everything but looking at devices runs on the loop."""

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
        """What peers want to reach the region."""
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
        """The engine to connect and read with from now on. Raises TransferError while there is none."""
        if self._current is None:
            raise TransferError("no network device of this instance can be used", field="engine")
        return self._current

    async def open(self, region: Region, clock: Clock) -> None:
        """Open the first engine, or wait for a device to open it with. Raises TransferError."""
        self._region, self._clock = region, clock
        devices = Devices(frozenset(), frozenset())
        with contextlib.suppress(OSError):
            devices = await asyncio.to_thread(self._look)
        self._policy.opened(devices.usable, self._now_s())
        engine = self._make()
        try:
            self.metadata = await engine.open([region])
        except TransferError as error:
            idle = ", ".join(sorted(devices.idle))[:MAX_SHOWN]
            if error.field != "network" or devices.usable or not idle:
                raise
            self._last = f"waits for a link of {idle}"
            log.warning(
                "%s: no peers until a network device has its link (%s): %s", self._name, idle, error.message
            )
        else:
            self._current = engine

    def start(self, move: Callable[[TransferEngine], Awaitable[Callable[[], None]]]) -> None:
        """Open others from now on.

        `move` connects peers to an engine that is about to take its place, and returns what to call in the moment that
        it has taken it.
        """
        self._move = move
        try:
            self._watch = LinkWatch(self.look_now)
        except OSError as error:
            log.warning(
                "%s: changes of network devices are not told, %.0f s may pass: %s", self._name, LOOK_S, error
            )
        self._keeper = asyncio.create_task(self._keep_up(), name=f"{self._name}-engine")
        self._keeper.add_done_callback(self._ended)

    def look_now(self) -> None:
        """Devices may have changed."""
        self._changed.set()

    def failed(self) -> None:
        """A peer that answers was not reached by the engine in place."""
        self._policy.failed(self._now_s())

    def reached(self) -> None:
        """A read by the engine in place came about."""
        self._policy.reached()

    def numbers(self) -> dict[str, int]:
        """How often an engine was opened anew, by cause, and how often none could be."""
        return dict(self._counts)

    def remarks(self) -> dict[str, str]:
        """Why that was so the last time."""
        return {"reopened": self._last} if self._last else {}

    async def close(self) -> None:
        """Open no others, and close what is open. Idempotent."""
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
        """Say so where a mistake of ours has ended the task: the engine in place stays, and no other one follows."""
        if keeper.cancelled() or (error := keeper.exception()) is None:
            return
        self._last = f"no other engine will be opened: {error!r}"[:MAX_REMARK_CHARS]
        log.error("%s: the transfer engine will not be opened anew any more", self._name, exc_info=error)

    async def _reopen(self, cause: Cause, why: str, usable: frozenset[str]) -> None:
        try:
            self._coming = coming = self._make()
            metadata = await coming.open([self._region])
        except (TransferError, OSError, RuntimeError) as error:  # the latter of native code: no more threads
            self._counts["reopen_failures"] += 1
            self._last = f"failed: {why}; {error}"[:MAX_REMARK_CHARS]
            log.warning("%s: the transfer engine could not be opened anew (%s): %s", self._name, why, error)
            self._policy.not_opened(self._now_s())
            self._coming = None  # what could not be opened has closed itself
            return
        moved = await self._move(coming)
        # From here to the end of `moved` nothing waits: reads and connections see one engine or the other.
        self._leaving, self._current, self._coming = self._current, coming, None
        self.metadata = metadata
        self._counts[f"reopened_{cause}"] += 1
        self._last = f"{cause}: {why}"
        self._policy.opened(usable, self._now_s(), cause)
        moved()
        log.warning("%s: the transfer engine was opened anew: %s", self._name, why)
        if self._leaving is not None:
            await asyncio.sleep(self._linger_s)
            await self._leaving.close()
            self._leaving = None
