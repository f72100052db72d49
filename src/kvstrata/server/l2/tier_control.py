"""Opens the tiers of the settings; adds, drains, resumes and removes tiers while the server runs.

    open     those of the settings, at the start ─▶ in the set, perhaps unreachable ─▶ opened again and again ─▶ active
    add      admitted, checked and made on a thread ─▶ opened within OPEN_S ─▶ in the set
    drain    gets nothing new ─▶ waiting chunks are put, operations under way end ─▶ drained
    resume   draining or drained ─▶ active, as if it had just been added
    remove   drained, at most as long as asked ─▶ the rest is skipped or looked for elsewhere ─▶ closed, out of the set

Rules:

1. An `add` that fails changes nothing: not the set, not a policy, not a counter.  After OPEN_S the caller gets an
   error; the adapter is closed as soon as its opening ends, and until then it counts among MAX_L2_ADAPTERS.
2. Every wait is bounded.  A tier whose operations do not end is closed all the same (storage/wrap/deadline.py bounds
   that too).  While such operations run, it stays listed as `removing`, with the bytes that they keep stuck.
3. Every change runs in a task owned here: it goes on when the caller disconnects, and ends with the server.
4. A tier of the settings whose storage cannot be reached at the start stops no start.  It is in the set, UNREACHABLE
   with the reason, until a further try succeeds.
5. Records stay on the medium: removing a tier deletes nothing, and adding it again finds them.

tiers.py says what the states mean, tier_rows.py what an admin sees.  Nothing here decides about chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from kvstrata.config.secrets import scrubbed
from kvstrata.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    KvstrataError,
    Refused,
    StorageError,
    Unavailable,
)
from kvstrata.native.pool import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.process.lane import PoolLane
from kvstrata.process.threads import on_a_thread
from kvstrata.server.l2.backfill import Backfills
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tier_rows import TierRows
from kvstrata.server.l2.tiers import Tier, TierEvent, TierSet, TierState
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.entry import TierConfig, configure_tier
from kvstrata.storage.stack import Stack
from kvstrata.types import MAX_L2_ADAPTERS

T = TypeVar("T")

OPEN_S = 30.0
"""Time in which an adapter must be made and opened."""
FIELD = "adapter"
"""The name of an added adapter's JSON in error messages."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pauses between tries to open a tier that cannot be reached; each is twice the pause before."""
ANSWER_S = 1.0
"""A remove answers at most this long after its `wait_s`."""


class _Opened(NamedTuple):
    """An adapter that was opened, and its entry as it was admitted."""

    stack: Stack
    entry: dict[str, Any]


class TierControl:
    """Changes the set of tiers. All methods belong to the event loop."""

    def __init__(
        self,
        tiers: TierSet,
        pool: Pool,
        lane: PoolLane,
        store: StoreController,
        prefetch: PrefetchController,
        *,
        admit: Callable[[Mapping[str, Any]], dict[str, Any]],
        build: Callable[[TierConfig], Stack],
        context: Callable[[str], AdapterContext],
        forget: Callable[[str], None],
        open_s: float = OPEN_S,
    ) -> None:
        """`admit` returns an entry as an admin may add it, or raises (storage/admission.py).  `build` makes the stack
        of a tier, `context(name)` is what the server lends to that tier, `forget(name)` is called once a removed tier
        has left the set."""
        self._tiers = tiers
        self._pool = pool
        self._store = store
        self._prefetch = prefetch
        self._admit = admit
        self._build = build
        self._context = context
        self._forget = forget
        self._open_s = open_s
        self._next_number = 0
        self._opening = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaching: dict[str, asyncio.Task[None]] = {}
        """Tasks that open UNREACHABLE tiers."""
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._puts_skipped: dict[str, int] = {}
        self._backfills = Backfills(pool, lane, store)
        self.rows = TierRows(tiers, store, prefetch, self._backfills)
        """The tiers as an admin sees them."""
        self._closed = False
        self._log = EventLog("adapters")
        self._changed()

    # -- the start and the end -----------------------------------------------------------------------------

    async def open(self, config: TierConfig, *, must: bool = False) -> None:
        """Open a tier of the settings and add it at the end.

        Raises ConfigError.  A tier that cannot be reached, or is not open after `open_s`, is UNREACHABLE, and is
        opened in the background; with `must` this raises StorageError instead.
        """
        tier = Tier(self._build(config), config.entry, is_open=False)
        opening = self._own(self._open_stack(tier.configured), f"open-{config.name}", answers=True)
        await asyncio.wait({opening}, timeout=self._open_s)
        if opening.done() and (must or not isinstance(opening.exception(), StorageError)):
            opening.result()
        self._next_number = max(self._next_number, config.number + 1)
        self.rows.of_settings(config.name, config.entry)
        self._tiers.insert(tier, len(self._tiers.placed))
        if opening.done() and opening.exception() is None:
            tier.opened()
            self._join(tier)
        else:
            reaching = self._own(self._reach(tier, config, opening), f"reach-{config.name}")
            self._reaching[config.name] = reaching

    async def _reach(self, tier: Tier, config: TierConfig, opening: asyncio.Task[None]) -> None:
        """Open a tier, after pauses that grow."""
        pause_s = FIRST_PAUSE_S
        while True:
            if not opening.done():
                tier.reason = f"{tier.name}: it does not answer"
            else:
                error = opening.exception()
                tier.reason = error.message if isinstance(error, KvstrataError) else repr(error)
            self._log.repeated(
                logging.WARNING, f"unreachable {tier.name}", "tier_unreachable", adapter=tier.name, reason=tier.reason,
                meaning="lookups count its chunks as absent, and it gets no new ones; it is tried again by itself",
            )  # fmt: skip
            if opening.done():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                opening = self._own(self._open_anew(tier, config), f"open-{tier.name}", answers=True)
            try:
                await asyncio.wait({opening})
            except asyncio.CancelledError:
                opening.cancel()
                raise
            if opening.exception() is None:
                break
        del self._reaching[tier.name]
        tier.opened()
        tier.reason = ""
        self._join(tier)
        self._log.info("tier_reached", adapter=tier.name)

    async def _open_anew(self, tier: Tier, config: TierConfig) -> None:
        tier.configured = await on_a_thread(lambda: self._build(config), "make-adapter")
        await self._open_stack(tier.configured)

    async def _open_stack(self, stack: Stack) -> None:
        """Raises ConfigError; StorageError for every other failure. Nothing is left open then."""
        try:
            await stack.open(self._context(stack.name))
        except (ConfigError, StorageError):
            raise
        except asyncio.CancelledError:
            await stack.close()
            raise
        except Exception as error:  # the plugin boundary
            message = f"{stack.name} could not be opened: {type(error).__name__}: {scrubbed(error)}"
            raise StorageError(message, field=stack.name) from error

    async def close(self) -> None:
        """Cancel the changes under way, then close all tiers at the same time. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.stop(0.0)
        await self._prefetch.stop(0.0)
        tiers = list(self._tiers)
        for tier in tiers:
            self._tiers.discard(tier)
        await asyncio.gather(
            *(tier.configured.close() for tier in tiers if tier.state is not TierState.UNREACHABLE)
        )

    # -- the admin's operations ----------------------------------------------------------------------------

    async def add(
        self, entry: Mapping[str, Any] | str, *, position: int | None, backfill: bool
    ) -> dict[str, Any]:
        """Open an adapter by the JSON of `--l2-adapter` and add it as a tier at `position`, by default at the end.

        If `entry` is a string, it names an adapter of the settings.  Entries of the settings are trusted; any other
        entry must be admitted.

        Returns the tier's row.  The tier gets what its policy chooses from now on: of the chunks already in L1,
        `on_evict` puts those about to leave, `second_touch` those used twice, `through` none.  With `backfill` all of
        them are offered to it once.

        Raises ConfigError, StorageError, BadRequest, Refused, DeadlineExceeded, NotPermitted or Unavailable; nothing
        has changed then.
        """
        self._check_open()
        placed = len(self._tiers.placed)
        if position is not None and not 0 <= position <= placed:
            raise BadRequest(
                f"position: must be from 0 to {placed}, the end, found {position}", field="position"
            )
        if len(self._tiers) + self._opening >= MAX_L2_ADAPTERS:
            raise Refused(
                f"a server has at most {MAX_L2_ADAPTERS} L2 adapters, including those being opened or removed; "
                "remove one first",
                field=FIELD,
            )
        return await asyncio.shield(
            self._own(self._add(*self._wanted(entry), position, backfill), "add-adapter", answers=True)
        )

    async def drain(self, name: str, *, loads: bool, wait_s: float) -> dict[str, Any] | None:
        """Give a tier no new chunks and, without `loads`, ask it nothing more. None: no tier has this name.

        Chunks that wait for it are put, and operations under way end.  Returns its row then, or after `wait_s`;
        draining goes on after that.
        """
        self._check_open()
        tier = self._tiers.get(name)
        if tier is None:
            return None
        if tier.state is TierState.UNREACHABLE:
            raise BadRequest(
                f"name: {name} cannot be reached, so nothing waits for it; remove it", field="name"
            )
        if tier.state is not TierState.REMOVING:
            self._begin_drain(tier, loads)
            await asyncio.wait({self._drains[name]}, timeout=wait_s)
        return self.rows.row(tier)

    async def resume(self, name: str, *, backfill: bool) -> dict[str, Any] | None:
        """Use a draining or drained tier as before. Returns its row; None: no tier has this name.

        Chunks that were skipped meanwhile are not put, unless `backfill` offers it all of L1 once.  Raises BadRequest
        for a tier that is being removed.
        """
        self._check_open()
        tier = self._tiers.get(name)
        if tier is None:
            return None
        if tier.state is TierState.REMOVING:
            raise BadRequest(f"name: {name} is being removed; add it again once it has left", field="name")
        if (draining := self._drains.pop(name, None)) is not None:
            draining.cancel()
            tier.step(TierEvent.RESUME)
            tier.takes_loads = True
            self._changed()
            self._log.info("l2_adapter_resumed", adapter=name)
        if backfill:
            self._begin_backfill(tier)
        return self.rows.row(tier)

    async def remove(self, name: str, *, wait_s: float) -> dict[str, Any] | None:
        """Drain a tier for at most `wait_s`, close it and take it out of the set. None: no tier has this name.

        Returns what has happened, at most `ANSWER_S` after `wait_s`.  A tier whose operations have not ended by then
        stays `removing` and leaves the set once they have.
        """
        self._check_open()
        tier = self._tiers.get(name)
        if tier is None:
            return None
        if name not in self._removals:
            self._puts_skipped[name] = 0
            self._removals[name] = self._own(self._remove(tier, wait_s), f"remove-{name}")
        removal = self._removals[name]
        await asyncio.wait({removal}, timeout=wait_s + ANSWER_S)
        skipped = self._puts_skipped.get(name, 0)
        if removal.done():
            self._puts_skipped.pop(name, None)
        return {
            "name": name,
            "state": "removed" if self._tiers.get(name) is None else str(tier.state),
            "puts_skipped": skipped,
            "stuck_bytes": tier.configured.guard.stuck_bytes,
        }

    def names(self) -> list[str]:
        """Names of all tiers."""
        return [tier.name for tier in self._tiers]

    # -- add -----------------------------------------------------------------------------------------------

    def _wanted(self, given: Mapping[str, Any] | str) -> tuple[dict[str, Any], bool]:
        """The entry, and whether it stands in the settings. Raises BadRequest for a name that does not."""
        if not isinstance(given, str):
            return dict(given), self.rows.is_in_settings(given)
        entries = self.rows.settings
        if given not in entries:
            raise BadRequest(
                f"{FIELD}: the settings have no adapter {given!r:.80} (they have: {', '.join(entries) or 'none'}); "
                "give the name of one of them, or the JSON of another adapter",
                field=FIELD,
            )
        return dict(entries[given]), True

    async def _add(
        self, wanted: dict[str, Any], trusted: bool, position: int | None, backfill: bool
    ) -> dict[str, Any]:
        number = self._next_number
        self._next_number += 1
        self._opening += 1
        opening = self._own(self._open(wanted, trusted, number), "open-adapter", answers=True)
        try:
            done, _ = await asyncio.wait({opening}, timeout=self._open_s)
        except asyncio.CancelledError:
            opening.add_done_callback(self._opened_late)
            raise
        if not done:
            opening.add_done_callback(self._opened_late)
            raise DeadlineExceeded(
                f"{FIELD}: was not open after {self._open_s:.0f} s; it will be closed as soon as it has opened",
                field=FIELD,
            )
        self._opening -= 1
        configured, entry = opening.result()
        if self._closed:
            await configured.close()
            self._check_open()
        placed = len(self._tiers.placed)
        tier = Tier(configured, entry)
        self._tiers.insert(tier, placed if position is None else min(position, placed))
        self._join(tier)
        self._log.info("l2_adapter_added", adapter=tier.name, policy=str(tier.policy))
        if backfill:
            self._begin_backfill(tier)
        return self.rows.row(tier)

    async def _open(self, wanted: dict[str, Any], trusted: bool, number: int) -> _Opened:
        """Make and open an adapter. Raises KvstrataError; nothing is left open then."""

        def make() -> _Opened:
            entry = wanted if trusted else self._admit(wanted)
            return _Opened(self._build(configure_tier(entry, number, path=FIELD)), entry)

        # On a thread, because a directory may be slow to look at, and importing a plugin may take long.
        opened = await on_a_thread(make, "make-adapter")
        await self._open_stack(opened.stack)
        return opened

    def _opened_late(self, opening: asyncio.Task[_Opened]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening -= 1
            return
        self._own(self._close_late(opening.result().stack), "close-adapter")

    async def _close_late(self, configured: Stack) -> None:
        self._log.warning("l2_adapter_opened_too_late", adapter=configured.name)
        await configured.close()
        await configured.guard.ended()
        self._opening -= 1

    def _join(self, tier: Tier) -> None:
        """Use an open tier of the set from now on."""
        if tier.configured.host is None and tier.adapter.capabilities.quiesce == "never":
            advice = 'its calls may never end; with "isolation": "process" they end with their process'
            self._log.warning("l2_adapter_may_hang", adapter=tier.name, advice=advice)
        self._store.join(tier)
        self._prefetch.join(tier)
        self._changed()

    def _begin_backfill(self, tier: Tier) -> None:
        self._backfills.end(tier.name)
        run = self._own(self._backfills.run(tier.name), f"backfill-{tier.name}")
        self._backfills.begun(tier.name, run)

    # -- drain and remove ----------------------------------------------------------------------------------

    def _begin_drain(self, tier: Tier, loads: bool) -> None:
        running = self._drains.get(tier.name)
        if running is not None:
            if loads or not tier.takes_loads:
                return
            running.cancel()
        self._backfills.end(tier.name)
        tier.step(TierEvent.DRAIN)
        self._store.draining(tier.name)
        if not loads:
            self._shut(tier)
        self._drains[tier.name] = self._own(self._until_drained(tier), f"drain-{tier.name}")
        self._log.info("l2_adapter_draining", adapter=tier.name, loads=tier.takes_loads)

    async def _until_drained(self, tier: Tier) -> None:
        await self._idle_of(tier)
        tier.step(TierEvent.QUIET)
        self._log.info("l2_adapter_drained", adapter=tier.name)

    async def _remove(self, tier: Tier, wait_s: float) -> None:
        name, guard = tier.name, tier.configured.guard
        if (draining := self._drains.pop(name, None)) is not None:
            draining.cancel()
        self._backfills.end(tier.name)
        self._log.info("l2_adapter_removing", adapter=name)
        if tier.state is TierState.UNREACHABLE:
            self._reaching.pop(name).cancel()
            tier.step(TierEvent.REMOVE)
        else:
            tier.step(TierEvent.REMOVE)
            self._store.draining(name)
            self._shut(tier)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle_of(tier), wait_s)
            self._puts_skipped[name] = await self._store.leave(name)
            await self._prefetch.leave(name)
            await tier.configured.close()
            if guard.running:
                self._log.warning("l2_adapter_does_not_let_go", adapter=name, stuck_bytes=guard.stuck_bytes)
                await guard.ended()
        self._tiers.discard(tier)
        del self._removals[name]
        self._forget(name)
        self._log.info("l2_adapter_removed", adapter=name, puts_skipped=self._puts_skipped[name])

    def _shut(self, tier: Tier) -> None:
        tier.takes_loads = False
        self._prefetch.shut(tier.name)
        self._changed()

    async def _idle_of(self, tier: Tier) -> None:
        await self._store.idle_of(tier.name)
        if not tier.takes_loads:
            await self._prefetch.idle_of(tier.name)

    # -- common --------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._pool.set_has_l2(self._tiers.hit_beyond_l1)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this server is stopping")

    def _own(self, work: Coroutine[Any, Any, T], name: str, *, answers: bool = False) -> asyncio.Task[T]:
        """Run `work` as a task of ours. `answers`: a caller gets its KvstrataError, which is then not logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, answers))
        return task

    def _ended(self, answers: bool, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        if answers and isinstance(task.exception(), KvstrataError):
            return
        self._log.error("adapter_task_failed", task=task.get_name(), error=repr(task.exception()))
