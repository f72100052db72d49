"""Publishes KV events as vLLM 0.32 does: a PUB socket, and a ROUTER socket that sends kept batches again.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), batch.  A replay request has an empty
frame and the first wanted number; the answer is the kept batches from there on, and one with the number -1.

vLLM polls the replay socket only between batches or after 0.1 s; here a replay request is answered when it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvstrata.errors import ConfigError
from kvstrata.testing.engine_sim.kv_events import Event, KVEventBatch

END = (-1).to_bytes(8, "big", signed=True)
HIGH_WATER = 100_000
"""Messages that are kept for a slow subscriber, like vLLM's `hwm`."""


class Publisher:
    """Owns the two sockets, and keeps the last `kept_batches`."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        topic: str = "",
        kept_batches: int = 10_000,
        rank: int = 0,
    ) -> None:
        """Bind, as a data-parallel rank so many ports above; `replay_endpoint` may be empty.

        Raises ConfigError; then nothing is bound.
        """
        endpoint, replay_endpoint = _of_rank(endpoint, rank), _of_rank(replay_endpoint, rank)
        self._rank = rank
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_batches)
        self._sent = 0
        self._context = zmq.Context()
        self._task: asyncio.Task[None] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        # A plain socket: sending never waits, since PUB drops what a slow subscriber does not take.
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(HIGH_WATER)
        try:
            _bind(self._pub, endpoint, "kv-events-endpoint")
            if replay_endpoint:
                self._replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                _bind(self._replay, replay_endpoint, "kv-events-replay-endpoint")
        except ConfigError:
            self._close_sockets()
            raise

    @property
    def endpoint(self) -> str:
        """Where the PUB socket is bound; a port of 0 has become a real one."""
        return str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str | None:
        """Where the ROUTER socket is bound."""
        return None if self._replay is None else str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    def described(self) -> dict[str, object]:
        """What vLLM's `/kv_event_sources` tells of a publisher."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self._kept.maxlen,
            "hwm": HIGH_WATER,
            "max_queue_size": HIGH_WATER,
            "topic": self._topic.decode(),
        }

    def start(self) -> None:
        """Answer replay requests from now on."""
        if self._replay is not None:
            self._task = asyncio.create_task(self._serve_replays(self._replay))

    def publish(self, events: list[Event]) -> None:
        """Send the events of one step."""
        payload = msgspec.msgpack.encode(KVEventBatch(time.time(), events, self._rank))
        self._pub.send_multipart((self._topic, self._sent.to_bytes(8, "big"), payload))
        self._kept.append((self._sent, payload))
        self._sent += 1

    async def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    async def _serve_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) > 8:
                continue  # not a request; vLLM logs it and sends nothing
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in list(self._kept):
                if number >= first:
                    await socket.send_multipart(
                        (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    )
            await socket.send_multipart((client, b"", b"", END, b""))


def _of_rank(endpoint: str, rank: int) -> str:
    """vLLM's rule; a port of 0 stays one that is free."""
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{int(port) + rank}" if place and port.isdecimal() and int(port) else endpoint


def _bind(socket: zmq.Socket[Any], endpoint: str, flag: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--{flag}: {endpoint!r} cannot be bound: {error.strerror}; give one like tcp://127.0.0.1:5557",
            field=flag,
        ) from None
