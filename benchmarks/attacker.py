"""A stranger that sends without a pause until it is killed: `python -m benchmarks.attacker SHAPE SOCKET URL TOKENS`.

Shapes: `8 MiB frames`, `60 kB frames`, `200 B frames`, `many frames` (a message of 512), `new connections` (one for
each message), `objects` and `tokens` (JSON bodies of 30 MB to the admin port), and `spin`, which keeps a core busy.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.parse
from pathlib import Path

import zmq

FRAMES = {
    "8 MiB frames": [os.urandom(8_388_000)],
    "60 kB frames": [os.urandom(60_000)],
    "200 B frames": [os.urandom(200)],
    "many frames": [b"x" * 100] * 512,
    "new connections": [os.urandom(1_000)],
}
BODIES = {
    "objects": b"[" + b"{}," * 10_000_000 + b"{}]",
    "tokens": b'{"model": "nobody", "tokens": [' + b"4294967295," * 2_800_000 + b"1]}",
}
SHAPES = [*FRAMES, *BODIES]


def flood(shape: str, path: str) -> None:
    """Send frames as fast as the server reads them; a cut connection is opened again by libzmq."""
    context = zmq.Context()
    while True:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.connect(f"ipc://{path}")
        while True:
            ready = socket.poll(1_000, zmq.POLLIN | zmq.POLLOUT)
            if ready & zmq.POLLIN:
                socket.recv_multipart()
            if ready & zmq.POLLOUT:
                socket.send_multipart(FRAMES[shape], copy=False)
            if shape == "new connections" and ready & zmq.POLLIN:
                break
        socket.close()


def post(shape: str, url: str, token: str) -> None:
    """Send bodies, one connection after another."""
    where = urllib.parse.urlsplit(url)
    head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    while True:
        link = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        link.request("POST", "/v1/prefetch", BODIES[shape], head)
        link.getresponse().read()
        link.close()


def main() -> None:
    """Run one shape."""
    shape, path, url, token_file = sys.argv[1:5]
    if shape in FRAMES:
        flood(shape, path)
    elif shape in BODIES:
        post(shape, url, Path(token_file).read_text().strip())
    while shape == "spin":
        pass


if __name__ == "__main__":
    main()
