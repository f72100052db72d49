"""Parts of `host_cost` and `mooncake`: shared extents, ways to a medium, and rounds in which these ways
take turns.

One of the ways is a bare process, which does what an adapter host does for its caller, without the host's code: it
blocks on a socket and lets an adapter or a client do one batch at a time.  No adapter in a process of its own can be
faster.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

from benchmarks.common import ROOT, scratch
from kvstrata.clock import SystemClock
from kvstrata.memory import linux
from kvstrata.native.core import (
    CopyOutcome,
    ExtentsMap,
    Hold,
    LentHold,
    RecordSpec,
    Verifier,
    record_bytes,
    seal_record,
)
from kvstrata.tiers.base import AdapterContext, Ask, Item, Outcome, Presence, StorageAdapter
from kvstrata.tiers.host.frames import MAX_FRAME_BYTES
from kvstrata.tiers.media.mooncake.adapter import KEY_PREFIX, VERIFIERS
from tests.harness import mooncake

ORDERS = tuple(itertools.permutations(range(3)))
"""The orders in which three ways take turns."""


def keys_of(number: int, count: int) -> list[bytes]:
    """Return keys that no other number has."""
    return [hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(count)]


class Extents:
    """Memory in place of a pool: one extent for each record to put, and one for each to load."""

    def __init__(self, items: int, payload_bytes: int, fd: int = -1) -> None:
        """`fd`: of another process's extents of the same size; without it, there is memory of its own."""
        self.items, self.payload_bytes = items, payload_bytes
        self.record_bytes = record_bytes(1, payload_bytes)
        self._stride_bytes = -(-self.record_bytes // 4096) * 4096
        self.length = 2 * items * self._stride_bytes
        self.fd = fd
        if fd < 0:
            self.fd = linux.create_memfd("bench-extents")
            os.ftruncate(self.fd, self.length)
        self.map = ExtentsMap(self.fd, self.length)

    def context(self) -> AdapterContext:
        """Return the context with which adapters are opened."""
        return AdapterContext(
            "bench", SystemClock(), self.map.address, self.length, lambda key: None, self.fd
        )

    def address(self, i: int, *, for_put: bool) -> int:
        """Return the address of extent `i`."""
        return self.map.address + (i if for_put else self.items + i) * self._stride_bytes

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

    def close(self) -> None:
        """Unmap the memory and close its file."""
        self.map.close()
        os.close(self.fd)


class Way:
    """A way to a medium, here an adapter. Each call is for a batch of keys and returns whether all went well."""

    def __init__(self, adapter: StorageAdapter, extents: Extents) -> None:
        self.adapter = adapter
        self.extents = extents

    async def open(self) -> None:
        """Make the medium ready."""
        await self.adapter.open(self.extents.context())

    async def put(self, keys: list[bytes]) -> bool:
        """Put the sealed records; of more keys than there are extents, again from the first extent on."""
        items = [self._item(i % self.extents.items, key, for_put=True) for i, key in enumerate(keys)]
        await self.adapter.put(items)
        return {item.outcome for item in items} == {Outcome.STORED}

    async def exists(self, keys: list[bytes]) -> bool:
        """Look the records up."""
        return set(await self.adapter.exists(b"".join(keys), Ask())) == {Presence.PRESENT}

    async def load(self, keys: list[bytes]) -> bool:
        """Load the records, and verify them."""
        items = [self._item(i, key, for_put=False) for i, key in enumerate(keys)]
        await self.adapter.load(items)
        return {item.outcome for item in items} == {Outcome.LOADED}

    async def delete(self, keys: list[bytes]) -> bool:
        """Delete the records."""
        return await self.adapter.delete(b"".join(keys)) == len(keys)

    async def close(self) -> None:
        """Let go of the medium."""
        await self.adapter.close()

    def _item(self, i: int, key: bytes, *, for_put: bool) -> Item:
        return Item(key, self.extents.hold(i, key, for_put=for_put))


class BareProcess(Way):
    """A process that runs `module` with `words`, and answers frames as long as the host's by `serve_bare`."""

    def __init__(self, module: str, words: Sequence[str], extents: Extents) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), extents.fd)
        command = [sys.executable, "-m", module, *words, *map(str, fds)]
        self._process = subprocess.Popen(command, pass_fds=fds, stdout=subprocess.DEVNULL, cwd=ROOT)
        theirs.close()

    async def open(self) -> None:
        assert self._socket.recv(16) == b"ready", "the bare process has ended"

    def _ask(self, what: str, keys: list[bytes]) -> bool:
        self._socket.send(what.encode().ljust(16) + b"".join(keys))
        return self._socket.recv(MAX_FRAME_BYTES) == bytes([1]) * len(keys)

    async def put(self, keys: list[bytes]) -> bool:
        return self._ask("put", keys)

    async def exists(self, keys: list[bytes]) -> bool:
        return self._ask("exists", keys)

    async def load(self, keys: list[bytes]) -> bool:
        return self._ask("load", keys)

    async def delete(self, keys: list[bytes]) -> bool:
        return self._ask("delete", keys)

    async def close(self) -> None:
        self._socket.close()
        self._process.wait()


async def serve_bare(channel_fd: int, way: Way) -> None:
    """Body of the bare process."""
    await way.open()
    channel = socket.socket(fileno=channel_fd)
    channel.send(b"ready")
    while frame := channel.recv(MAX_FRAME_BYTES):
        keys = [bytes(frame[at : at + 32]) for at in range(16, len(frame), 32)]
        call = getattr(way, frame[:16].decode().strip())
        channel.send(bytes([await call(keys)]) * len(keys))
    await way.close()


async def turns(
    ways: Sequence[Way],
    calls: Sequence[str],
    rounds: tuple[int, int],
    items: int,
    known: list[bytes] | None = None,
) -> dict[str, list[list[float]]]:
    """By call the seconds of each of three ways in each round, after some rounds to warm up.

    Each way does all calls in its turn, with fresh records, which are deleted at its end; or with the `known` ones,
    which stay.
    """
    found: dict[str, list[list[float]]] = {call: [] for call in calls}
    warm_up, counted = rounds
    for number in range(warm_up + counted):
        times: dict[int, list[float]] = {}
        for place in ORDERS[number % len(ORDERS)]:
            way, keys = ways[place], known or keys_of(len(ways) * number + place, items)
            if known is None:
                ways[0].extents.seal(keys)
            times[place] = []
            for call in calls:
                begun_s = time.perf_counter()
                went_well = await getattr(way, call)(keys)
                times[place].append(time.perf_counter() - begun_s)
                assert went_well, (place, call)
            assert known or await way.delete(keys)
        for i, call in enumerate(calls if number >= warm_up else ()):
            found[call].append([times[place][i] for place in range(len(ways))])
    return found


class MooncakeClient(Way):
    """Mooncake's own client in this process."""

    def __init__(self, setup: dict[str, Any], extents: Extents, *, verifies: bool = True) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.extents = extents
        self._store = MooncakeDistributedStore()
        assert self._store.setup(dict(setup)) == 0
        assert self._store.register_buffer(extents.map.address, extents.length) == 0
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1) if verifies else None

    async def open(self) -> None:
        pass

    async def _call(self, name: str, keys: list[bytes], *arguments: Any) -> Any:
        return getattr(self._store, name)([KEY_PREFIX + key.hex() for key in keys], *arguments)

    async def put(self, keys: list[bytes]) -> bool:
        places, lengths = self._places(keys, for_put=True)
        return set(await self._call("batch_put_from", keys, places, lengths)) == {0}

    async def exists(self, keys: list[bytes]) -> bool:
        return set(await self._call("batch_is_exist", keys)) == {1}

    async def load(self, keys: list[bytes]) -> bool:
        places, lengths = self._places(keys, for_put=False)
        loaded = await self._call("batch_get_into", keys, places, lengths)
        if self._verifier is not None and loaded == lengths:
            outcomes = self._verifier.verify_stored(list(zip(places, lengths, keys, strict=True)))
            return set(outcomes) == {CopyOutcome.OK}
        return bool(loaded == lengths)

    async def delete(self, keys: list[bytes]) -> bool:
        return set(await self._call("batch_remove", keys, True)) == {0}

    async def close(self) -> None:
        pass

    def _places(self, keys: list[bytes], *, for_put: bool) -> tuple[list[int], list[int]]:
        extents = self.extents
        places = [extents.address(i % extents.items, for_put=for_put) for i in range(len(keys))]
        return places, [extents.record_bytes] * len(keys)


def beside_mooncake(module: str, *, segment_mb: int) -> Any:
    """What `module` prints as JSON with a cluster's `setup`, in a process that finds Mooncake's libraries."""
    with scratch("mooncake") as folder, mooncake.cluster(folder, segment_mb=segment_mb) as (master, _):
        command = [sys.executable, "-m", module, json.dumps(master.setup())]
        done = subprocess.run(
            command, env=mooncake.environment(), cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=1200
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {done.returncode}")
    return json.loads(done.stdout)
