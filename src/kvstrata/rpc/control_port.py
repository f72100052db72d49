"""The port of an instance or a controller for requests within the cluster, permitted by the kind of the sender's key.

1. Each request gets one answer, now or later; an invalid one gets a Failure, and affects only its sender.
2. At most `max_later` requests are answered later at a time; further ones are refused.
3. The kinds of key that may send a request are declared once, where the request is registered (`serve`).
4. A greeting in another protocol is refused with both versions, before anything else in it is checked.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec

from kvstrata.errors import BadRequest, InternalError, KvstrataError, NotPermitted, Refused
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.rpc.cluster_wire import (
    BAD_FRAME,
    MAX_CLUSTER_MESSAGE_BYTES,
    TO_INSTANCE,
    ClusterReply,
    ClusterRequest,
    Greeting,
    encode,
    failure,
    other_protocol,
    refusal_of,
)
from kvstrata.rpc.zmq_curve import OPEN, KeyKind, Keys
from kvstrata.rpc.zmq_server import Address, ZmqServer
from kvstrata.text import type_and_place

MAX_LATER = 512
"""Maximum number of requests that an instance answers later: waiting polls, pages of lists, and operations."""

Answered = ClusterReply | asyncio.Future[Any] | Coroutine[Any, Any, ClusterReply]
Handler = Callable[[Any, Address], Answered]
"""Gets one request and its sender; returns the answer, a future of it, or a coroutine that makes it. Raises
KvstrataError, as may the future and the coroutine."""


class ControlPort(Numbers):
    """One port. Belongs to the event loop."""

    refused = counter("Refused requests, including invalid frames.", "code", name="refused_requests")
    later = gauge(
        "Requests with a pending answer: waiting polls, lists, operations.",
        lambda self: len(self._later),
        name="open_requests",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        epoch: int,
        keys: Keys = OPEN,
        *,
        requests: msgspec.msgpack.Decoder[Any] = TO_INSTANCE,
        max_later: int = MAX_LATER,
    ) -> None:
        """`epoch`: of this process. `keys`: kinds of clients' public keys. `requests`: decoder of valid requests."""
        self.server = ZmqServer(loop, max_message_bytes=MAX_CLUSTER_MESSAGE_BYTES)
        self._epoch, self._keys, self._requests, self._max_later = epoch, keys, requests, max_later
        self._served: dict[type[ClusterRequest], tuple[frozenset[KeyKind], bool, Handler]] = {}
        self._later: set[asyncio.Future[ClusterReply]] = set()
        self._log = EventLog("control")

    def serve(
        self,
        kinds: Collection[KeyKind],
        handlers: Mapping[type[ClusterRequest], Handler],
        *,
        unlisted: bool = False,
    ) -> None:
        """Answer these requests from now on, to keys of these kinds; with `unlisted` also to keys of no kind."""
        for request, handler in handlers.items():
            self._served[request] = frozenset(kinds), unlisted, handler

    def start(self) -> None:
        """Begin to answer."""
        self.server.start(self._on_frame, self._on_frame_count)

    async def close(self) -> None:
        """Stop answering, and wait until no request is under way. Idempotent."""
        self.server.close()
        for answer in self._later:
            answer.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)

    def numbers(self) -> list[Numbers]:
        """The parts with counters."""
        return [self, self.server]

    def _on_frame(self, address: Address, frame: bytes) -> None:
        try:
            request = self._requests.decode(frame)
        except BAD_FRAME as error:
            self._refuse(address, *refusal_of(frame, error))
            return
        try:
            if isinstance(request, Greeting) and (wrong := other_protocol(request.protocol)) is not None:
                raise wrong
            answer = self._handler(request, address.key)(request, address)
        except KvstrataError as error:
            self._refuse(address, request.seq, error)
            return
        if isinstance(answer, ClusterReply):
            self.server.send(address, encode(answer))
            return
        if not isinstance(answer, asyncio.Future):
            answer = asyncio.create_task(answer, name=f"control-{type(request).__name__}")
        self._later.add(answer)
        answer.add_done_callback(functools.partial(self._answered, address, request.seq))

    def _handler(self, request: ClusterRequest, key: str) -> Handler:
        kinds, unlisted, handler = self._served.get(type(request), (frozenset(), False, None))
        if handler is None:
            raise BadRequest(f"{type(request).__name__} is not served here")
        ours = self._keys.now().kinds_of(key)
        if kinds.isdisjoint(ours) and (ours or not unlisted):
            raise NotPermitted(
                f"{type(request).__name__} is for a key of kind {' or '.join(sorted(kinds))}; the key of this "
                f"connection is of kind {' and '.join(sorted(ours)) or 'none'} (kvstrata cluster init)"
            )
        if len(self._later) >= self._max_later:
            raise Refused(f"{self._max_later} requests are under way here; ask again", retry_after_s=0.1)
        return handler

    def _answered(self, address: Address, seq: int, answer: asyncio.Future[ClusterReply]) -> None:
        self._later.discard(answer)
        if answer.cancelled():  # the port is closed
            return
        try:
            self.server.send(address, encode(answer.result()))
        except KvstrataError as error:
            self._refuse(address, seq, error)
        except Exception as error:
            # The RPC boundary: our own mistake in one request is answered and logged, and affects only its sender.
            self._log.error("request_failed", error=type_and_place(error))
            self._refuse(address, seq, InternalError("the request failed; see the log of this process"))

    def _refuse(self, address: Address, seq: int, error: KvstrataError) -> None:
        self.server.send(address, self._failure(seq, error))

    def _failure(self, seq: int, error: KvstrataError) -> bytes:
        self.refused[error.code] += 1
        return encode(failure(seq, self._epoch, error))

    def _on_frame_count(self, address: Address, count: int) -> bytes:
        return self._failure(0, BadRequest(f"a message must be one frame, found {count}"))
