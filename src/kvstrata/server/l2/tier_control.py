"""Opens the tiers of the settings, pauses and resumes them, and shows them to an admin.

    open     at the start ─▶ in the set, perhaps unreachable ─▶ opened again and again ─▶ active
    pause    active ─▶ paused: gets no chunks and answers no lookups; operations under way end
    resume   paused ─▶ active

A tier of the settings whose storage cannot be reached at the start stops no start.  It is in the set, UNREACHABLE with
the reason, until a further try succeeds.  A pause ends with the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvstrata.config.secrets import scrubbed, shown
from kvstrata.errors import BadRequest, ConfigError, KvstrataError, StorageError
from kvstrata.native.core import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.process.threads import on_a_thread
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tiers import Tier, TierSet, TierState
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.entry import TierConfig
from kvstrata.storage.folder import FolderState
from kvstrata.storage.stack import Stack

OPEN_S = 30.0
"""Time in which an adapter must be opened before the server starts without it."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pauses between tries to open a tier that cannot be reached; each is twice the pause before."""


class TierControl:
    """Changes the set of tiers. All methods belong to the event loop."""

    def __init__(
        self,
        tiers: TierSet,
        pool: Pool,
        store: StoreController,
        prefetch: PrefetchController,
        *,
        build: Callable[[TierConfig], Stack],
        context: Callable[[str], AdapterContext],
        open_s: float = OPEN_S,
    ) -> None:
        """`build` makes the stack of a tier, `context(name)` is what the server lends to that tier."""
        self._tiers = tiers
        self._pool = pool
        self._store = store
        self._prefetch = prefetch
        self._build = build
        self._context = context
        self._open_s = open_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = EventLog("adapters")
        self._changed()

    # -- the start and the end -----------------------------------------------------------------------------

    async def open(self, config: TierConfig, *, must: bool = False) -> None:
        """Open a tier of the settings and add it at the end.

        Raises ConfigError.  A tier that cannot be reached, or is not open after `open_s`, is UNREACHABLE, and is
        opened in the background; with `must` this raises StorageError instead.
        """
        tier = Tier(self._build(config), config.entry, is_open=False)
        opening = self._own(self._open_stack(tier.configured), f"open-{config.name}")
        await asyncio.wait({opening}, timeout=self._open_s)
        if opening.done() and (must or not isinstance(opening.exception(), StorageError)):
            opening.result()
        self._tiers.add(tier)
        if opening.done() and opening.exception() is None:
            self._join(tier)
        else:
            self._own(self._reach(tier, config, opening), f"reach-{config.name}")

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
                opening = self._own(self._open_anew(tier, config), f"open-{tier.name}")
            await asyncio.wait({opening})
            if opening.exception() is None:
                break
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

    def _join(self, tier: Tier) -> None:
        """Use a tier of the set, which has been opened, from now on."""
        tier.is_open = True
        if tier.configured.host is None and tier.adapter.capabilities.quiesce == "never":
            advice = 'its calls may never end; with "isolation": "process" they end with their process'
            self._log.warning("l2_adapter_may_hang", adapter=tier.name, advice=advice)
        self._store.join(tier)
        self._prefetch.join(tier)
        self._changed()

    async def close(self) -> None:
        """Cancel tries to open tiers, then close all tiers at the same time. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.stop(0.0)
        await self._prefetch.stop(0.0)
        stacks = [tier.configured for tier in self._tiers if tier.is_open]
        self._tiers.clear()
        await asyncio.gather(*(stack.close() for stack in stacks))

    # -- the admin's operations ----------------------------------------------------------------------------

    def pause(self, name: str) -> dict[str, Any] | None:
        """Ask a tier's medium nothing until `resume`. Returns its row; None: no tier has this name.

        Chunks that wait for a put are skipped; operations under way go on, and the row counts them (`under_way`).
        Raises BadRequest for a tier that is not open.
        """
        return self._set_paused(name, True)

    def resume(self, name: str) -> dict[str, Any] | None:
        """Use a paused tier as before. Returns its row; None: no tier has this name.

        Chunks that were skipped meanwhile are not put.
        """
        return self._set_paused(name, False)

    def _set_paused(self, name: str, paused: bool) -> dict[str, Any] | None:
        tier = self._tiers.get(name)
        if tier is None:
            return None
        if not tier.is_open:
            raise BadRequest(
                f"name: {name} cannot be reached, so it is not in use; it is tried again by itself",
                field="name",
            )
        if tier.configured.adapter.paused != paused:
            tier.configured.adapter.paused = paused
            self._changed()
            self._log.info("l2_adapter_paused" if paused else "l2_adapter_resumed", adapter=name)
        return self._row(tier)

    # -- what an admin sees --------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of all tiers."""
        return [tier.name for tier in self._tiers]

    async def rows(self) -> list[dict[str, Any]]:
        """A row for each tier, nearest first."""
        tiers = list(self._tiers)
        usages = await asyncio.gather(*(_usage(tier) for tier in tiers))
        return [{**self._row(tier), "usage": usage} for tier, usage in zip(tiers, usages, strict=True)]

    def status(self) -> dict[str, Any]:
        """For the status document, by name."""
        return {
            tier.name: {
                "state": tier.shown_state,
                "takes_loads": tier.state is TierState.ACTIVE,
                **_status(tier),
            }
            for tier in self._tiers
        }

    def _row(self, tier: Tier) -> dict[str, Any]:
        """The row of one tier, without its secrets."""
        capabilities = tier.adapter.capabilities
        return {
            "name": tier.name,
            "type": tier.name.rpartition("-")[0],
            "state": tier.shown_state,
            "policy": str(tier.configured.policy),
            "takes_loads": tier.state is TierState.ACTIVE,
            "persistent": capabilities.persistent,
            "shared": capabilities.shared,
            "entry": shown(tier.entry)[0],
            **_status(tier),
            "under_way": tier.configured.adapter.running,
            "puts": self._store.stats_of(tier.name),
            "loads": self._prefetch.stats_of(tier.name),
        }

    # -- common --------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._pool.set_has_l2(self._tiers.hit_beyond_l1)

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as a task of ours, whose KvstrataError another task reads."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), KvstrataError | None):
            self._log.error("adapter_task_failed", task=task.get_name(), error=repr(task.exception()))


async def _usage(tier: Tier) -> dict[str, int] | None:
    return (await tier.adapter.usage())._asdict() if tier.state is TierState.ACTIVE else None


def _status(tier: Tier) -> dict[str, Any]:
    """The stack's status, or why the medium of an UNREACHABLE tier cannot be used."""
    status = tier.configured.status()
    if not tier.is_open:
        status |= {
            "medium": str(FolderState.UNREACHABLE),
            "medium_well": False,
            "reason": tier.reason,
        }
    return status
