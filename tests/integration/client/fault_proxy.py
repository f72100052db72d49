"""A proxy between clients and a server's RPC socket that loses, repeats and delays messages, as the test decides.

It makes a socket directory of its own: `rpc.sock` is the proxy, `attach.sock` leads to the real server.
"""

from __future__ import annotations

import heapq
import itertools
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from kvstrata.memory.paths import ATTACH_SOCKET, RPC_SOCKET
from kvstrata.rpc.frame import read_head

Direction = Literal["request", "reply"]
Decide = Callable[[Direction, str, list[Any]], list[float]]
"""(direction, operation, decoded message) → delay in seconds of each copy to deliver; [] loses it."""


def pass_all(direction: Direction, op: str, message: list[Any]) -> list[float]:
    """No fault."""
    return [0.0]


class FaultProxy:
    """Runs in a thread of its own from `with` to its end. `decide` may be replaced at any time."""

    def __init__(self, server_dir: Path, own_dir: Path, decide: Decide = pass_all) -> None:
        self.socket_dir = own_dir
        self.decide = decide
        self.seen: list[tuple[Direction, str]] = []
        """Every message that arrived at the proxy, including those that it lost."""
        self._server_endpoint = f"ipc://{server_dir / RPC_SOCKET}"
        self._server_dir = server_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy")
        self._failure: BaseException | None = None

    def __enter__(self) -> FaultProxy:
        self.socket_dir.mkdir(mode=0o700)
        (self.socket_dir / ATTACH_SOCKET).symlink_to(self._server_dir / ATTACH_SOCKET)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind(f"ipc://{self.socket_dir / RPC_SOCKET}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self.socket_dir)
        if self._failure is not None:
            raise RuntimeError("the fault proxy failed") from self._failure

    def _run(self) -> None:
        try:
            self._forward()
        except BaseException as error:
            self._failure = error

    def _forward(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        late: list[tuple[float, int, Direction, bytes, bytes]] = []
        order = itertools.count()
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            wait_s = min(0.02, late[0][0] - time.monotonic()) if late else 0.02
            ready = dict(poller.poll(max(0, int(wait_s * 1000))))
            arrived: list[tuple[Direction, bytes, bytes]] = []
            if self._front in ready:
                client, frame = self._front.recv_multipart()
                arrived.append(("request", client, frame))
            for client, back in backs.items():
                if back in ready:
                    arrived.append(("reply", client, back.recv()))
            for direction, client, frame in arrived:
                message = msgspec.msgpack.decode(frame[read_head(frame).start :])
                self.seen.append((direction, message[0]))
                for delay_s in self.decide(direction, message[0], message):
                    heapq.heappush(late, (time.monotonic() + delay_s, next(order), direction, client, frame))
            while late and late[0][0] <= time.monotonic():
                _, _, direction, client, frame = heapq.heappop(late)
                if client not in backs:
                    back = backs[client] = self._context.socket(zmq.DEALER)
                    back.setsockopt(zmq.LINGER, 0)
                    back.connect(self._server_endpoint)
                    poller.register(back, zmq.POLLIN)
                if direction == "request":
                    backs[client].send(frame)
                else:
                    self._front.send_multipart([client, frame])
