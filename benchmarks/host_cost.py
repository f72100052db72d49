"""`host_cost`: puts and loads of 32 × 1 MiB by an adapter in an adapter host, against the same adapter in process.

The adapter is `fs`, first on tmpfs, where only memory limits the speed and the host's cost shows most, then on this
machine's disk, the usual medium of `fs`.  In each round the hosted adapter and the one in process take turns, so that a
busy machine slows both alike.

Sketch: the host adds two messages of 1.4 KB and a few context switches to a batch that moves 32 MiB.
"""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.common import figure, median_spread, scratch, sized
from kvstrata.clock import SystemClock
from kvstrata.memory import linux
from kvstrata.native.index import ExtentsMap
from kvstrata.native.lent import LentHold
from kvstrata.native.pool import Hold
from kvstrata.native.record import RecordSpec, record_bytes, seal_record
from kvstrata.storage.base import AdapterContext, LoadItem, LoadStatus, PutItem, PutStatus, StorageAdapter
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.host.channel import MAX_FRAME_BYTES
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.stack import innermost

ITEMS = 32
PAYLOAD_BYTES = 1 << 20
RECORD_BYTES = record_bytes(1, PAYLOAD_BYTES)
STRIDE_BYTES = -(-RECORD_BYTES // 4096) * 4096
WARM_UP, ROUNDS = sized((3, 21), (1, 2))
TARGET = 0.9


class Extents:
    """Memory in place of a pool: one extent for each record to put, and one for each to load."""

    def __init__(self) -> None:
        self.length = 2 * ITEMS * STRIDE_BYTES
        self.fd = linux.create_memfd("bench-host-cost")
        os.ftruncate(self.fd, self.length)
        self.map = ExtentsMap(self.fd, self.length)

    def context(self) -> AdapterContext:
        """Return the context with which the adapters are opened."""
        return AdapterContext(
            "bench", SystemClock(), self.map.address, self.length, lambda key: None, self.fd
        )

    def holds(self, number: int, *, for_put: bool) -> list[tuple[bytes, Hold]]:
        """Return the keys and holds of one batch; for a put the extents hold sealed records."""
        batch = []
        for i in range(ITEMS):
            key = hashlib.sha256(b"%d %d" % (number, i)).digest()
            offset = (i if for_put else ITEMS + i) * STRIDE_BYTES
            hold = LentHold(self.map, key, offset, RECORD_BYTES, writable=not for_put, dropped=lambda: None)
            if for_put:
                spec = RecordSpec(key, bytes(32), bytes(32), bytes(32), 256)
                seal_record(hold.address, RECORD_BYTES, spec, [PAYLOAD_BYTES])
            batch.append((key, cast("Hold", hold)))
        return batch

    def close(self) -> None:
        """Unmap the memory and close its file."""
        self.map.close()
        os.close(self.fd)


async def one_round(adapter: StorageAdapter, extents: Extents, number: int) -> tuple[float, float, float]:
    """Return the seconds of a put, an exists and a load of one batch; delete the batch."""
    puts = [PutItem(*item) for item in extents.holds(number, for_put=True)]
    begun_s = time.perf_counter()
    stored = await adapter.put(puts)
    put_s = time.perf_counter() - begun_s
    assert {outcome.status for outcome in stored} == {PutStatus.STORED}, stored
    keys = [item.key for item in puts]
    begun_s = time.perf_counter()
    await adapter.exists(keys)
    exists_s = time.perf_counter() - begun_s
    loads = [LoadItem(*item) for item in extents.holds(number, for_put=False)]
    begun_s = time.perf_counter()
    loaded = await adapter.load(loads)
    load_s = time.perf_counter() - begun_s
    assert {outcome.status for outcome in loaded} == {LoadStatus.LOADED}, loaded
    await adapter.delete(keys)
    return put_s, exists_s, load_s


async def compare(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return (in process, in a host) seconds of each round, by operation."""
    extents = Extents()
    adapters: list[StorageAdapter] = [
        innermost(configure_tier({"type": "fs", "base_path": str(folder / "in-process")}, 0).recipe),
        HostedAdapter(
            configure_tier({"type": "fs", "base_path": str(folder / "in-a-host")}, 1).recipe, kill_ms=60_000
        ),
    ]
    try:
        for adapter in adapters:
            await adapter.open(extents.context())
        rounds = []
        for number in range(WARM_UP + ROUNDS):
            times = {}
            for which in (0, 1) if number % 2 else (1, 0):
                times[which] = await one_round(adapters[which], extents, number)
            rounds.append((times[0], times[1]))
    finally:
        for adapter in adapters:
            await adapter.close()
        extents.close()
    return {
        operation: [(here[i], there[i]) for here, there in rounds[WARM_UP:]]
        for i, operation in enumerate(("put", "exists", "load"))
    }


def bare_round_trip_us(pause_s: float) -> float:
    """Return the median µs of a round trip to a bare child, with frames as long as an `exists` for 1,024 keys needs.

    The calls block, without event loop or thread, and the frames are neither packed nor read: no adapter host can be
    faster.  The pause of `pause_s` before each round trip stands for the time in which a medium answers and both cores
    go to sleep.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        here.close()
        while there.recv(MAX_FRAME_BYTES):
            there.send(bytes(16 + 1024 * 6))
        os._exit(0)
    there.close()
    question, times = bytes(16 + 1024 * 32), []
    for _ in range(301):
        time.sleep(pause_s)
        begun_s = time.perf_counter()
        here.send(question)
        here.recv(MAX_FRAME_BYTES)
        times.append(time.perf_counter() - begun_s)
    here.close()
    os.waitpid(child, 0)
    return round(statistics.median(times) * 1e6, 1)


@contextmanager
def on_tmpfs() -> Iterator[Path]:
    """Make a folder on tmpfs and remove it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir="/dev/shm") as folder:
        yield Path(folder)


def numbers(times: dict[str, list[tuple[float, float]]], medium: str) -> dict[str, Any]:
    """Return the medians of each operation in ms, and the host's speed as a share of the speed in process."""
    found: dict[str, Any] = {}
    for operation, pairs in times.items():
        here, there = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        found[f"{medium}_{operation}_ms"] = round(here * 1e3, 3)
        found[f"{medium}_{operation}_host_ms"] = round(there * 1e3, 3)
        found[f"{medium}_{operation}_ratio"] = round(here / there, 3)
    return found


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    bare = {
        "bare_round_trip_us": bare_round_trip_us(0),
        "bare_round_trip_paused_us": bare_round_trip_us(0.0007),
    }
    with on_tmpfs() as folder:
        memory = uvloop.run(compare(folder))
    with scratch("host-cost") as folder:
        disk = uvloop.run(compare(folder))
    parts = {**numbers(memory, "tmpfs"), **numbers(disk, "disk"), **bare}
    value = min(parts[f"tmpfs_{operation}_ratio"] for operation in ("put", "load"))
    ratios = [here / there for operation in ("put", "load") for here, there in memory[operation]]
    return [
        figure(
            "host_cost",
            value=value,
            unit="x",
            ratio=value,
            target=f">= {TARGET} x in process",
            ok=value >= TARGET,
            spread=median_spread(ratios)[1],
            ratio_to="the same adapter in process, on tmpfs; the worse of put and load",
            **parts,
        )
    ]
