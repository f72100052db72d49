"""`p2p_mac`: loads of 64 × 1 MiB from another process's L1 by the tier that reads peers, with `p2p.mac` and without.

A child process owns the records.  It serves them twice, with MACs and without, over one UCX engine; two readers in this
process take turns.  A load is timed from its call to its outcomes: the bytes are read, verified, and confirmed by the
owner.  Each lookup before it is not timed.

Sketch: GMAC of 64 MiB takes 6 ms at 10 GB/s from memory; owner and reader compute it at the same time, on a core each,
after a read of 20 ms at 3.3 GB/s.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from benchmarks.common import cpu_seconds, figure, median_spread, scratch, sized
from kvstrata.p2p.engines.ucx import UcxEngine
from kvstrata.p2p.settings import PeerSettings
from kvstrata.p2p.tier import PeerTier
from kvstrata.rpc.cluster_wire import Owner
from kvstrata.storage.base import LoadItem, LoadStatus
from kvstrata.testing.strategies import IDENTITY, lent_context, record_length
from tests.harness.child import Child
from tests.harness.directory_double import Directory
from tests.harness.l1 import L1, chain

RECORDS = sized(64, 4)
SIZE = (1 << 20) - 16_384
RECORD = record_length(SIZE)
BYTES = RECORDS * RECORD
KEYS = chain("mac", RECORDS)
WARM_UP, ROUNDS = sized((3, 30), (1, 1))


class Reader:
    """A reader of one owner, with a pool of its own."""

    def __init__(self, owner: Owner, *, mac: bool) -> None:
        # One process may reserve an eighth of a pool.
        self.pool = L1(9 * BYTES + (64 << 20))
        self.tickets = {
            key: self.pool.pool.reserve(key, b"", RECORD, self.pool.row, IDENTITY, 1)[0] for key in KEYS
        }
        self.directory = Directory()
        self.directory.tell(owner, KEYS)
        settings = PeerSettings(
            (self.directory.endpoint,), "ucx", mac=mac, lookup_timeout_ms=30_000, load_timeout_ms=30_000
        )
        self.tier = PeerTier(settings, UcxEngine)

    async def open(self) -> None:
        pool = self.pool.pool
        context = lent_context(lambda key: None, "reader")
        await self.tier.open(
            context._replace(region_address=pool.extents_address, region_bytes=pool.extents_bytes)
        )

    def items(self) -> list[LoadItem]:
        """All records, each with a hold on its extent here."""
        items = []
        for key, ticket in self.tickets.items():
            hold = self.pool.pool.hold(key, ticket, 0)
            assert hold is not None
            items.append(LoadItem(key, hold))
        return items

    async def load(self) -> float:
        """Look all records up, and load them; return the seconds of the load."""
        await self.tier.exists(KEYS)
        items = self.items()
        begun_s = time.perf_counter()
        outcomes = await self.tier.load(items)
        took_s = time.perf_counter() - begun_s
        assert {outcome.status for outcome in outcomes} == {LoadStatus.LOADED}, outcomes
        return took_s

    async def close(self) -> None:
        await self.tier.close()
        self.directory.close()
        self.pool.pool.close()


async def measure(owner: Child) -> tuple[dict[bool, list[float]], dict[bool, list[float]]]:
    """Return the seconds of each load with MACs (True) and without, and the owner's seconds of CPU in it."""
    found = owner.ask("open", records=RECORDS, size=SIZE)
    readers = {
        mac: Reader(Owner("owner", 1, one["endpoint"], RECORDS, True, one["key"]), mac=mac)
        for mac, one in ((False, found["plain"]), (True, found["mac"]))
    }
    seconds: dict[bool, list[float]] = {mac: [] for mac in readers}
    owners: dict[bool, list[float]] = {mac: [] for mac in readers}
    for reader in readers.values():
        await reader.open()
    for number in range(WARM_UP + ROUNDS):
        for mac, reader in readers.items():
            before_s = cpu_seconds(owner.pid)
            took_s = await reader.load()
            if number >= WARM_UP:
                seconds[mac].append(took_s)
                owners[mac].append(cpu_seconds(owner.pid) - before_s)
    for reader in readers.values():
        await reader.close()
    return seconds, owners


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    with scratch("p2p-mac") as folder, Child("benchmarks.p2p_owner", log=folder / "owner.log") as owner:
        seconds, owners = asyncio.run(measure(owner))
    speeds = {mac: [BYTES / one / 1e9 for one in took] for mac, took in seconds.items()}
    value, spread = median_spread(speeds[True])
    without = statistics.median(speeds[False])
    return [
        figure(
            "p2p_mac",
            value=value,
            unit="GB/s",
            ratio=value / without,
            ratio_to=f"without MACs, {without:.2g} GB/s",
            target="reported",
            ok=True,
            spread=spread,
            load_ms={
                name: statistics.median(seconds[mac]) * 1000
                for name, mac in (("with", True), ("without", False))
            },
            owner_cpu_ms={
                name: statistics.median(owners[mac]) * 1000
                for name, mac in (("with", True), ("without", False))
            },
        )
    ]
