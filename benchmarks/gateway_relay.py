"""A bare relay of bytes between two sockets, on uvloop: the floor of `benchmarks.gateway`.

python -m benchmarks.gateway_relay PORT ENGINE_PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    """One end; what it reads, the other end writes."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        else:
            self._early.append(data)

    def joined(self, other: Side) -> None:
        """Write to `other` from now on, and what came before."""
        self.other, other.other = other, self
        for data in self._early:
            self.data_received(data)
        self._early.clear()


async def serve(port: int, engine_port: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def join(client: Side) -> None:
        _, engine = await loop.create_connection(Side, "127.0.0.1", engine_port)
        client.joined(engine)

    class Client(Side):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            task = loop.create_task(join(self))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    await loop.create_server(Client, "127.0.0.1", port, backlog=4_096)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
