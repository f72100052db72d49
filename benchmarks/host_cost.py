"""`host_cost`: puts and loads of 32 × 1 MiB by an adapter in an adapter host, against the same adapter in process.

The adapter is `fs`, first on tmpfs, where only memory limits the speed and the host's cost shows most, then on this
machine's disk, the usual medium of `fs`.  In each round three ways take turns, so that a busy machine slows all alike:
the adapter in process, the adapter in its host, and the adapter in a bare process, which is the floor (`_floor`).  The
bare process blocks on a socket and lets the adapter do one batch at a time, without the host's code.

Sketch: the host adds two messages of 1.4 KB and a few context switches to a batch that moves 32 MiB.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.common import ROOT, figure, median_spread, scratch, sized
from kvstrata.clock import SystemClock
from kvstrata.memory import linux
from kvstrata.native.core import ExtentsMap, Hold, LentHold, RecordSpec, record_bytes, seal_record
from kvstrata.storage.base import (
    AdapterContext,
    LoadItem,
    LoadStatus,
    Presence,
    PutItem,
    PutStatus,
    StorageAdapter,
)
from kvstrata.storage.config import configure_tier
from kvstrata.storage.host.frames import MAX_FRAME_BYTES
from kvstrata.storage.host.parent import HostedAdapter

ITEMS = 32
PAYLOAD_BYTES = 1 << 20
RECORD_BYTES = record_bytes(1, PAYLOAD_BYTES)
STRIDE_BYTES = -(-RECORD_BYTES // 4096) * 4096
WARM_UP, ROUNDS = sized((6, 36), (1, 2))
ORDERS = tuple(itertools.permutations(range(3)))
"""The orders in which the three ways take turns."""
TARGET = 0.9


class Extents:
    """Memory in place of a pool: one extent for each record to put, and one for each to load."""

    def __init__(self, fd: int = -1) -> None:
        """`fd`: of another process's extents; without it, there is memory of its own."""
        self.length = 2 * ITEMS * STRIDE_BYTES
        self.fd = fd
        if fd < 0:
            self.fd = linux.create_memfd("bench-host-cost")
            os.ftruncate(self.fd, self.length)
        self.map = ExtentsMap(self.fd, self.length)

    def context(self) -> AdapterContext:
        """Return the context with which the adapters are opened."""
        return AdapterContext(
            "bench", SystemClock(), self.map.address, self.length, lambda key: None, self.fd
        )

    def seal(self, keys: list[bytes]) -> None:
        """Seal a record of each key in the extents for puts."""
        for i, key in enumerate(keys):
            spec = RecordSpec(key, bytes(32), bytes(32), bytes(32), 256)
            seal_record(self.map.address + i * STRIDE_BYTES, RECORD_BYTES, spec, [PAYLOAD_BYTES])

    def hold(self, i: int, key: bytes, *, for_put: bool) -> Hold:
        """Return a hold on extent `i`."""
        offset = (i if for_put else ITEMS + i) * STRIDE_BYTES
        hold = LentHold(self.map, key, offset, RECORD_BYTES, writable=not for_put, dropped=lambda: None)
        return cast("Hold", hold)

    def close(self) -> None:
        """Unmap the memory and close its file."""
        self.map.close()
        os.close(self.fd)


class Way:
    """The adapter, which calls of this process reach."""

    def __init__(self, adapter: StorageAdapter, extents: Extents) -> None:
        self._adapter = adapter
        self._extents = extents

    async def put(self, keys: list[bytes]) -> bool:
        """Put the sealed records; returns whether all are stored."""
        items = [PutItem(key, self._extents.hold(i, key, for_put=True)) for i, key in enumerate(keys)]
        return {outcome.status for outcome in await self._adapter.put(items)} == {PutStatus.STORED}

    async def exists(self, keys: list[bytes]) -> bool:
        """Whether all records are there."""
        return {answer.presence for answer in await self._adapter.exists(keys)} == {Presence.PRESENT}

    async def load(self, keys: list[bytes]) -> bool:
        """Load the records; returns whether all are sound."""
        items = [LoadItem(key, self._extents.hold(i, key, for_put=False)) for i, key in enumerate(keys)]
        return {outcome.status for outcome in await self._adapter.load(items)} == {LoadStatus.LOADED}

    async def delete(self, keys: list[bytes]) -> bool:
        """Delete the records; returns whether all were there."""
        return await self._adapter.delete(keys) == len(keys)

    async def open(self) -> None:
        """Open the adapter."""
        await self._adapter.open(self._extents.context())

    async def close(self) -> None:
        """Close the adapter."""
        await self._adapter.close()


class BareProcess(Way):
    """The adapter in a bare process."""

    def __init__(self, folder: Path, extents: Extents) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), extents.fd)
        command = [sys.executable, "-m", "benchmarks.host_cost", str(folder), *map(str, fds)]
        self._process = subprocess.Popen(command, pass_fds=fds, cwd=ROOT)
        theirs.close()

    def _ask(self, what: bytes, keys: list[bytes]) -> bool:
        self._socket.send(what.ljust(16) + b"".join(keys))
        return self._socket.recv(MAX_FRAME_BYTES) == bytes([1]) * len(keys)

    async def put(self, keys: list[bytes]) -> bool:
        return self._ask(b"put", keys)

    async def exists(self, keys: list[bytes]) -> bool:
        return self._ask(b"exists", keys)

    async def load(self, keys: list[bytes]) -> bool:
        return self._ask(b"load", keys)

    async def delete(self, keys: list[bytes]) -> bool:
        return self._ask(b"delete", keys)

    async def open(self) -> None:
        assert self._socket.recv(16) == b"ready", "the bare process has ended"

    async def close(self) -> None:
        self._socket.close()
        self._process.wait()


def in_process(folder: Path, number: int) -> StorageAdapter:
    """Return the adapter, without a host."""
    return configure_tier({"type": "fs", "base_path": str(folder)}, number).make()


async def serve_bare(folder: Path, channel_fd: int, extents_fd: int) -> None:
    """Body of the bare process."""
    way = Way(in_process(folder, 2), Extents(extents_fd))
    await way.open()
    channel = socket.socket(fileno=channel_fd)
    channel.send(b"ready")
    calls = {b"put": way.put, b"exists": way.exists, b"load": way.load, b"delete": way.delete}
    while frame := channel.recv(MAX_FRAME_BYTES):
        keys = [bytes(frame[at : at + 32]) for at in range(16, len(frame), 32)]
        channel.send(bytes([await calls[frame[:16].strip()](keys)]) * len(keys))
    await way.close()


async def one_round(way: Way, extents: Extents, number: int) -> tuple[float, float, float]:
    """Return the seconds of a put, an exists and a load of one batch; delete the batch."""
    keys = [hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(ITEMS)]
    extents.seal(keys)
    times = []
    for call in (way.put, way.exists, way.load):
        begun_s = time.perf_counter()
        done = await call(keys)
        times.append(time.perf_counter() - begun_s)
        assert done, call
    assert await way.delete(keys)
    return times[0], times[1], times[2]


async def compare(folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Return (in process, in a host, in a bare process) seconds of each round, by operation."""
    extents = Extents()
    hosted = configure_tier({"type": "fs", "base_path": str(folder / "in-a-host")}, 1)
    ways = [
        Way(in_process(folder / "in-process", 0), extents),
        Way(HostedAdapter(hosted, kill_ms=60_000), extents),
        BareProcess(folder / "bare", extents),
    ]
    try:
        for way in ways:
            await way.open()
        rounds = []
        for number in range(WARM_UP + ROUNDS):
            times = {}
            for which in ORDERS[number % len(ORDERS)]:
                times[which] = await one_round(ways[which], extents, number)
            rounds.append((times[0], times[1], times[2]))
    finally:
        for way in ways:
            await way.close()
        extents.close()
    return {
        operation: [(here[i], there[i], bare[i]) for here, there, bare in rounds[WARM_UP:]]
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


def numbers(times: dict[str, list[tuple[float, float, float]]], medium: str) -> dict[str, Any]:
    """Return the medians of each operation in ms, and the speeds of host and bare process as shares of that in process.

    A share is the median of the rounds' own shares.
    """
    found: dict[str, Any] = {}
    for operation, rounds in times.items():
        for which, suffix in enumerate(("", "_host", "_floor")):
            ms = statistics.median(each[which] for each in rounds) * 1e3
            found[f"{medium}_{operation}{suffix}_ms"] = round(ms, 3)
            if which:
                share = statistics.median(each[0] / each[which] for each in rounds)
                found[f"{medium}_{operation}{suffix}_ratio"] = round(share, 3)
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
    value, worse = min((parts[f"tmpfs_{operation}_host_ratio"], operation) for operation in ("put", "load"))
    ratios = [here / there for operation in ("put", "load") for here, there, _ in memory[operation]]
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
            floor_ratio=parts[f"tmpfs_{worse}_floor_ratio"],
            **parts,
        )
    ]


if __name__ == "__main__":
    uvloop.run(serve_bare(Path(sys.argv[1]), *map(int, sys.argv[2:])))
