"""A quota protects: whatever others store, a tenant keeps what it has within its quota, and can come as far as that."""

from __future__ import annotations

import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import Pool
from kvstrata.rpc.wire import ReserveOutcome
from tests.harness.validation import validate
from tests.oracles.pool_chunk import PAGE

L1_CHUNKS, CHUNK = 32, 2 * PAGE
TENANTS = 4

quotas = st.lists(st.integers(-1, 8), min_size=TENANTS, max_size=TENANTS)
"""In chunks; no more than L1 has together."""
stores = st.tuples(
    st.just("store"), st.integers(0, TENANTS - 1), st.integers(0, 30), st.integers(1, 6), st.booleans()
)
changes = st.tuples(st.just("quota"), st.integers(0, TENANTS - 1), st.integers(-1, 8))
leases = st.tuples(st.just("lease"), st.integers(0, TENANTS - 1), st.integers(0, 30))
releases = st.tuples(st.just("release"))


def keys_of(tenant: int, prompt: int, n_chunks: int, size: int) -> list[bytes]:
    return [hashlib.sha256(b"%d.%d.%d.%d" % (tenant, prompt, i, size)).digest() for i in range(n_chunks)]


class Shared:
    """A pool, and what its tenants do."""

    def __init__(self, policy: str, chunks: list[int], longer: int) -> None:
        fds = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("index", "extents")]
        self.pool = Pool.create(
            *fds, extents_bytes=L1_CHUNKS * CHUNK, entry_capacity=2 * L1_CHUNKS, policy=policy
        )
        for fd in fds:
            os.close(fd)
        self.row = self.pool.claim_row(b"s" * 16, b"g" * 16, os.getpid())
        self.longer, self.quotas, self.tickets = longer, chunks, list[int]()
        for tenant, n in enumerate(chunks):
            self.set_quota(tenant, n)

    def set_quota(self, tenant: int, n_chunks: int) -> None:
        self.quotas[tenant] = n_chunks
        assert self.pool.set_quota(tenant, n_chunks * CHUNK if n_chunks >= 0 else -1)

    def has(self, tenant: int) -> int:
        row = self.pool.stats()["tenants"].get(tenant)
        return int(row["bytes"]) if row else 0

    def store(self, tenant: int, prompt: int, n_chunks: int, longer: bool) -> list[tuple[bool, int]]:
        """Stores chunk after chunk; for each: whether it was within the quota, and what became of it."""
        size, parent, found = CHUNK * (self.longer if longer else 1), b"", []
        for key in keys_of(tenant, prompt, n_chunks, size):
            within = self.has(tenant) + size <= self.quotas[tenant] * CHUNK
            ticket, [outcome], _ = self.pool.reserve(key, parent, size, self.row, bytes(32), tenant)
            if ticket:
                self.pool.commit(ticket, [0], check=False)
            found.append((within, outcome))
            parent = key
        return found

    def lease(self, tenant: int, prompt: int) -> None:
        ticket, *_ = self.pool.lease(
            b"".join(keys_of(tenant, prompt, 6, CHUNK)), 1, [self.row], tenant=tenant
        )
        self.tickets += [ticket] if ticket else []


@pytest.mark.parametrize("policy", ["VALUE", "LRU"])
@given(chunks=quotas, steps=st.lists(stores | changes, max_size=60))
def test_nobody_loses_what_its_quota_has_and_everybody_gets_there(policy, chunks, steps):
    shared = Shared(policy, chunks, 1)
    for what, tenant, *rest in steps:
        if what == "quota":
            shared.set_quota(tenant, *rest)
            continue
        had = [shared.has(one) for one in range(TENANTS)]
        outcomes = shared.store(tenant, *rest)
        for one in range(TENANTS):
            kept = min(had[one], shared.quotas[one] * CHUNK)
            assert one == tenant or shared.has(one) >= kept, f"tenant {tenant} took chunks of {one}"
        refused = {ReserveOutcome.QUOTA, ReserveOutcome.POOL_PINNED, ReserveOutcome.WORTH_LESS}
        assert not any(within and outcome in refused for within, outcome in outcomes)
    validate(shared.pool)
    shared.pool.close()


@pytest.mark.parametrize("policy", ["VALUE", "LRU"])
@given(chunks=quotas, steps=st.lists(stores | changes | leases | releases, max_size=60))
def test_what_a_tenant_stores_beyond_its_quota_takes_nothing_that_others_have_within_theirs(
    policy, chunks, steps
):
    """With chunks of two sizes, of which a longer one takes a slab, and while any chunk may be in use."""
    shared = Shared(policy, chunks, 4)
    for what, *rest in steps:
        if what == "quota":
            shared.set_quota(*rest)
        elif what == "lease":
            shared.lease(*rest)
        elif what == "release":
            for ticket in shared.tickets:
                shared.pool.release(ticket)
            shared.tickets.clear()
        else:
            had = [shared.has(one) for one in range(TENANTS)]
            outcomes = shared.store(*rest)
            for one in range(TENANTS):
                kept = min(had[one], (shared.quotas[one] - 4) * CHUNK + 1)
                assert one == rest[0] or shared.has(one) >= kept or any(within for within, _ in outcomes)
    validate(shared.pool)
    shared.pool.close()
