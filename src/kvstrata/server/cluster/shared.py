"""Finds the shared prefixes of recent requests: leading chunks that several of them asked for, and their cost.

The chains of the last lookups are kept, and sorted when a controller asks.  A shared prefix ends where neighbours in
that order begin to differ, so one walk finds all of them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.keys.batch import count, part
from kvstrata.observability.load_line import prompt_work
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS, MAX_SHARED, AskShared, Shared, SharedPrefix
from kvstrata.server.processes import DeclaredIdentity, EngineGroup
from kvstrata.types import KEY_BYTES

WINDOW_S = 60.0
MAX_NOTED = 1_024
MAX_NOTED_BYTES = 4 << 20
"""Maximum total bytes of the kept chains."""
FEWEST = 3
"""Minimum number of requests within WINDOW_S that share a prefix for it to count."""
LEAST_S = 0.001


class Noted(NamedTuple):
    """One answered lookup."""

    at_s: float
    identity: DeclaredIdentity
    group: EngineGroup
    chain: bytes
    """Chain keys of its leading chunks."""
    served: int
    """Number of these that were served."""


class SharedPrefixes:
    """Keeps the chains of the last lookups. Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted: collections.deque[Noted] = collections.deque()
        self._bytes = 0
        self._since_s = self._asked_s = clock.monotonic_s()
        """Start of the time for which all lookups are kept, and the time of the last `take`."""

    def note(self, identity: DeclaredIdentity, group: EngineGroup, chain: bytes, served: int) -> None:
        """Record an answered lookup, which had `served` of its chunks."""
        now_s = self._clock.monotonic_s()
        kept = part(chain, 0, MAX_PEER_KEYS // max(1, len(group.slices)))
        self._noted.append(Noted(now_s, identity, group, kept, served))
        self._bytes += len(kept)
        while (
            len(self._noted) > MAX_NOTED
            or self._bytes > MAX_NOTED_BYTES
            or self._noted[0].at_s < now_s - WINDOW_S
        ):
            oldest = self._noted.popleft()
            self._bytes -= len(oldest.chain)
            self._since_s = max(self._since_s, oldest.at_s)

    def take(self) -> tuple[list[Noted], float, float, float]:
        """The recent lookups, the start of their time span, and the times of the last call and of this one."""
        now_s, asked_s = self._clock.monotonic_s(), self._asked_s
        self._asked_s = now_s
        return list(self._noted), max(self._since_s, now_s - WINDOW_S), asked_s, now_s


def body_of(
    noted: Sequence[Noted], since_s: float, asked_s: float, now_s: float, asked: AskShared
) -> dict[str, Any]:
    """The answer to `asked`, as the body of an Outcome. Takes some milliseconds, on any thread."""
    plain: dict[str, Any] = msgspec.to_builtins(
        told(noted, since_s, asked_s, now_s, asked), builtin_types=(bytes,)
    )
    return plain


def told(noted: Sequence[Noted], since_s: float, asked_s: float, now_s: float, asked: AskShared) -> Shared:
    """The answer to `asked`; for the other arguments see `SharedPrefixes.take`."""
    kinds: dict[tuple[bytes, bytes], list[Noted]] = {}
    for one in noted:
        if one.at_s >= since_s and one.group.complete and one.chain:
            kinds.setdefault((one.identity.root, one.group.packed_slices), []).append(one)
    seconds = max(LEAST_S, now_s - since_s)
    found = [prefix for rows in kinds.values() for prefix in _prefixes(rows, seconds)]
    found.sort(key=lambda one: -one.requests_s * one.compute_s)
    numbers = {end: number for number, end in enumerate(asked.ends)}
    counts = [[0, 0] for _ in asked.ends]
    of_step = [one for one in noted if one.at_s >= max(asked_s, since_s)]
    for one, depth in itertools.product(of_step, sorted(set(asked.depths))):
        number = numbers.get(one.chain[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]) if depth else None
        if number is not None:
            counts[number][0] += 1
            counts[number][1] += one.served >= depth
    asked_for, served = [row[0] for row in counts], [row[1] for row in counts]
    return Shared(found[:MAX_SHARED], asked_for, served, max(LEAST_S, now_s - max(asked_s, since_s)))


def _prefixes(rows: Sequence[Noted], seconds: float) -> Iterator[SharedPrefix]:
    """The prefixes that FEWEST or more of these lookups of one identity share."""
    identity, group = rows[-1].identity, rows[-1].group
    size, tokens_s, limits = group.layout.chunk_tokens, group.prompt_tokens_s, group.record_limits
    if not tokens_s or not all(limits):
        return
    chains = sorted(one.chain for one in rows)
    for depth, before, first, requests in shared_ends(chains):
        if requests >= FEWEST:
            yield SharedPrefix(
                identity.root, part(chains[first], 0, depth), list(group.slices), list(group.spans), limits,
                identity.request.tenant, requests / seconds, depth - before,
                prompt_work(before * size, depth * size) / tokens_s,
            )  # fmt: skip


def shared_ends(chains: Sequence[bytes]) -> Iterator[tuple[int, int, int, int]]:
    """Each prefix that several of these sorted chains share and that ends where they begin to differ.

    Yields its number of chunks, that of the next shorter one, the index of the first chain, and the number of chains.
    """
    open_: list[tuple[int, int]] = []
    for number in range(1, len(chains) + 1):
        same = _common(chains[number - 1], chains[number]) if number < len(chains) else 0
        first = number - 1
        while open_ and open_[-1][0] > same:
            depth, first = open_.pop()
            yield depth, max(same, open_[-1][0] if open_ else 0), first, number - first
        if same and not (open_ and open_[-1][0] == same):
            open_.append((same, first))


def _common(one: bytes, other: bytes) -> int:
    """Number of leading chunks that two chains share."""
    low, high = 0, min(count(one), count(other))
    while low < high:
        middle = (low + high + 1) // 2
        if part(one, low, middle) == part(other, low, middle):
            low = middle
        else:
            high = middle - 1
    return low
