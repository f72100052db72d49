"""Loads in parts: requests that hold blocks for chunks which another engine still computes.

    waits without blocks ── the rest is expected soon ──▶ parked ─┬─ more chunks have arrived ────▶ the next part
                                                                  └─ all, or no more will come ───▶ the last part

vLLM was promised all chunks when the request was parked, and waits for one asynchronous load.  The workers report it
when the part that is marked as the last one has ended.  Blocks that no part has filled fail, and vLLM computes them.

Invariant: every parked request gets a last part, even if the request or this side ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvstrata.client import CacheClient, LookupCall, LookupResult
from kvstrata.client.handles import miss
from kvstrata.connectors.vllm.lookup_table import LookupTable, Tracked
from kvstrata.connectors.vllm.metadata import Load
from kvstrata.keys import ChunkHasher
from kvstrata.types import LeaseName, MissReason

MAX_PARKED = 8
"""Maximum number of requests that hold blocks for chunks not computed yet; others wait for all chunks."""


LoadOf = Callable[[Tracked, LookupResult, LeaseName | None, Sequence[int], int, int, bool], Load]
"""(request, lookup's result, lease, block table, first token, end token, whether more parts follow) → load; without a
lease the load fails."""


class _Parked(msgspec.Struct):
    tracked: Tracked
    hasher: ChunkHasher | None
    """The hasher of the keys that were looked up; after a reset of vLLM's caches the request has another, or none."""
    table: list[int]
    start: int
    """Number of tokens that are loaded, or being loaded."""
    end: int
    """Number of tokens that were promised to vLLM."""
    call: LookupCall
    """The lookup for the next part."""


class Parts:
    """The parked requests. Belongs to the scheduler's thread."""

    def __init__(self, client: CacheClient, lookups: LookupTable, chunk_tokens: int, load_of: LoadOf) -> None:
        self._client, self._lookups, self._chunk_tokens = client, lookups, chunk_tokens
        self._load_of = load_of
        self._parked: dict[str, _Parked] = {}

    def park(self, tracked: Tracked, table: Sequence[int], n_chunks: int, end: int) -> None:
        """Park a request: vLLM waits for `end` tokens of it, and its first part loads `n_chunks` chunks."""
        call = self._lookups.ask_for_more(tracked, n_chunks)
        start = n_chunks * self._chunk_tokens
        self._parked[tracked.request.request_id] = _Parked(
            tracked, tracked.hasher, list(table), start, end, call
        )
        self._lookups.may_park = len(self._parked) < MAX_PARKED

    def next_loads(self) -> list[Load]:
        """The parts whose lookups are answered, and the last parts of requests whose keys have changed."""
        loads: list[Load] = []
        for request_id, parked in list(self._parked.items()):
            if parked.tracked.hasher is not parked.hasher:
                loads += self.end(request_id)
            elif parked.call.done:
                loads += self._answered(parked)
                if not loads[-1].more:
                    self._forget(request_id)
        return loads

    def end(self, request_id: str) -> list[Load]:
        """The last part of a request that gets no more chunks; empty if it is not parked."""
        parked = self._forget(request_id)
        if parked is None:
            return []
        parked.call.cancel()
        return [self._nothing(parked, MissReason.FORGOTTEN)]

    def end_all(self) -> list[Load]:
        """The last parts of all requests."""
        return [load for request_id in list(self._parked) for load in self.end(request_id)]

    def _forget(self, request_id: str) -> _Parked | None:
        parked = self._parked.pop(request_id, None)
        self._lookups.may_park = len(self._parked) < MAX_PARKED
        return parked

    def _answered(self, parked: _Parked) -> list[Load]:
        tracked, found, loads = parked.tracked, parked.call.result, []
        lease = found.lease if found.lease is not None and parked.call.claim() else None
        end = min(parked.end, found.n_chunks * self._chunk_tokens) if lease is not None else 0
        if lease is not None and end > parked.start:
            more = end < parked.end
            loads.append(self._load_of(tracked, found, lease, parked.table, parked.start, end, more))
            self._client.release([lease])  # our share; the workers release theirs
            parked.start = end
            if more and found.promised > found.n_chunks:
                parked.call = self._lookups.ask_for_more(tracked, found.n_chunks)
                return loads
        elif lease is not None:
            self._client.release([lease], group=True)
        if parked.start < parked.end:
            loads.append(self._nothing(parked, found.reason or MissReason.FORGOTTEN))
        return loads

    def _nothing(self, parked: _Parked, reason: MissReason) -> Load:
        """A last part that fails."""
        self._lookups.count_miss(parked.tracked, reason)
        return self._load_of(
            parked.tracked, miss(reason), None, parked.table, parked.start, parked.end, False
        )
