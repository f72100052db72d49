"""A quota protects: whatever others store, a tenant keeps what it has within its quota, and can come as far as that."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import Pool
from kvstrata.rpc.wire import ReserveOutcome
from tests.harness.validation import validate
from tests.oracles.pool_chunk import PAGE

L1_CHUNKS, CHUNK, LONGER = 32, 2 * PAGE, 4
TENANTS = range(4)
TAKEN = (ReserveOutcome.RESERVED, ReserveOutcome.PRESENT)

tenants = st.sampled_from(TENANTS)
stores = st.tuples(st.just("store"), tenants, st.integers(0, 30), st.integers(1, 6), st.booleans())
leases = st.tuples(st.just("lease"), tenants, st.integers(0, 30))
releases = st.tuples(st.just("release"))


def quotas(most: int) -> st.SearchStrategy[list[int]]:
    """Of all tenants, in chunks; -1: none."""
    return st.lists(st.integers(-1, most), min_size=len(TENANTS), max_size=len(TENANTS))


def changes(most: int) -> st.SearchStrategy[tuple[str, int, int]]:
    return st.tuples(st.just("set_quota"), tenants, st.integers(-1, most))


class Shared:
    """A pool that its tenants have filled, and what they do."""

    def __init__(self, policy: str, chunks: list[int], longer: int) -> None:
        fds = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("index", "extents")]
        sizes = {"extents_bytes": L1_CHUNKS * CHUNK, "entry_capacity": 2 * L1_CHUNKS}
        self.pool = Pool.create(*fds, **sizes, policy=policy)
        for fd in fds:
            os.close(fd)
        self.row = self.pool.claim_row(b"s" * 16, b"g" * 16, os.getpid())
        self.longer, self.quotas, self.tickets, self.now_s = longer, chunks, list[int](), 0
        for tenant in TENANTS:
            self.set_quota(tenant, chunks[tenant])
        for prompt, tenant in itertools.product(range(L1_CHUNKS // len(TENANTS)), TENANTS):
            list(self.store(tenant, prompt, 1, False))

    def set_quota(self, tenant: int, n_chunks: int) -> None:
        self.quotas[tenant] = n_chunks
        assert self.pool.set_quota(tenant, n_chunks * CHUNK if n_chunks >= 0 else -1)

    def has(self, tenant: int) -> int:
        row = self.pool.stats()["tenants"].get(tenant)
        return int(row["bytes"]) if row else 0

    def keys(self, tenant: int, prompt: int, n_chunks: int, size: int) -> list[bytes]:
        return [hashlib.sha256(b"%d.%d.%d.%d" % (tenant, prompt, i, size)).digest() for i in range(n_chunks)]

    def store(
        self, tenant: int, prompt: int, n_chunks: int, longer: bool
    ) -> Iterator[tuple[bool, bool, bool]]:
        """Yields of each chunk whether it is within the quota, the tenant has others, and it was stored."""
        size, parent = CHUNK * (self.longer if longer else 1), b""
        for i, key in enumerate(self.keys(tenant, prompt, n_chunks, size)):
            self.now_s += 1
            self.pool.set_time(self.now_s * 10**9)
            had = self.has(tenant)
            ticket, [outcome], _ = self.pool.reserve(key, parent, size, self.row, bytes(32), tenant)
            self.pool.commit(ticket, [0], check=False)
            yield had + size <= self.quotas[tenant] * CHUNK, had > i * size, outcome in TAKEN
            if outcome not in TAKEN:
                return
            parent = key

    def lease(self, tenant: int, prompts: int) -> None:
        for prompt in range(prompts):
            keys = b"".join(self.keys(tenant, prompt, 6, CHUNK))
            self.tickets.append(self.pool.lease(keys, 1, [self.row], tenant=tenant)[0])

    def release(self) -> None:
        while self.tickets:
            self.pool.release(self.tickets.pop())


@pytest.mark.parametrize("policy", ["VALUE", "LRU"])
@given(chunks=quotas(8), steps=st.lists(stores | changes(8), max_size=60))
def test_nobody_loses_what_its_quota_has_and_all_get_there_and_replace_their_own(policy, chunks, steps):
    """Quotas are no more than L1, chunks of one size, and none in use."""
    shared = Shared(policy, chunks, 1)
    for what, *rest in steps:
        if what == "set_quota":
            shared.set_quota(*rest)
            continue
        had = [shared.has(tenant) for tenant in TENANTS]
        for within, others, stored in shared.store(*rest):
            assert stored or not (within or others)
        for tenant in {*TENANTS} - {rest[0]}:
            assert shared.has(tenant) >= min(had[tenant], shared.quotas[tenant] * CHUNK)
    validate(shared.pool)
    shared.pool.close()


@pytest.mark.parametrize("policy", ["VALUE", "LRU"])
@given(chunks=quotas(20), steps=st.lists(stores | changes(20) | leases | releases, max_size=30))
def test_what_is_stored_beyond_a_quota_takes_nothing_that_others_have_within_theirs(policy, chunks, steps):
    """Quotas may be more than L1, chunks of two sizes, of which the longer takes slabs, and some in use."""
    shared = Shared(policy, chunks, LONGER)
    for what, *rest in steps:
        if what != "store":
            getattr(shared, what)(*rest)
            continue
        had = [shared.has(tenant) for tenant in TENANTS]
        for within, _, _ in shared.store(*rest):
            now = [shared.has(tenant) for tenant in TENANTS]
            for tenant in {*TENANTS} - {rest[0]}:
                least = min(had[tenant], (shared.quotas[tenant] - LONGER) * CHUNK + 1)
                assert within or now[tenant] >= least
            had = now
    validate(shared.pool)
    shared.pool.close()
