"""A stand-in for a controller, whose answers the test chooses; they go over real sockets. Blocking, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import msgspec
import zmq

from kvstrata.native.copying import crc32c
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_fields import TAG_BYTES
from kvstrata.rpc.shared_key import SharedKey

HANG_S = 120.0
EPOCH = 5


class ControllerDouble:
    """Answers as a controller would, except for the requests that `silent`, `slow` and `failures` name."""

    def __init__(self, *, token: int = 0) -> None:
        secret = SharedKey("security.curve_secret_file").keys.secret
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self.ports: dict[str, int] = {}
        for name, kind in (("reply", zmq.ROUTER), ("heartbeat", zmq.ROUTER), ("pull", zmq.PULL)):
            socket = self._sockets[name] = self._context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            socket.curve_server, socket.curve_secretkey = 1, secret
            self.ports[name] = socket.bind_to_random_port("tcp://127.0.0.1")
        self.epoch = EPOCH
        self.token = token
        self.cluster_id = 0
        self.silent: set[str] = set()
        self.slow: set[str] = set()
        """Names of requests whose answers are kept until `release`."""
        self._late: list[tuple[zmq.Socket[bytes], list[bytes]]] = []
        self.failures: dict[str, list[str]] = {}
        """Name of a request → the codes with which the next requests of that name are refused."""
        self.commands: list[wire.Command] = []
        self.results: dict[int, wire.CommandResult] = {}
        self.asked: list[Any] = []
        self.beats: list[wire.Heartbeat] = []
        self.events: list[wire.Events] = []
        self.held: dict[str, set[bytes]] = {}
        """Tags by tier, as the instance reported them."""
        self._fill: dict[str, set[bytes]] = {}

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.ports['reply']}"

    def until(self, condition: Callable[[], Any]) -> None:
        """Answer requests until `condition()` holds. Raises AssertionError after `HANG_S`."""
        end_s = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < end_s, [type(one).__name__ for one in self.asked[-20:]]
            self.serve(0.01)

    def serve(self, seconds: float) -> None:
        """Answer the requests that have arrived and those that arrive within this time."""
        end_s = time.monotonic() + seconds
        while True:
            poller = zmq.Poller()
            for socket in self._sockets.values():
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(max(0, round(1000 * (end_s - time.monotonic())))))
            if not ready:
                return
            for name, socket in self._sockets.items():
                if socket in ready:
                    self._take(name, socket)

    def asked_for(self, kind: type[msgspec.Struct]) -> list[Any]:
        return [one for one in self.asked if isinstance(one, kind)]

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, name: str, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if name == "pull":
            events = wire.EVENTS.decode(frames[0])
            self.events.append(events)
            for run in events.runs:
                self._apply(run)
            return
        decoder: msgspec.msgpack.Decoder[Any] = wire.REPLY_REQUESTS if name == "reply" else wire.HEARTBEATS
        request = decoder.decode(frames[1])
        self.asked.append(request)
        word = type(request).__name__
        if word in self.silent:
            return
        codes = self.failures.get(word)
        if codes:
            answer: Any = wire.Failure(request.seq, self.epoch, codes.pop(0), "the test says so", "", True)
        else:
            answer = self._answer(request)
        reply = [frames[0], wire.encode(answer)]
        if word in self.slow:
            self._late.append((socket, reply))
        else:
            socket.send_multipart(reply)

    def release(self) -> None:
        """Send the answers that were kept, and keep none from now on."""
        self.slow.clear()
        for socket, reply in self._late:
            socket.send_multipart(reply)
        self._late.clear()

    def _answer(self, request: Any) -> Any:
        match request:
            case wire.Register():
                return wire.Registered(
                    request.seq, self.epoch, "double", self.ports["pull"], self.ports["heartbeat"], 100, True,
                )  # fmt: skip
            case wire.Heartbeat():
                self.beats.append(request)
                self.results.update((result.number, result) for result in request.results)
                waiting = [command for command in self.commands if command.number not in self.results]
                return wire.Beat(request.seq, self.epoch, waiting, self.token, self.cluster_id)
            case wire.SyncBegin():
                self._fill = {}
            case wire.SyncPart():
                assert request.crc == crc32c(request.tags)
                self._fill.setdefault(request.tier, set()).update(_split(request.tags))
            case wire.SyncEnd():
                assert request.tags == {tier: len(self._fill.get(tier, ())) for tier in request.tags}
                self.held = self._fill
        return wire.Done(request.seq, self.epoch)

    def _apply(self, run: wire.Run) -> None:
        tags = self.held.setdefault(run.tier, set())
        if run.change is wire.Change.ADMIT:
            tags.update(_split(run.tags))
        elif run.change is wire.Change.EVICT:
            tags.difference_update(_split(run.tags))
        else:
            tags.clear()


def _split(tags: bytes) -> list[bytes]:
    return [tags[at : at + TAG_BYTES] for at in range(0, len(tags), TAG_BYTES)]
