"""`mooncake_put`, `mooncake_load`, `exists_1024_mooncake`: the adapter in its host against the bare client.

A master and a holder run on this machine, and all transfers go over tcp on the loopback: 64 records of 1 MiB a batch,
and 1,024 small records for `exists`.  In each round three ways take turns, so that a busy machine slows all alike: the
adapter in its host; the bare client in this process; and a bare process, which is the floor (`floor_ratio`).  The bare
process blocks on a socket, calls the bare client, verifies the loaded records as the adapter does, and answers with a
byte for each record.  No adapter that verifies and that runs in a process of its own can be faster.

Sketch: before a put the adapter asks which records exist (one call, 0.1 ms), after a load it verifies 64 MiB (3 ms at
20 GB/s), and its host costs two messages a batch, in addition to 30 to 90 ms of transfer.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from benchmarks.common import ROOT, figure, median_spread, scratch, sized
from kvstrata.clock import SystemClock
from kvstrata.memory import linux
from kvstrata.native.core import (
    CopyOutcome,
    ExtentsMap,
    Hold,
    LentHold,
    RecordSpec,
    Verifier,
    names_of,
    record_bytes,
    seal_record,
)
from kvstrata.storage.base import AdapterContext, LoadItem, LoadStatus, Presence, PutItem, PutStatus
from kvstrata.storage.config import configure_tier
from kvstrata.storage.host.frames import MAX_FRAME_BYTES
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.media.mooncake.adapter import KEY_PREFIX, VERIFIERS
from tests.harness import mooncake

ITEMS = sized(64, 8)
PAYLOAD_BYTES = 1 << 20
SMALL_BYTES = 4096
EXISTS = 1024
WARM_UP, ROUNDS = sized((3, 42), (1, 2))
EXISTS_ROUNDS = sized(300, 5)
ORDERS = tuple(itertools.permutations(range(3)))
"""The orders in which the three ways take turns."""
MOVE_TARGET, EXISTS_TARGET = 0.95, 1.2


class Extents:
    """Memory in place of a pool: one extent for each record to put, and one for each to load."""

    def __init__(self, payload_bytes: int, fd: int = -1) -> None:
        """`fd`: of another process's extents of the same size; without it, there is memory of its own."""
        self.payload_bytes = payload_bytes
        self.record_bytes = record_bytes(1, payload_bytes)
        self.stride_bytes = -(-self.record_bytes // 4096) * 4096
        self.length = 2 * ITEMS * self.stride_bytes
        self.fd = fd
        if fd < 0:
            self.fd = linux.create_memfd("bench-mooncake")
            os.ftruncate(self.fd, self.length)
        self.map = ExtentsMap(self.fd, self.length)

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
            seal_record(self.address(i, for_put=True), self.record_bytes, spec, [self.payload_bytes])

    def hold(self, i: int, key: bytes, *, for_put: bool) -> Hold:
        """Return a hold on extent `i`."""
        offset = self.address(i, for_put=for_put) - self.map.address
        hold = LentHold(self.map, key, offset, self.record_bytes, writable=not for_put, dropped=lambda: None)
        return cast("Hold", hold)


class Round(NamedTuple):
    """Seconds of the same work by the adapter, by the bare client, and by a bare process with such a client."""

    ours: float
    raw: float
    floor: float


def keys_of(number: int, count: int = ITEMS) -> list[bytes]:
    """Return keys that no other number has."""
    return [hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(count)]


class Bare:
    """The bare client."""

    def __init__(self, setup: dict[str, Any], extents: Extents) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._extents = extents
        self._store = MooncakeDistributedStore()
        assert self._store.setup(dict(setup)) == 0
        assert self._store.register_buffer(extents.map.address, extents.length) == 0
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)

    def put(self, keys: list[bytes]) -> bool:
        """Put the sealed records; returns whether all are stored."""
        sources = [self._extents.address(i, for_put=True) for i in range(len(keys))]
        lengths = [self._extents.record_bytes] * len(keys)
        return set(self._store.batch_put_from(names_of(KEY_PREFIX, keys), sources, lengths)) == {0}

    def load(self, keys: list[bytes], *, verified: bool) -> bool:
        """Load records; returns whether all are there, and sound."""
        places = [self._extents.address(i, for_put=False) for i in range(len(keys))]
        lengths = [self._extents.record_bytes] * len(keys)
        loaded = self._store.batch_get_into(names_of(KEY_PREFIX, keys), places, lengths) == lengths
        if not verified:
            return loaded
        outcomes = self._verifier.verify_stored(list(zip(places, lengths, keys, strict=True)))
        return loaded and set(outcomes) == {CopyOutcome.OK}

    def exists(self, keys: list[bytes]) -> bool:
        """Whether all records are there."""
        return set(self._store.batch_is_exist(names_of(KEY_PREFIX, keys))) == {1}

    def remove(self, keys: list[bytes]) -> bool:
        """Remove records; returns whether all were there."""
        return set(self._store.batch_remove(names_of(KEY_PREFIX, keys), True)) == {0}


class BareProcess:
    """A process with a bare client, asked over a socket with frames as long as the host's."""

    def __init__(self, setup: dict[str, Any], extents: Extents) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), extents.fd)
        words = [json.dumps(setup), str(extents.payload_bytes), *map(str, fds)]
        command = [sys.executable, "-m", "benchmarks.mooncake", *words]
        self._process = subprocess.Popen(command, pass_fds=fds, stdout=subprocess.DEVNULL, cwd=ROOT)
        theirs.close()
        assert self._socket.recv(16) == b"ready", "the bare process has ended"

    def ask(self, what: str, keys: list[bytes]) -> bool:
        """Call a method of its `Bare`, and wait for the result."""
        self._socket.send(what.encode().ljust(16) + b"".join(keys))
        return self._socket.recv(MAX_FRAME_BYTES) == bytes([1]) * len(keys)

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


def serve_bare(setup: dict[str, Any], payload_bytes: int, channel_fd: int, extents_fd: int) -> None:
    """Body of the bare process."""
    bare = Bare(setup, Extents(payload_bytes, extents_fd))
    calls = {
        "put": bare.put,
        "load": functools.partial(bare.load, verified=True),
        "exists": bare.exists,
        "remove": bare.remove,
    }
    channel = socket.socket(fileno=channel_fd)
    channel.send(b"ready")
    while frame := channel.recv(MAX_FRAME_BYTES):
        keys = [bytes(frame[at : at + 32]) for at in range(16, len(frame), 32)]
        channel.send(bytes([calls[frame[:16].decode().strip()](keys)]) * len(keys))


class Bench:
    """An open adapter in its host, a bare client in this process and a bare process, on the same extents."""

    def __init__(self, setup: dict[str, Any], payload_bytes: int) -> None:
        self.extents = Extents(payload_bytes)
        self.adapter = HostedAdapter(configure_tier({"type": "mooncake_store", **setup}, 0), kill_ms=600_000)
        self.bare = Bare(setup, self.extents)
        self.process = BareProcess(setup, self.extents)

    async def close(self) -> None:
        """End both processes."""
        await self.adapter.close()
        self.process.close()

    async def ours(self, keys: list[bytes]) -> tuple[float, float]:
        """Return the seconds of a put and of a load by the adapter."""
        puts = [PutItem(key, self.extents.hold(i, key, for_put=True)) for i, key in enumerate(keys)]
        begun_s = time.perf_counter()
        stored = await self.adapter.put(puts)
        put_s = time.perf_counter() - begun_s
        assert {outcome.status for outcome in stored} == {PutStatus.STORED}, stored
        loads = [LoadItem(key, self.extents.hold(i, key, for_put=False)) for i, key in enumerate(keys)]
        begun_s = time.perf_counter()
        loaded = await self.adapter.load(loads)
        load_s = time.perf_counter() - begun_s
        assert {outcome.status for outcome in loaded} == {LoadStatus.LOADED}, loaded
        assert await self.adapter.delete(keys) == len(keys)
        return put_s, load_s

    async def raw(self, keys: list[bytes]) -> tuple[float, float]:
        """Return the seconds of a put and of a load by the bare client, which verifies nothing."""
        bare = self.bare
        times = timed(bare.put, keys), timed(functools.partial(bare.load, verified=False), keys)
        assert bare.remove(keys)
        return times

    async def floor(self, keys: list[bytes]) -> tuple[float, float]:
        """Return the seconds of a put and of a load by the bare process."""
        ask = self.process.ask
        times = timed(functools.partial(ask, "put"), keys), timed(functools.partial(ask, "load"), keys)
        assert ask("remove", keys)
        return times

    async def move(self) -> tuple[list[Round], list[Round]]:
        """Measure rounds of puts and of loads."""
        ways, puts, loads = (self.ours, self.raw, self.floor), [], []
        for number in range(WARM_UP + ROUNDS):
            times: dict[int, tuple[float, float]] = {}
            for place in ORDERS[number % len(ORDERS)]:
                keys = keys_of(len(ways) * number + place)
                self.extents.seal(keys)
                times[place] = await ways[place](keys)
            puts.append(Round(*(times[place][0] for place in range(len(ways)))))
            loads.append(Round(*(times[place][1] for place in range(len(ways)))))
        return puts[WARM_UP:], loads[WARM_UP:]

    async def exists(self) -> list[Round]:
        """Measure rounds of `exists` for EXISTS stored records."""
        keys = keys_of(1 << 20, EXISTS)
        for begin in range(0, EXISTS, ITEMS):
            part = keys[begin : begin + ITEMS]
            self.extents.seal(part)
            holds = [self.extents.hold(i, key, for_put=True) for i, key in enumerate(part)]
            await self.adapter.put([PutItem(key, hold) for key, hold in zip(part, holds, strict=True)])
        ask = functools.partial(self.process.ask, "exists")
        rounds = []
        for number in range(WARM_UP + EXISTS_ROUNDS):
            times: dict[int, float] = {}
            for place in ORDERS[number % len(ORDERS)]:
                if place:
                    times[place] = timed(self.bare.exists if place == 1 else ask, keys)
                    continue
                begun_s = time.perf_counter()
                found = await self.adapter.exists(keys)
                times[place] = time.perf_counter() - begun_s
                assert {f.presence for f in found} == {Presence.PRESENT}
            rounds.append(Round(times[0], times[1], times[2]))
        return rounds[WARM_UP:]


def timed(call: Callable[[list[bytes]], bool], keys: list[bytes]) -> float:
    """Return the seconds of a call that must return true."""
    begun_s = time.perf_counter()
    done = call(keys)
    seconds = time.perf_counter() - begun_s
    assert done
    return seconds


async def measure(setup: dict[str, Any]) -> dict[str, list[Round]]:
    """Return all rounds by figure."""
    found: dict[str, list[Round]] = {}
    bench = Bench(setup, PAYLOAD_BYTES)
    await bench.adapter.open(bench.extents.context())
    found["mooncake_put"], found["mooncake_load"] = await bench.move()
    await bench.close()
    bench = Bench(setup, SMALL_BYTES)
    await bench.adapter.open(bench.extents.context())
    found["exists_1024_mooncake"] = await bench.exists()
    await bench.close()
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
    if len(sys.argv) > 2:
        serve_bare(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # the bare clients' threads may crash an interpreter that exits normally
