"""The instance's own L2 tiers, as its controllers know them: their names, their keys, and how full they are.

A tier is *own* if it takes puts and no other instance shares its medium.  An own tier whose adapter lists its keys is
listed anew in each full sync, with records from before this start, so its keys are not kept here.  For the other own
tiers, TierTags (events.py) keeps the keys that were put or found since the start.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_fields import TAG_BYTES
from kvstrata.rpc.cluster_wire import tags_of
from kvstrata.server.l2.tiers import Tier, TierSet
from kvstrata.storage.base import Usage

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


class OwnTiers:
    """Names, lists and measures the own tiers. Belongs to the event loop; all links of an instance share one."""

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
        """Names of the own tiers, nearest first."""
        return list(self._own())

    def lists(self, tier: str) -> bool:
        """Whether the tier's adapter can list its keys."""
        own = self._own().get(tier)
        return own is not None and own.adapter.capabilities.lists

    async def can_list(self, tier: str) -> bool:
        """Whether the tier's adapter lists its keys at this moment."""
        own = self._own().get(tier)
        return own is not None and await own.adapter.list_keys(0, 1) is not None

    async def parts(self, tier: str, part_tags: int) -> AsyncIterator[bytes]:
        """Tags of the tier's keys, about `part_tags` at a time. Raises NotListed at the end if some are left out."""
        collected = bytearray()
        cursor = 0
        for _ in range(MAX_PAGES):
            own = self._own().get(tier)
            page = None if own is None else await own.adapter.list_keys(cursor, PAGE_KEYS)
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
        """How full the tiers are, at most `COUNT_S` ago; tiers that could not say are left out."""
        return {tier: self._usage[tier] for tier in self._own() if tier in self._usage}

    def _own(self) -> dict[str, Tier]:
        return {
            tier_name(tier.name): tier
            for tier in self._tiers
            if not tier.adapter.capabilities.shared and tier.adapter.capabilities.takes_puts
        }

    async def _count(self) -> None:
        while True:
            for tier, own in self._own().items():
                usage = await own.adapter.usage()
                if any(usage):
                    self._usage[tier] = usage
                else:  # empty and without a cap, or the adapter does not know
                    self._usage.pop(tier, None)
            await asyncio.sleep(COUNT_S)
