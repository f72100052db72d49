"""Asks L1 and the tiers what they have of a fetch's keys, and plans its loads."""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Mapping, Sequence

from kvstrata.clock import Clock
from kvstrata.keys.spans import longest
from kvstrata.observability.logging import Thinning
from kvstrata.policy.prefetch import Plan, Source, make_plan, with_windows
from kvstrata.policy.reasons import LENGTH
from kvstrata.server.l2.fetch import Fetch
from kvstrata.server.l2.gate import Loader, PrefetchLimits
from kvstrata.server.l2.tiers import TierSet, TierState
from kvstrata.storage.base import Found, Presence

log = logging.getLogger(__name__)
_too_long = Thinning(60.0)

EXISTS_BATCH = 1024
"""Keys in one call of `exists`."""
WINDOW_CHUNKS = 128
"""Chunks whose windows are asked for at a time, from the end of the prefix towards its start."""
Asks = Callable[[str, Sequence[bytes]], None]
"""`asks(tier, scattered)` is called before a tier is asked for keys of which each is useful without those before it:
those of windows, states and tails."""


class Questions:
    """The questions of all fetches. Belongs to the event loop."""

    def __init__(
        self,
        tiers: TierSet,
        loaders: Mapping[str, Loader],
        limits: PrefetchLimits,
        clock: Clock,
        counts: collections.Counter[str],
        asks: Asks,
    ) -> None:
        """`loaders` and `counts` are the prefetch controller's."""
        self._tiers = tiers
        self._loaders = loaders
        self._limits = limits
        self._clock = clock
        self._counts = counts
        self._asks = asks

    async def plan(self, fetch: Fetch, budget_bytes: int | None) -> Plan:
        """Ask L1, then the tiers in their order, each for the keys that were not found before it."""
        keys, n_slices, spans = fetch.keys, fetch.n_slices, fetch.spans
        fetch.sources = self._active()
        whole = [number for number in range(n_slices) if not (spans and spans[number])]
        l1_chunks = [0] * n_slices
        for number in whole:
            l1_chunks[number] = fetch.pool.peek(b"".join(keys[number::n_slices]), 1)
        missing = [
            chunk * n_slices + number
            for chunk in range(len(keys) // n_slices)
            for number in whole
            if chunk >= l1_chunks[number]
        ]
        sources: dict[int, Source] = {}
        unknown: dict[int, str] = {}
        for at in range(0, len(missing), EXISTS_BATCH):
            part = missing[at : at + EXISTS_BATCH]
            await self._ask_all(fetch, part, sources, unknown)
            if not all(i in sources or fetch.in_l1(keys[i]) for i in part):
                break  # the prefix ends in this part
        plan = make_plan(keys, n_slices, l1_chunks, sources, fetch.in_l1, unknown, budget_bytes, spans)
        if not any(spans):
            return plan
        # A budget may allow a shorter hit only.
        await self._ask_windows(fetch, plan.n_chunks, sources, unknown, shorter_too=budget_bytes is not None)
        return with_windows(plan, keys, n_slices, sources, fetch.in_l1, unknown, spans, budget_bytes)

    def _active(self) -> list[Loader]:
        """The tiers that answer lookups now, nearest first."""
        return [self._loaders[tier.name] for tier in self._tiers if tier.state is TierState.ACTIVE]

    async def first_of(self, fetch: Fetch) -> int:
        """The first chunk of the fetch's keys that L1 and the tiers have in all slices; -1 if they have none."""
        fetch.sources = self._active()
        keys, n_slices = fetch.keys, fetch.n_slices
        sources: dict[int, Source] = {}
        absent = [i for i, key in enumerate(keys) if not fetch.in_l1(key)]
        for at in range(0, len(absent), EXISTS_BATCH):
            await self._ask_all(fetch, absent[at : at + EXISTS_BATCH], sources, {})
        lacking = {i // n_slices for i in absent if i not in sources}
        return next((chunk for chunk in range(len(keys) // n_slices) if chunk not in lacking), -1)

    async def ask(self, fetch: Fetch, number: int, names: dict[int, bytes]) -> list[Found]:
        """Ask one tier which of the keys, by their numbers, it has; all are unknown if it does not answer in time."""
        loader, keys = fetch.sources[number], list(names.values())
        left_s = max(0.0, fetch.deadline_s - self._clock.monotonic_s())
        last = number == len(fetch.sources) - 1
        patience_s = left_s if last else min(left_s * self._limits.patience_share, self._limits.patience_s)
        scattered = [key for i, key in names.items() if fetch.tails or fetch.span_of(i)]
        if scattered:
            self._asks(loader.name, scattered)
        try:
            found = await asyncio.wait_for(loader.adapter.exists(keys), patience_s)
        except TimeoutError:
            return [Found(Presence.UNKNOWN, 0, "deadline")] * len(keys)
        return [
            self._checked(loader.name, key, one, fetch.limit_of(i))
            for (i, key), one in zip(names.items(), found, strict=True)
        ]

    def _checked(self, tier: str, key: bytes, found: Found, limit_bytes: int) -> Found:
        """A tier's answer, UNKNOWN for a value that is longer than a record of a chunk, which would evict others."""
        if not limit_bytes or found.record_bytes <= limit_bytes:
            return found
        self._counts[f"load:{LENGTH}"] += 1
        _too_long.log(
            log, logging.WARNING, tier, "%s: not loading record %s: it has %d bytes, more than a record of its layout",
            tier, key.hex()[:16], found.record_bytes,
        )  # fmt: skip
        return Found(Presence.UNKNOWN, 0, LENGTH)

    async def _ask_all(
        self, fetch: Fetch, numbers: Sequence[int], sources: dict[int, Source], unknown: dict[int, str]
    ) -> None:
        """Ask the tiers in their order for these keys, and note what they have, or why that is unknown."""
        for tier in range(len(fetch.sources)):
            asked = [i for i in numbers if i not in sources]
            if not asked:
                return
            found = await self.ask(fetch, tier, {i: fetch.keys[i] for i in asked})
            for i, (presence, record_bytes, reason) in zip(asked, found, strict=True):
                if presence is Presence.PRESENT:
                    sources[i] = Source(tier, record_bytes)
                elif presence is Presence.UNKNOWN:
                    unknown.setdefault(i, reason or "unknown")

    async def _ask_windows(
        self,
        fetch: Fetch,
        n_chunks: int,
        sources: dict[int, Source],
        unknown: dict[int, str],
        *,
        shorter_too: bool,
    ) -> None:
        """Ask for the keys of slices with a span, until the longest hit of at most `n_chunks` chunks is known.

        With `shorter_too` all shorter hits are known in the end as well.
        """
        n_slices, spans, keys = fetch.n_slices, fetch.spans, fetch.keys

        def there(chunk: int, number: int) -> bool:
            i = chunk * n_slices + number
            return i in sources or fetch.in_l1(keys[i])

        async def ask(chunks: range, hit: int | None = None) -> None:
            """Ask for these chunks, the last ones first; with `hit`, only for what a hit of so many chunks needs."""
            absent = [
                chunk * n_slices + number
                for chunk in reversed(chunks)
                for number, span in enumerate(spans)
                if span and (hit is None or chunk + span >= hit) and not there(chunk, number)
            ]
            for at in range(0, len(absent), EXISTS_BATCH):
                await self._ask_all(fetch, absent[at : at + EXISTS_BATCH], sources, unknown)

        longest_span = max(spans)
        # Most prefixes end where the prompt that stored them did.
        await ask(range(max(0, n_chunks - longest_span), n_chunks), hit=n_chunks)
        if longest(n_chunks, spans, there) == n_chunks and not shorter_too:
            return
        end = n_chunks
        while end > 0:
            begin = max(0, end - WINDOW_CHUNKS)
            await ask(range(max(0, begin - longest_span), end))
            if longest(n_chunks, spans, there) > begin and not shorter_too:
                return
            end = begin
