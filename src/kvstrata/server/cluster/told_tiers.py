"""The instance's L2 tiers of which controllers are told: their names, their keys, and how full they are.

A tier that takes puts is *own* if no other instance shares its medium.  An own tier whose adapter lists its keys is
listed anew in each full sync, with records from before this start, so its keys are not kept here.  For the others,
TierTags (events.py) keeps the keys that were put or found since the start; so it does for *shared* tiers, whose media
may be large and are not listed by each instance.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import TAG_BYTES, tags_of
from kvstrata.tiers.base import Usage
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier, TierState

MAX_NAME_CHARS = 32
PAGE_KEYS = 256
"""Keys in one page of a listing: some 100 µs of the adapter's index, and of the loop."""
MAX_PAGES = 1 << 22
"""A listing with more pages counts as broken: its cursor does not advance."""
COUNT_S = 5.0


def tier_name(adapter: str) -> str:
    """The name of an adapter's tier on the wire: the adapter's own, or one cut to 32 characters with a digest."""
    if len(adapter) <= MAX_NAME_CHARS:
        return adapter
    digest = hashlib.sha256(adapter.encode()).hexdigest()[:8]
    return f"{adapter[: MAX_NAME_CHARS - 9]}-{digest}"


class NotListed(Exception):
    """An adapter that can list its keys did not list them, or not all of them."""


class ToldTiers:
    """Names, lists and measures the tiers. Belongs to the event loop; all links of an instance share one."""

    def __init__(self, tiers: TierSet, supervisor: Supervisor) -> None:
        self._tiers = tiers
        self._supervisor = supervisor
        self._usage: dict[str, Usage] = {}
        self._counting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask the tiers how full they are, every `COUNT_S`."""
        self._counting = self._supervisor.spawn(self._count(), "cluster-tiers")

    async def stop(self) -> None:
        """Ask no more. Idempotent."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    def names(self) -> list[str]:
        """Names of all tiers, nearest first."""
        return list(self._all())

    def states(self) -> dict[str, str]:
        """The states of the tiers that are not active."""
        shown = {name: tier.shown_state for name, tier in self._all().items()}
        return {name: state for name, state in shown.items() if state != TierState.ACTIVE}

    def media(self) -> dict[str, str]:
        """The words of the media of the shared tiers, by tier; those whose medium is not known are left out."""
        return {
            name: tier.capabilities.medium
            for name, tier in self._all().items()
            if tier.capabilities.shared and tier.capabilities.medium
        }

    def lists(self, tier: str) -> bool:
        """Whether the tier's keys are listed: it is own, and its adapter can."""
        own = self._own().get(tier)
        return own is not None and own.capabilities.lists

    async def can_list(self, tier: str) -> bool:
        """Whether the adapter of an own tier lists its keys at this moment."""
        own = self._own().get(tier)
        return own is not None and await own.list_keys(0, 1) is not None

    async def parts(self, tier: str, part_tags: int) -> AsyncIterator[bytes]:
        """Tags of the tier's keys, about `part_tags` at a time. Raises NotListed at the end if some are left out."""
        collected = bytearray()
        cursor = 0
        for _ in range(MAX_PAGES):
            own = self._own().get(tier)
            page = None if own is None else await own.list_keys(cursor, PAGE_KEYS)
            if page is None:
                break
            collected += tags_of(b"".join(page.keys))
            cursor = page.cursor
            if len(collected) >= part_tags * TAG_BYTES or (collected and not cursor):
                yield bytes(collected)
                collected.clear()
            if not cursor:
                return
        if collected:
            yield bytes(collected)
        raise NotListed(tier)

    def usage(self) -> dict[str, Usage]:
        """How full own tiers are, at most `COUNT_S` ago; those that could not say are left out."""
        return {tier: self._usage[tier] for tier in self._own() if tier in self._usage}

    def _all(self) -> dict[str, Tier]:
        """Open tiers that take puts; the one that reads peers takes none."""
        return {
            tier_name(tier.name): tier
            for tier in self._tiers
            if tier.state is not TierState.UNREACHABLE and tier.capabilities.takes_puts
        }

    def _own(self) -> dict[str, Tier]:
        return {name: tier for name, tier in self._all().items() if not tier.capabilities.shared}

    async def _count(self) -> None:
        while True:
            for tier, own in self._own().items():
                usage = await own.usage()
                if any(usage):
                    self._usage[tier] = usage
                else:  # empty and without a cap, or the adapter does not know
                    self._usage.pop(tier, None)
            await asyncio.sleep(COUNT_S)
