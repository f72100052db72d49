"""`python -m benchmarks.echo PATH [BYTES SECONDS]`: a bare ZMTP echo server on a unix socket, to compare RPCs with.

The echo has the server's event loop (uvloop) and codec (session/zmtp.py), and does nothing else: each wake reads once
and answers each message.  With `BYTES` it answers with so many bytes instead, after it has computed for `SECONDS`.  The
process ends when its stdin is closed.

`ThreadedAsker` asks it as an engine's client asks the server, through a thread of its own, and does nothing else: no
lookup can be faster than this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from benchmarks.common import ROOT, wait_until
from kvstrata.session.zmtp import Connection

MAX_BYTES = 64 << 20


async def serve(path: str, answer: bytes | None, work_s: float) -> None:
    """Echo until stdin ends, or answer each message with `answer`, after `work_s` seconds of computing."""
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)  # so that it answers as soon as it can be found
    listener.setblocking(False)

    def readable(link: Connection) -> None:
        try:
            messages = link.receive()
        except BlockingIOError:
            return
        except OSError:
            loop.remove_reader(link.fileno())
            link.close()
            return
        for message in messages:
            until_s = time.perf_counter() + work_s
            while work_s and time.perf_counter() < until_s:
                pass
            link.send(message if answer is None else answer)
            while link.unsent_bytes:
                link.flush()

    def accept() -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        link = Connection(sock, b"ROUTER", max_frame_bytes=MAX_BYTES, max_unsent_bytes=MAX_BYTES)
        loop.add_reader(sock.fileno(), readable, link)

    ended = asyncio.Event()
    loop.add_reader(listener.fileno(), accept)
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(listener.fileno())
    listener.close()


@contextlib.contextmanager
def echo_server(path: Path, answer_bytes: int | None = None, work_s: float = 0.0) -> Iterator[int]:
    """Run the echo as a process that listens on the unix socket `path`; yield its pid."""
    answer = [] if answer_bytes is None else [str(answer_bytes), str(work_s)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.echo", str(path), *answer], stdin=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    try:
        wait_until(path.exists, "the echo listens")
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()


class ThreadedAsker:
    """One connection to an echo, in a thread that a caller wakes by an eventfd, and that wakes the caller."""

    def __init__(self, path: Path) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._path = path
        self._frame = b""
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, frame: bytes) -> None:
        """Send a frame and wait for the answer."""
        self._frame, self._answered = frame, threading.Event()
        os.eventfd_write(self._wake_fd, 1)
        if not self._answered.wait(5):
            raise RuntimeError("the echo did not answer within 5 s")

    def close(self) -> None:
        """End the thread."""
        self._frame = b""
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self._path))
        sock.setblocking(False)
        link = Connection(sock, b"DEALER", max_frame_bytes=MAX_BYTES, max_unsent_bytes=MAX_BYTES)
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(sock.fileno(), select.POLLIN)
        while True:
            for fd, _ in poll.poll(1000):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    if not self._frame:
                        link.close()
                        return
                    link.send(self._frame)
                elif link.receive():
                    self._answered.set()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = len(sys.argv) == 4
        runner.run(
            serve(
                sys.argv[1],
                bytes(int(sys.argv[2])) if answers else None,
                float(sys.argv[3]) if answers else 0.0,
            )
        )
