"""`mooncake_put`, `mooncake_load`, `exists_1024_mooncake`: the adapter in its host against the bare client.

A master and a holder run on this machine, and all transfers go over tcp on the loopback: 64 records of 1 MiB a batch,
and 1,024 small records for `exists`.  In each round the adapter and the bare client take turns, so that a busy machine
slows both alike.  Each figure also names its floor, which no adapter can exceed:

- `mooncake_load`: the bare client, and then the verification of the records, as the adapter does it.
- `exists_1024_mooncake`: the bare client in a bare process of its own, asked over a socket with frames like the host's.

Sketch: before a put the adapter asks which records exist (one call, 0.1 ms), after a load it verifies 64 MiB (3 ms at
20 GB/s), and its host costs two messages a batch, in addition to 30 to 90 ms of transfer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from benchmarks.common import ROOT, figure, median_spread, scratch, sized
from kvstrata.clock import SystemClock
from kvstrata.memory import linux
from kvstrata.native.index import ExtentsMap
from kvstrata.native.lent import LentHold
from kvstrata.native.pool import Hold
from kvstrata.native.record import CopyOutcome, RecordSpec, Verifier, record_bytes, seal_record
from kvstrata.storage.base import AdapterContext, LoadItem, LoadStatus, Presence, PutItem, PutStatus
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.host.channel import MAX_FRAME_BYTES
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.media.mooncake.adapter import VERIFIERS
from tests.harness import mooncake

ITEMS = sized(64, 8)
PAYLOAD_BYTES = 1 << 20
SMALL_BYTES = 4096
EXISTS = 1024
WARM_UP, ROUNDS = sized((3, 15), (1, 2))
EXISTS_ROUNDS = sized(101, 5)
MOVE_TARGET, EXISTS_TARGET = 0.95, 1.2


class Extents:
    """Memory in place of a pool: one extent for each record to put, and one for each to load."""

    def __init__(self, payload_bytes: int) -> None:
        self.record_bytes = record_bytes(1, payload_bytes)
        self.stride_bytes = -(-self.record_bytes // 4096) * 4096
        self.length = 2 * ITEMS * self.stride_bytes
        self.fd = linux.create_memfd("bench-mooncake")
        os.ftruncate(self.fd, self.length)
        self.map = ExtentsMap(self.fd, self.length)
        self._payload_bytes = payload_bytes

    def context(self) -> AdapterContext:
        """Return the context with which the adapter is opened."""
        return AdapterContext(
            "bench", SystemClock(), self.map.address, self.length, lambda key: None, self.fd
        )

    def address(self, i: int, *, for_put: bool) -> int:
        """Return the address of extent `i`."""
        return self.map.address + (i if for_put else ITEMS + i) * self.stride_bytes

    def seal(self, keys: Sequence[bytes]) -> None:
        """Seal a record of each key in the extents for puts."""
        for i, key in enumerate(keys):
            spec = RecordSpec(key, bytes(32), bytes(32), bytes(32), 256)
            seal_record(self.address(i, for_put=True), self.record_bytes, spec, [self._payload_bytes])

    def hold(self, i: int, key: bytes, *, for_put: bool) -> Hold:
        """Return a hold on extent `i`."""
        offset = self.address(i, for_put=for_put) - self.map.address
        hold = LentHold(self.map, key, offset, self.record_bytes, writable=not for_put, dropped=lambda: None)
        return cast("Hold", hold)


class Round(NamedTuple):
    """Seconds of the same work by the adapter, by the bare client, and by the bare program that is the floor."""

    ours: float
    raw: float
    floor: float


def keys_of(number: int, count: int = ITEMS) -> list[bytes]:
    """Return keys that no other number has."""
    return [hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(count)]


class Bench:
    """An open adapter in its host and a bare client in this process, on the same extents."""

    def __init__(self, setup: dict[str, Any], payload_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.extents = Extents(payload_bytes)
        self.setup = setup
        self.adapter = HostedAdapter(
            configure_tier({"type": "mooncake_store", **setup}, 0).recipe, kill_ms=600_000
        )
        self.store = MooncakeDistributedStore()
        assert self.store.setup(dict(setup)) == 0
        assert self.store.register_buffer(self.extents.map.address, self.extents.length) == 0
        self.verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)

    async def ours(self, number: int) -> tuple[float, float]:
        """Return the seconds of a put and of a load by the adapter."""
        extents, keys = self.extents, keys_of(number)
        extents.seal(keys)
        puts = [PutItem(key, extents.hold(i, key, for_put=True)) for i, key in enumerate(keys)]
        begun_s = time.perf_counter()
        stored = await self.adapter.put(puts)
        put_s = time.perf_counter() - begun_s
        assert {outcome.status for outcome in stored} == {PutStatus.STORED}, stored
        loads = [LoadItem(key, extents.hold(i, key, for_put=False)) for i, key in enumerate(keys)]
        begun_s = time.perf_counter()
        loaded = await self.adapter.load(loads)
        load_s = time.perf_counter() - begun_s
        assert {outcome.status for outcome in loaded} == {LoadStatus.LOADED}, loaded
        assert await self.adapter.delete(keys) == len(keys)
        return put_s, load_s

    def raw(self, number: int) -> tuple[float, float, float]:
        """Return the seconds of a put, of a load and of the load with verification by the bare client."""
        extents, keys = self.extents, keys_of(number)
        extents.seal(keys)
        names, lengths = [key.hex() for key in keys], [extents.record_bytes] * len(keys)
        sources, places = (
            [extents.address(i, for_put=for_put) for i in range(len(keys))] for for_put in (True, False)
        )
        begun_s = time.perf_counter()
        stored = self.store.batch_put_from(names, sources, lengths)
        put_s = time.perf_counter() - begun_s
        assert set(stored) == {0}, stored
        begun_s = time.perf_counter()
        loaded = self.store.batch_get_into(names, places, lengths)
        load_s = time.perf_counter() - begun_s
        assert loaded == lengths, loaded
        begun_s = time.perf_counter()
        outcomes = self.verifier.verify_stored(list(zip(places, lengths, keys, strict=True)))
        verify_s = time.perf_counter() - begun_s
        assert set(outcomes) == {CopyOutcome.OK}, outcomes
        assert set(self.store.batch_remove(names, True)) == {0}
        return put_s, load_s, load_s + verify_s

    async def move(self) -> tuple[list[Round], list[Round]]:
        """Measure rounds of puts and of loads."""
        puts, loads = [], []
        for number in range(WARM_UP + ROUNDS):
            if number % 2:
                ours, raw = await self.ours(number), self.raw(number)
            else:
                raw, ours = self.raw(number), await self.ours(number)
            puts.append(Round(ours[0], raw[0], raw[0]))
            loads.append(Round(ours[1], raw[1], raw[2]))
        return puts[WARM_UP:], loads[WARM_UP:]

    async def exists(self) -> list[Round]:
        """Measure rounds of `exists` for EXISTS stored records."""
        keys = keys_of(1 << 20, EXISTS)
        for begin in range(0, EXISTS, ITEMS):
            part = keys[begin : begin + ITEMS]
            self.extents.seal(part)
            holds = [self.extents.hold(i, key, for_put=True) for i, key in enumerate(part)]
            await self.adapter.put([PutItem(key, hold) for key, hold in zip(part, holds, strict=True)])
        names = ["kvstrata-" + key.hex() for key in keys]
        here, child = bare_child(self.setup)
        rounds = []
        for _ in range(WARM_UP + EXISTS_ROUNDS):
            begun_s = time.perf_counter()
            found = await self.adapter.exists(keys)
            ours_s = time.perf_counter() - begun_s
            assert {f.presence for f in found} == {Presence.PRESENT}
            begun_s = time.perf_counter()
            codes = self.store.batch_is_exist(names)
            raw_s = time.perf_counter() - begun_s
            assert set(codes) == {1}
            begun_s = time.perf_counter()
            here.send(b"".join(keys))
            answer = here.recv(MAX_FRAME_BYTES)
            floor_s = time.perf_counter() - begun_s
            assert answer == bytes([1]) * EXISTS
            rounds.append(Round(ours_s, raw_s, floor_s))
        here.close()
        child.wait()
        return rounds[WARM_UP:]


def bare_child(setup: dict[str, Any]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process with a bare client, and return the socket that asks it which keys exist."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "benchmarks.mooncake", json.dumps(setup), str(there.fileno())]
    child = subprocess.Popen(command, pass_fds=[there.fileno()], stdout=subprocess.DEVNULL, cwd=ROOT)
    there.close()
    assert here.recv(16) == b"ready", "the bare client's process has ended"
    return here, child


def answer_exists(setup: dict[str, Any], fd: int) -> None:
    """Body of that process: each frame holds keys, its answer a byte for each key."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup(dict(setup)) == 0
    there = socket.socket(fileno=fd)
    there.send(b"ready")
    while keys := there.recv(MAX_FRAME_BYTES):
        names = ["kvstrata-" + keys[at : at + 32].hex() for at in range(0, len(keys), 32)]
        there.send(bytes(store.batch_is_exist(names)))


async def measure(setup: dict[str, Any]) -> dict[str, list[Round]]:
    """Return all rounds by figure."""
    found: dict[str, list[Round]] = {}
    bench = Bench(setup, PAYLOAD_BYTES)
    await bench.adapter.open(bench.extents.context())
    found["mooncake_put"], found["mooncake_load"] = await bench.move()
    await bench.adapter.close()
    bench = Bench(setup, SMALL_BYTES)
    await bench.adapter.open(bench.extents.context())
    found["exists_1024_mooncake"] = await bench.exists()
    await bench.adapter.close()
    return found


def run() -> list[dict[str, Any]]:
    """Measure the figures in a process that finds Mooncake's libraries."""
    with scratch("mooncake") as folder, mooncake.cluster(folder, segment_mb=512) as (master, _):
        command = [sys.executable, "-m", "benchmarks.mooncake", json.dumps(master.setup())]
        done = subprocess.run(
            command, env=mooncake.environment(), cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=600
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {done.returncode}")
    rounds = {name: [Round(*pair) for pair in pairs] for name, pairs in json.loads(done.stdout).items()}
    figures = []
    gb = ITEMS * record_bytes(1, PAYLOAD_BYTES) / 1e9
    for name, raw_call in (("mooncake_put", "batch_put_from"), ("mooncake_load", "batch_get_into")):
        value, spread = median_spread([gb / pair.ours for pair in rounds[name]])
        ratio = median_spread([pair.raw / pair.ours for pair in rounds[name]])[0]
        figures.append(
            figure(
                name,
                value=value,
                unit="GB/s",
                ratio=ratio,
                ratio_to=f"raw {raw_call} of the same records",
                target=f"≥ {MOVE_TARGET} × raw",
                ok=ratio >= MOVE_TARGET,
                spread=spread,
                raw_gb_per_s=median_spread([gb / pair.raw for pair in rounds[name]])[0],
                floor_ratio=median_spread([pair.raw / pair.floor for pair in rounds[name]])[0],
                ratio_to_floor=median_spread([pair.floor / pair.ours for pair in rounds[name]])[0],
            )
        )
    name = "exists_1024_mooncake"
    value, spread = median_spread([pair.ours * 1e3 for pair in rounds[name]])
    ratio = median_spread([pair.ours / pair.raw for pair in rounds[name]])[0]
    figures.append(
        figure(
            name,
            value=value,
            unit="ms",
            ratio=ratio,
            ratio_to="raw batch_is_exist of the same keys",
            target=f"≤ {EXISTS_TARGET} × raw",
            ok=ratio <= EXISTS_TARGET,
            spread=spread,
            raw_ms=median_spread([pair.raw * 1e3 for pair in rounds[name]])[0],
            floor_ratio=median_spread([pair.floor / pair.raw for pair in rounds[name]])[0],
            ratio_to_floor=median_spread([pair.ours / pair.floor for pair in rounds[name]])[0],
        )
    )
    return figures


if __name__ == "__main__":
    if len(sys.argv) == 3:
        answer_exists(json.loads(sys.argv[1]), int(sys.argv[2]))
    else:
        print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # the bare clients' threads may crash an interpreter that exits normally
