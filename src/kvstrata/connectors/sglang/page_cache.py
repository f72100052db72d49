"""Blocking calls that count, load and store the pages of one of SGLang's host pools in kvstrata.

SGLang calls from threads of its own, one each for queries, loads and stores, and each call returns its result.  A call
waits for the server at most `wait_s`; a load then copies for about a second at most, and pages that are not copied by
then count as missing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from kvstrata.client import CacheClient, Identity, LoadItem, LookupResult, StoreOutcome
from kvstrata.client.handles import miss
from kvstrata.connectors.sglang.pages import PageRuns
from kvstrata.keys import batch
from kvstrata.types import MissReason, RequestIdentity, unpack_extents

KEPT = frozenset({StoreOutcome.STORED, StoreOutcome.PRESENT, StoreOutcome.IN_FLIGHT})
"""Outcomes of a page that the cache has, or that another process is writing now."""


class PageCache:
    """One host pool's pages, by SGLang's names for them. Any thread. Owns the client, which is started."""

    def __init__(self, client: CacheClient, runs: PageRuns, *, tenant: str, wait_s: float) -> None:
        self._client = client
        self._plan = runs.plan()
        self._wait_s = wait_s
        self._numbers = itertools.count(1)
        self._identity: Identity = client.identity(RequestIdentity(tenant=tenant))
        self.runs = runs

    def chain(self, names: Sequence[str]) -> bytes:
        """The chain keys of these pages, 32 bytes each."""
        root = self._identity.root
        return b"".join(hashlib.sha256(root + name.encode()).digest() for name in names)

    def count(self, names: Sequence[str]) -> int:
        """How many of these pages are there, counted from the first one up to the first that is missing.

        Pages that only L2 has are brought to L1 for this, as far as the time allows.
        """
        if not self._client.connected:
            return 0  # the index may still be readable, but no page could be leased
        chain = self.chain(names)
        there = self._client.peek(self._identity, chain)
        if there == len(names):
            return there
        if not self._client.has_l2 and self._identity.ready:
            absent = batch.part(chain, there, len(names))
            self._client.missed(self._identity, absent, request_id=f"sglang-{next(self._numbers)}")
            return there
        found = self._look_up(chain)
        if found.lease is not None:
            self._client.release([found.lease])
        return found.n_chunks

    def present(self, names: Sequence[str]) -> list[bool]:
        """For each of these pages, whether L1 has it now."""
        keys = [(self._identity.root, self.chain([name])) for name in names]
        return self._client.pool.present(keys) or [False] * len(names)

    def load(self, names: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Copy pages into these places of the pool, up to the first one that is missing; returns which are whole."""
        chain = self.chain(names)
        found = self._look_up(chain)
        if found.lease is None:
            return [False] * len(pages)
        items = [
            LoadItem(batch.nth(chain, i), extent.offset_bytes, extent.length_bytes, [pages[i]])
            for i, extent in enumerate(unpack_extents(found.extents))
        ]
        failed = self._client.load(self._identity, found.lease, items, self._plan, sync=True).failed
        return [i < len(items) and i not in failed for i in range(len(pages))]

    def store(self, names: Sequence[str], pages: Sequence[int], parent: str | None) -> list[bool]:
        """Copy pages out of these places of the pool; returns which the cache has then. `parent` comes before them."""
        before = self.chain([parent]) if parent else b""
        blocks = [[page] for page in pages]
        job = self._client.store(self._identity, before, self.chain(names), self._plan, blocks)
        if not job.done.wait(self._wait_s):
            # Cancelled, it never makes a page visible that was copied too late.
            job.cancel()
            job.gathered.wait(self._wait_s)
        return [outcome in KEPT for outcome in job.outcomes]

    def close(self) -> None:
        """End the client."""
        self._client.close()

    def _look_up(self, chain: bytes) -> LookupResult:
        call = self._client.lookup(
            self._identity,
            chain,
            request_id=f"sglang-{next(self._numbers)}",
            deadline_ms=round(1000 * self._wait_s),
        )
        if not call.wait(self._wait_s):
            call.cancel()
            return miss(MissReason.DEADLINE)
        return call.result
