"""The L2 tiers that are this instance's own, for its controllers: their names, what is in them, and how full they are.

A tier whose adapter lists its keys is listed anew in each full sync, records from before this start included, and
nothing of it is remembered here.  Of the others what was put or found since the start is remembered (TierTags).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from kvstrata.rpc.cluster_wire import TAG_BYTES, tags_of

if TYPE_CHECKING:
    from kvstrata.server.engine import Engine
    from kvstrata.server.l2.tiers import Member
    from kvstrata.storage.base import Usage

MAX_NAME_CHARS = 32
PAGE_KEYS = 256
"""Keys that an adapter names at a time: some 100 µs of its index, and of the loop."""
MAX_PAGES = 1 << 22
"""Of one tier: whoever has more goes round in circles."""
COUNT_S = 5.0


def tier_name(adapter: str) -> str:
    """What controllers call the tier of this adapter: its name, or a shorter one that no other adapter has."""
    if len(adapter) <= MAX_NAME_CHARS:
        return adapter
    digest = hashlib.sha256(adapter.encode()).hexdigest()[:8]
    return f"{adapter[: MAX_NAME_CHARS - 9]}-{digest}"


class NotListed(Exception):
    """A tier that lists its keys does not now, or not to the end."""


class OwnTiers:
    """See the module. Belongs to the event loop; all links of an instance share one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._usage: dict[str, Usage] = {}
        self._counting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to count."""
        self._counting = self._engine.supervisor.spawn(self._count(), "cluster-tiers")

    async def stop(self) -> None:
        """End. Idempotent."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    def names(self) -> list[str]:
        """Of the tiers that nobody else puts to, nearest first."""
        return list(self._members())

    def lists(self, tier: str) -> bool:
        """Whether `parts` names what is there."""
        member = self._members().get(tier)
        return member is not None and member.adapter.capabilities.lists

    async def can_list(self, tier: str) -> bool:
        """Whether it would do so now."""
        member = self._members().get(tier)
        return member is not None and await member.adapter.list_keys(0, 1) is not None

    async def parts(self, tier: str, part_tags: int) -> AsyncIterator[bytes]:
        """The tags of all that is there, about so many at a time. Raises NotListed, then some of it is left out."""
        collected = bytearray()
        cursor = 0
        for _ in range(MAX_PAGES):
            member = self._members().get(tier)
            page = None if member is None else await member.adapter.list_keys(cursor, PAGE_KEYS)
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
        """Of the tiers that could say, a moment ago."""
        return {tier: self._usage[tier] for tier in self._members() if tier in self._usage}

    def _members(self) -> dict[str, Member]:
        return {
            tier_name(member.name): member
            for member in self._engine.adapters
            if not member.adapter.capabilities.shared and member.adapter.capabilities.takes_puts
        }

    async def _count(self) -> None:
        while True:
            for tier, member in self._members().items():
                usage = await member.adapter.usage()
                if any(usage):
                    self._usage[tier] = usage
                else:  # empty without a cap, or it did not say
                    self._usage.pop(tier, None)
            await asyncio.sleep(COUNT_S)
