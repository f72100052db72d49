"""Tails in L2: a tail is put only once nothing has replaced it for a while, and deleted when something does.

    committed ─▶ waiting ── `after_s` later, still in L1 ─▶ the tiers, by their policies ─▶ in L2
                    └─ replaced ─▶ lingers while in use ─▶ gone                               └─ likewise, and deleted

A conversation that continues within `after_s` seconds leaves only whole chunks in L2.  The last REMEMBERED tails that
were put into L2 or loaded are remembered; a tail that is forgotten stays in its tier until the tier's cap evicts it.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Iterable, Sequence

from kvstrata.clock import Clock
from kvstrata.keys.batch import split
from kvstrata.native.core import Pool
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.tiers.puts import RecentKeys, StoreController
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier

MAX_WAITING = 65_536
"""Maximum number of waiting tails; beyond it those that have waited longest are not put."""
REMEMBERED = 65_536
MAX_LINGERING = 4_096
"""Maximum number of replaced tails in use that are rechecked; beyond it the oldest stay until they are evicted."""
KEYS_PER_ROUND = 64
"""Number of tails offered to the tiers in one call of `offer_due`."""


class TailPuts(Numbers):
    """The tails that wait for their put, and those in L2. Belongs to the event loop."""

    stored = counter("Tails that engines have stored in L1.")
    dropped = counter(
        "Tails dropped because a chunk or a longer tail holds their tokens.", name="replaced", key="replaced"
    )
    replaced_in_l2 = counter("Of these, tails that were deleted from L2.")
    put = counter("Tails offered to L2 because they had not been replaced for `l2.tails_after_s`.")
    waiting = gauge("Tails that wait to be offered to L2.", lambda self: len(self._waiting))
    lingering = gauge("Replaced tails that are still in use.", lambda self: len(self._lingering))

    def __init__(
        self, pool: Pool, store: StoreController, tiers: TierSet, clock: Clock, after_s: float
    ) -> None:
        """`after_s`: seconds until a tail is put; below 0: never."""
        self._pool = pool
        self._store = store
        self._tiers = tiers
        self._deletions: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._after_s = after_s
        self._waiting: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        """Key → time since which the tail waits; the first has waited longest."""
        self._lingering: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        """Tails that were replaced while they were in use."""
        self._in_l2 = RecentKeys(REMEMBERED)

    def committed(self, keys: Sequence[bytes]) -> None:
        """These tails became visible in L1."""
        self.stored += len(keys)
        for key in keys:
            self._lingering.pop(key, None)
        if self._after_s < 0:
            return
        now_s = self._clock.monotonic_s()
        for key in keys:
            self._waiting[key] = now_s
            self._waiting.move_to_end(key)
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def loaded(self, keys: Iterable[bytes]) -> None:
        """These tails were found in L2."""
        for key in keys:
            self._in_l2.add(key)

    def replaced(self, keys: bytes) -> None:
        """Drop tails that are useless now; one that is in use leaves L1 soon after its last use has ended."""
        replaced = split(keys)
        for key in replaced:
            self._waiting.pop(key, None)
            self._lingering[key] = None
        self._drop_lingering(dict.fromkeys(replaced))
        while len(self._lingering) > MAX_LINGERING:
            self._lingering.popitem(last=False)

    def _drop_lingering(self, keys: Iterable[bytes]) -> None:
        """Drop those of these tails that are not in use any more, in L2 too: no put of them is under way then.

        The others are checked again after all other lingering tails.
        """
        in_l2 = []
        for key in keys:
            if not self._pool.remove(key) and self._pool.peek(key):
                self._lingering.move_to_end(key)
                continue
            del self._lingering[key]
            self.dropped += 1
            if key in self._in_l2:
                in_l2.append(key)
        if in_l2:
            self._in_l2.discard(in_l2)
            self.replaced_in_l2 += len(in_l2)
            self._delete(in_l2)

    def tick(self) -> None:
        """Drop replaced tails that are unused now, and offer those whose time has come. Housekeeping calls this."""
        self._drop_lingering(list(itertools.islice(self._lingering, KEYS_PER_ROUND)))
        self.offer_due()

    def offer_due(self, *, all_of_them: bool = False) -> None:
        """Offer to the tiers the tails whose time has come, or all."""
        due_s = self._clock.monotonic_s() - self._after_s
        for _ in range(len(self._waiting) if all_of_them else KEYS_PER_ROUND):
            key = next(iter(self._waiting), None)
            if key is None or (self._waiting[key] > due_s and not all_of_them):
                return
            del self._waiting[key]
            if self._pool.peek(key) and len(self._tiers):
                self._in_l2.add(key)
                self.put += 1
                self._store.committed([key])

    async def stop(self) -> None:
        """Offer all waiting tails, and wait for deletions to end."""
        self.offer_due(all_of_them=True)
        await asyncio.gather(*self._deletions)

    def _delete(self, keys: list[bytes]) -> None:
        """Begin to delete these tails from every tier that gets puts."""
        for tier in self._tiers:
            capabilities = tier.capabilities
            if capabilities.takes_puts and capabilities.can_delete:
                task = asyncio.create_task(self._delete_from(tier, keys), name=f"delete-tails-{tier.name}")
                self._deletions.add(task)
                task.add_done_callback(self._deletions.discard)

    async def _delete_from(self, tier: Tier, keys: list[bytes]) -> None:
        await tier.delete(b"".join(keys))
        self._store.dropped(tier.name, keys)
