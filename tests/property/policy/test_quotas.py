"""The ledger of tenants' bytes against a plain model that forgets nothing."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.policy.quotas import TenantLedger
from tests.harness.amount import amount

QUOTAS = {1: 100, 2: 30}
TENANTS = st.sampled_from([1, 2, 3])
KEYS = st.integers(0, 11).map(lambda number: bytes([number]) * 32)
LENGTHS = st.integers(1, 40)


class Ledger(RuleBasedStateMachine):
    """Every record of a key has the same tenant and length, as on a medium."""

    @initialize(limit=st.sampled_from([4, 100]))
    def begin(self, limit: int) -> None:
        self.limit = limit
        self.quotas = dict(QUOTAS)
        self.ledger = TenantLedger(QUOTAS, limit)
        self.of: dict[bytes, tuple[int, int]] = {}
        self.there: dict[bytes, None] = {}  # oldest first
        self.putting: list[bytes] = []

    def record(self, key: bytes, tenant: int, length: int) -> tuple[int, int]:
        return self.of.setdefault(key, (tenant, length))

    def use(self, key: bytes) -> None:
        if self.of[key][0] in self.quotas:
            self.there.pop(key, None)
            self.there[key] = None
            if len(self.there) > self.limit:
                del self.there[next(one for one in self.there if self.of[one][0] == self.of[key][0])]

    def bytes_of(self, tenant: int) -> int:
        keys = [*self.there, *self.putting]
        return sum(self.of[key][1] for key in keys if self.of[key][0] == tenant)

    @rule(key=KEYS, tenant=TENANTS, length=LENGTHS)
    def put(self, key: bytes, tenant: int, length: int) -> None:
        tenant, length = self.record(key, tenant, length)
        admitted = self.ledger.admit(tenant, key, length)
        fits = key in self.there or self.bytes_of(tenant) + length <= self.quotas.get(tenant, 10**9)
        assert admitted == fits
        if admitted:
            self.putting.append(key)

    @rule(data=st.data(), there=st.booleans())
    def put_ends(self, data: st.DataObject, there: bool) -> None:
        if self.putting:
            key = self.putting.pop(data.draw(st.integers(0, len(self.putting) - 1)))
            tenant, length = self.of[key]
            self.ledger.ended(tenant, key, length, there)
            if there:
                self.use(key)

    @rule(key=KEYS, tenant=TENANTS, length=LENGTHS)
    def loaded(self, key: bytes, tenant: int, length: int) -> None:
        tenant, length = self.record(key, tenant, length)
        self.ledger.found(tenant, key, length)
        self.use(key)

    @rule(keys=st.lists(KEYS))
    def gone(self, keys: list[bytes]) -> None:
        self.ledger.gone(keys)
        for key in keys:
            self.there.pop(key, None)

    @rule(quotas=st.dictionaries(TENANTS, st.integers(1, 200)))
    def other_quotas(self, quotas: dict[int, int]) -> None:
        self.ledger.set_quotas(quotas)
        self.quotas = quotas
        self.there = {key: None for key in self.there if self.of[key][0] in quotas}

    @rule(tenant=TENANTS, need=LENGTHS, most=st.integers(1, 20))
    def room_is_made_of_the_tenants_own_oldest(self, tenant: int, need: int, most: int) -> None:
        leaving = self.ledger.to_leave(tenant, need, most)
        mine = [key for key in self.there if self.of[key][0] == tenant]
        assert leaving == mine[: len(leaving)] and len(leaving) <= most
        if tenant not in self.quotas or self.bytes_of(tenant) + need <= self.quotas[tenant]:
            assert not leaving, "keys leave although there is room"
        elif leaving and len(leaving) < most:
            left = self.bytes_of(tenant) - sum(self.of[key][1] for key in leaving)
            assert left + need <= self.quotas[tenant], "the keys that leave do not make enough room"

    @invariant()
    def sums_are_right(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.validate()
            for tenant in (1, 2, 3):
                assert self.ledger.used_bytes(tenant) == self.bytes_of(tenant)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=amount(50, 100))
