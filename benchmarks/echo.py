"""`python -m benchmarks.echo PATH`: a bare pyzmq echo server, with which the figures of RPCs are compared.

The echo has the server's event loop (uvloop) and socket types (ROUTER for DEALERs over a unix socket), and reads as the
server does: the loop watches the socket's descriptor, and each wake reads until no message is left.  The process ends
when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import uvloop
import zmq

from benchmarks.common import ROOT, wait_until


async def serve(path: str) -> None:
    """Echo until stdin ends."""
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.setsockopt(zmq.LINGER, 0)
    server.bind(f"ipc://{path}")

    def drain() -> None:
        while True:
            try:
                frames = server.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            server.send_multipart(frames, zmq.NOBLOCK)

    ended = asyncio.Event()
    loop.add_reader(server.fileno(), drain)
    loop.call_soon(drain)
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(server.fileno())
    context.destroy(linger=0)


@contextlib.contextmanager
def echo_server(path: Path) -> Iterator[int]:
    """Run the echo as a process that listens on the unix socket `path`; yield its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.echo", str(path)], stdin=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    try:
        wait_until(path.exists, "the echo listens")
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
