"""The pools of this instance that reads from peers fill: the shared one, and tenants' own pools.

A storage key belongs to one tenant for ever, since the tenant's identity is in it.  So whoever asks for keys on behalf
of a tenant with an own pool says so once before (`belongs`), and a chunk is read only from the same tenant's own pool
at a peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.p2p.engines.base import Region
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.storage.base import AdapterContext, LoadItem

SHARED = ""
"""Stands for the shared pool where a tenant stands for its own pool."""


class Destination(NamedTuple):
    """One pool."""

    region: int
    """Its number among the regions that the transfer engine has registered."""
    tenant: str
    length: int


class Destinations:
    """See the module. Belongs to the event loop."""

    def __init__(self, *, max_keys: int = 65_536) -> None:
        self._max_keys = max_keys
        self._by_address: dict[int, Destination] = {}
        self._tenants: dict[bytes, str] = {}
        """Key → tenant, for the keys of own pools that were asked for lately."""
        self._older: dict[bytes, str] = {}

    def open(self, context: AdapterContext) -> list[Region]:
        """Learn the pools; returns them in the order in which they must be registered."""
        pools = [(SHARED, context.region_address, context.region_bytes), *context.own_regions]
        for number, (tenant, address, length) in enumerate(pools):
            self._by_address[address] = Destination(number, tenant, length)
        return [Region(address, length) for _, address, length in pools]

    def belongs(self, keys: Iterable[bytes], tenant: str) -> None:
        """Note that these keys are of a tenant with an own pool. At least the last `max_keys` keys are remembered."""
        if len(self._tenants) >= self._max_keys:
            self._older, self._tenants = self._tenants, {}
        self._tenants.update(dict.fromkeys(keys, tenant))

    def tenant_of(self, key: bytes) -> str:
        """The tenant whose own pool the key belongs to, or SHARED."""
        return self._tenants.get(key) or self._older.get(key, SHARED)

    def of(self, item: LoadItem) -> Destination | None:
        """The pool that the item's extent lies in; None if the item is no whole extent of a pool with a storage key."""
        hold = item.hold
        found = self._by_address.get(hold.address - hold.offset)
        if found is None or len(item.key) != KEY_BYTES or not 0 <= hold.offset <= found.length - hold.length:
            return None
        return found
