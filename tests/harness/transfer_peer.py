"""A child process with NIXL over memory of its own; it takes requests as JSON lines (see child.py)."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import itertools
import mmap
import os
import socket
import sys
import threading
import zlib
from collections.abc import Coroutine, Mapping
from typing import Any

from kvstrata.p2p.nixl import NixlEngine, ReadItem, Region
from tests.harness import child


class Memory:
    """Shared memory like the pool's: a memfd, mapped, with a byte pattern of its own."""

    def __init__(self, length: int, seed: int = 0) -> None:
        fd = os.memfd_create("transfer", os.MFD_CLOEXEC)
        os.ftruncate(fd, length)
        self.mapping = mmap.mmap(fd, length)
        os.close(fd)
        self._pin = (ctypes.c_char * length).from_buffer(self.mapping)
        self.region = Region(ctypes.addressof(self._pin), length)
        if seed:
            self.fill(seed)

    def fill(self, seed: int) -> None:
        self.mapping[:] = pattern(seed, len(self.mapping))

    def close(self) -> None:
        del self._pin
        self.mapping.close()


def pattern(seed: int, length: int) -> bytes:
    """Return bytes that vary from place to place and between seeds (1 to 255)."""
    block = _block(seed)
    return (block * (length // len(block) + 1))[:length]


@functools.cache
def _block(seed: int) -> bytes:
    return bytes((seed * 131 + i * 7 + (i >> 8)) & 0xFF for i in range(65536))


class Peer:
    """The child's NIXL, on a loop in a thread of its own; the operations run on the main thread."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = NixlEngine(settings)
        self.memory: Memory
        self.reads: dict[int, Any] = {}
        self.ended: dict[int, int] = {}
        self.numbers = itertools.count(1)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the engine's loop; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def open(self, length: int, seed: int) -> str:
        """Open the engine over memory of this length; return its metadata in hexadecimal."""
        self.memory = Memory(length, seed)
        metadata: bytes = self.run(self.engine.open(self.memory.region))
        return metadata.hex()

    def connect(self, peer: str, metadata: str) -> None:
        self.run(self.engine.connect(peer, bytes.fromhex(metadata)))

    def begin_read(self, peer: str, items: list[list[int]], deadline_s: float) -> int:
        number = next(self.numbers)
        self.ended[number] = 0

        def ended() -> None:
            self.ended[number] += 1

        read = self.engine.read(peer, [ReadItem(*item) for item in items], deadline_s, ended)
        self.reads[number] = asyncio.run_coroutine_threadsafe(read, self.loop)
        return number

    def finish_read(self, number: int) -> list[Any]:
        """Wait for a read; return its answer and how many times `ended` has been called."""
        return [self.reads.pop(number).result(), self.ended[number]]

    def read(self, peer: str, items: list[list[int]], deadline_s: float = 30.0) -> list[Any]:
        """Read; return the answer and how many times `ended` has been called."""
        return self.finish_read(self.begin_read(peer, items, deadline_s))

    def cancel_read(self, number: int) -> None:
        self.reads[number].cancel()

    def times_ended(self, number: int) -> int:
        """Return how many times `ended` of a read has been called."""
        return self.ended[number]

    def checksum(self, offset: int, length: int) -> int:
        """Return the CRC-32 of a part of this process's memory."""
        return zlib.crc32(self.memory.mapping[offset : offset + length])

    def fill(self, seed: int) -> None:
        self.memory.fill(seed)

    def clear(self) -> None:
        self.memory.mapping[:] = bytes(len(self.memory.mapping))

    def poison(self, seed: int, offset: int, length: int) -> None:
        self.memory.mapping[offset : offset + length] = pattern(seed, length)

    def cut_connections(self) -> int:
        """Shut down every TCP connection of this process without telling the engine; return how many there were."""
        cut = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family != socket.AF_INET or connection.type != socket.SOCK_STREAM:
                        continue
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
            except OSError:
                continue  # not a socket, or a listening one
        return cut

    def disconnect(self, peer: str) -> None:
        self.run(self.engine.disconnect(peer))

    def close(self) -> None:
        self.run(self.engine.close())


def main() -> None:
    peer = Peer(dict(pair.split("=", 1) for pair in sys.argv[1:]))
    names = [name for name in dir(Peer) if not name.startswith("_") and name != "run"]
    child.serve({name: getattr(peer, name) for name in names})
    peer.close()


if __name__ == "__main__":
    main()
