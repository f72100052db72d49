"""Parts of `host_cost`, `mooncake` and `mooncake_hol`: shared extents, and a bare process that is asked over a socket.

The bare process does what an adapter host does for its caller, without the host's code: it blocks on a socket and lets
an adapter or a client do one batch at a time.  No adapter in a process of its own can be faster.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from benchmarks.common import ROOT
from kvstrata.clock import SystemClock
from kvstrata.memory import linux
from kvstrata.native.core import ExtentsMap, Hold, LentHold, RecordSpec, record_bytes, seal_record
from kvstrata.tiers.base import AdapterContext
from kvstrata.tiers.host.frames import MAX_FRAME_BYTES

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


class BareProcess:
    """A process that runs `module` with `words`, and answers frames as long as the host's by `serve_bare`."""

    def __init__(self, module: str, words: Sequence[str], extents: Extents) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), extents.fd)
        command = [sys.executable, "-m", module, *words, *map(str, fds)]
        self._process = subprocess.Popen(command, pass_fds=fds, stdout=subprocess.DEVNULL, cwd=ROOT)
        theirs.close()
        assert self._socket.recv(16) == b"ready", "the bare process has ended"

    def ask(self, what: str, keys: list[bytes]) -> bool:
        """Let it make a call for these keys, and wait for the result."""
        self._socket.send(what.encode().ljust(16) + b"".join(keys))
        return self._socket.recv(MAX_FRAME_BYTES) == bytes([1]) * len(keys)

    def end(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


async def serve_bare(channel_fd: int, calls: Mapping[str, Callable[[list[bytes]], Any]]) -> None:
    """Body of the bare process: `calls` return whether all keys went well, or a coroutine that does."""
    channel = socket.socket(fileno=channel_fd)
    channel.send(b"ready")
    while frame := channel.recv(MAX_FRAME_BYTES):
        keys = [bytes(frame[at : at + 32]) for at in range(16, len(frame), 32)]
        done = calls[frame[:16].decode().strip()](keys)
        channel.send(bytes([await done if inspect.isawaitable(done) else done]) * len(keys))
