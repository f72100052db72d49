"""The client side of cluster messages: DEALER sockets on one asyncio loop.

They carry requests, and messages between gateways, which have no answer.

Rules:

1. Nothing here blocks, or waits longer than its time limit.  A request has one outcome: its answer, ClusterFailure if
   the other side refuses it, or Unavailable if no answer arrives in time or too many requests are open.
2. Nothing is queued in libzmq for a server that is not connected: a request waits here for the connection, up to its
   own time limit, and is never sent after its caller has given up.
3. libzmq reconnects by itself, even after the other side has closed the connection.
4. An invalid frame is counted and dropped; an answer without an open request is dropped.
"""

from __future__ import annotations

import asyncio
import errno
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.patience import patience
from kvstrata.rpc.cluster_wire import (
    ANSWERS,
    BAD_FRAME,
    MAX_CLUSTER_MESSAGE_BYTES,
    ClusterReply,
    ClusterRequest,
    Failure,
    encode,
)
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_server import MESSAGES_PER_WAKE, REFUSED_HANDSHAKES, SECONDS_PER_WAKE

R = TypeVar("R", bound=ClusterReply)

MAX_OPEN = 1_024
"""Maximum number of requests of one link without an outcome yet."""
QUEUE_MESSAGES = 64
"""Maximum number of messages that libzmq keeps for a server that does not read."""
RECONNECT_MS, RECONNECT_MAX_MS = 50, 500
CONNECT_TIMEOUT_MS = 2_000
HANDSHAKE_MS = 5_000
LINGER_MS = 200
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 2,
    zmq.TCP_MAXRT: 6_000,
}
"""TCP's keepalive: a connection whose other end does not respond for 6 s is opened anew.  For a frozen process the
kernel still responds; the time limits of requests detect a frozen process.  ZMTP heartbeats are off, because libzmq may
abort over a PING (see zmq_server.py)."""


class Links:
    """All links of a process, and their one I/O thread. Everything runs on the thread of `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4_096)
        self._links: weakref.WeakSet[AskLink] = weakref.WeakSet()

    def ask(
        self,
        endpoint: str,
        *,
        keys: ClusterKeys | None = None,
        few: bool = False,
        changed: Callable[[bool], None] | None = None,
        refused: Callable[[], None] | None = None,
    ) -> AskLink:
        """Open a link for requests to `endpoint`, whose process may be absent.

        `few`: fewer than QUEUE_MESSAGES requests are open at a time, so a socket that accepts no message has lost its
        connection, and requests sent over it end with Unavailable.  `changed` gets True for each new connection, which
        may lead to another process than the last one, and False when it ends.  `refused` is called for each connection
        that the other side ends in the handshake, for example if the keys do not match.  Raises Unavailable if libzmq
        refuses the endpoint.
        """
        link = AskLink(self._loop, self._socket(endpoint, keys), changed, refused, few=few)
        # The monitor is installed first: libzmq abandons some refused handshakes and reports them only once.
        try:
            link.connect(endpoint)
        except zmq.ZMQError as error:
            link.close()
            raise _refused(endpoint, error) from None
        self._links.add(link)
        return link

    def close(self) -> None:
        """Close every link, give queued messages a moment to leave, free everything."""
        for link in self._links:
            link.close(linger_ms=round(patience(LINGER_MS)))
        self._context.term()

    def _socket(self, endpoint: str, keys: ClusterKeys | None) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.DEALER)
        for option, value in _OPTIONS.items():
            link.setsockopt(option, value)
        link.setsockopt(zmq.HANDSHAKE_IVL, round(patience(HANDSHAKE_MS)))
        try:
            if keys is not None:
                link.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
                link.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
                link.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(keys.secret))
        except zmq.ZMQError as error:
            link.close()
            raise _refused(endpoint, error) from None
        return link


def _refused(endpoint: str, error: zmq.ZMQError) -> Unavailable:
    return Unavailable(f"cannot connect to {endpoint!r}: {error.strerror}")


_OPTIONS = {
    zmq.IMMEDIATE: 1,
    zmq.IPV6: 1,
    zmq.LINGER: 0,
    zmq.SNDHWM: QUEUE_MESSAGES,
    zmq.RCVHWM: MAX_OPEN,
    zmq.MAXMSGSIZE: MAX_CLUSTER_MESSAGE_BYTES,
    zmq.RECONNECT_IVL: RECONNECT_MS,
    zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
    zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
    **KEEPALIVE,
}


class AskLink:
    """A link to one process, on the loop; several requests may be open, and their answers may arrive in any order.

    The socket's descriptor signals only changes, so each turn checks the socket's state.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        link: zmq.Socket[bytes],
        changed: Callable[[bool], None] | None,
        refused: Callable[[], None] | None,
        *,
        few: bool,
    ) -> None:
        self._loop = loop
        self._socket = link
        self._again = False
        self._changed, self._few = changed, few
        self._watch: zmq.Socket[bytes] | None = None
        """The socket on which libzmq reports failed handshakes."""
        if refused is not None:
            self._watch = link.get_monitor_socket(REFUSED_HANDSHAKES)
            loop.add_reader(self._watch.fileno(), self._see_refusals, self._watch, refused)
            loop.call_soon(self._see_refusals, self._watch, refused)
        self._up = False
        self._next_seq = 1
        self._open: dict[int, asyncio.Future[ClusterReply]] = {}
        self._unsent: dict[int, bytes] = {}
        self.garbage_count = 0
        loop.add_reader(link.fileno(), self._wake)
        self._look_again()

    def connect(self, endpoint: str) -> None:
        """Begin to connect. Raises ZMQError if libzmq refuses the endpoint."""
        self._socket.connect(endpoint)

    @property
    def endpoint(self) -> str:
        """Endpoint of the other side."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def connected(self) -> bool:
        """Whether libzmq would accept a message now."""
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def try_send(self, frame: bytes) -> bool:
        """Send a message without an answer; False, without effect, if libzmq has no connection or a full queue.

        The sender detects losses by other means.
        """
        if self._socket.closed:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may consume the signal of an arrival, after which the descriptor would stay silent.
        self._look_again()
        return True

    async def ask(self, request: ClusterRequest, answer: type[R], timeout_s: float) -> R:
        """Send `request` under a new seq; returns its answer.

        Raises ClusterFailure if the request is refused, and Unavailable without an answer in time, though the other
        side may have carried out the request.  Cancelling forgets the request.
        """
        if len(self._open) >= MAX_OPEN:
            raise Unavailable(f"{MAX_OPEN} questions to {self.endpoint} are open; try again later")
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        frame = encode(msgspec.structs.replace(request, seq=seq))
        outcome: asyncio.Future[ClusterReply] = self._loop.create_future()
        self._open[seq] = outcome
        try:
            if self._socket.closed:
                raise Unavailable("the link is closed")
            if self._unsent or not self.try_send(frame):
                self._unsent[seq] = frame
            async with asyncio.timeout(timeout_s):
                reply = await outcome
        except TimeoutError:
            raise Unavailable(f"no answer from {self.endpoint} within {timeout_s:g} s") from None
        finally:
            del self._open[seq]
            self._unsent.pop(seq, None)
        if isinstance(reply, Failure):
            raise ClusterFailure(
                reply.code,
                reply.message,
                field=reply.field,
                retryable=reply.retryable,
                retry_after_ms=reply.retry_after_ms,
            )
        if not isinstance(reply, answer):
            raise Unavailable(f"{self.endpoint} answered {type(reply).__name__} for {answer.__name__}")
        return reply

    def _fail_sent(self) -> None:
        for seq, outcome in self._open.items():
            if seq not in self._unsent and not outcome.done():
                outcome.set_exception(
                    Unavailable(f"the connection to {self.endpoint} ended before the answer")
                )

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the link: open requests end with Unavailable, messages queued in libzmq get `linger_ms` to be sent."""
        if self._watch is not None and not self._watch.closed:
            self._loop.remove_reader(self._watch.fileno())
            self._socket.disable_monitor()
            self._watch.close(linger=0)
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger_ms)
        for outcome in self._open.values():
            if not outcome.done():
                outcome.set_exception(Unavailable("the link is closed"))

    def _look_again(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._again = False
        if not self._socket.closed and self._turn(int(self._socket.getsockopt(zmq.EVENTS))):
            self._look_again()

    def _turn(self, events: int) -> bool:
        """Send and receive as `events` allow; returns True if another turn may find more to do."""
        if bool(events & zmq.POLLOUT) != self._up:
            self._up = not self._up
            if self._few and not self._up:
                self._fail_sent()
            if self._changed is not None:
                self._changed(self._up)
        while self._unsent and events & zmq.POLLOUT:
            seq = next(iter(self._unsent))
            if not self.try_send(self._unsent[seq]):
                break
            del self._unsent[seq]
        started_s = time.monotonic()
        for _ in range(MESSAGES_PER_WAKE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # Receiving may have consumed the signal of a new connection, for which unsent requests wait.
                return bool(self._unsent) and self.connected
            self._take(frames)
            if self._socket.closed:
                return False
            if time.monotonic() - started_s > SECONDS_PER_WAKE:
                break
        return True

    def _see_refusals(self, watch: zmq.Socket[bytes], refused: Callable[[], None]) -> None:
        while not watch.closed:
            try:
                told = parse_monitor_message(watch.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            # Without a detail the connection has ended: by the other side (EPIPE), its death, or the time limit.
            if told["event"] != zmq.Event.HANDSHAKE_FAILED_NO_DETAIL or told["value"] == errno.EPIPE:
                refused()

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = ANSWERS.decode(frames[0])
        except BAD_FRAME:
            self.garbage_count += 1
            return
        outcome = self._open.get(message.seq)
        if outcome is not None and not outcome.done():
            outcome.set_result(message)
