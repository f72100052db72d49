"""Connections to engines: HTTP/1.1 on httptools, one request at a time, kept for the next one.

    idle ─▶ request written ─▶ head of the answer ─▶ parts of its body ─▶ end ─▶ idle, or closed
                                      └─▶ lent to the splicer ─▶ taken back ─┘

An answer in chunked coding can be lent with its socket to a thread that passes it on (splicing.py), so that no callback
runs for a token (docs/decisions/0032-gateway-splice.md).

Invariants
1. A part is kept until it is asked for; while more than MAX_KEPT_BYTES are kept, or the answer is paused, nothing is
   read from the socket, so the engine waits.
2. A link is used again only if the answer ended where its head said, the engine keeps the connection, and nothing
   follows.  What follows an answer is never taken for a part of it.
3. At most MAX_HEAD_BYTES come that are no body: a head, notes of 1xx before it, extensions of chunks, trailers.
4. Closing an answer before its end closes its link: the engine sees that nobody listens.
5. While an answer is lent, its socket is neither read, written nor closed here; a close waits until it is taken back.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

CONNECT_S = 2.0
"""Time for a connection; then another engine is tried."""
KEPT_S = 4.0
"""vLLM closes a connection after 5 s without a request: a link must be given up before that."""
MAX_HEAD_BYTES = 256 << 10
CHUNKED = b"chunked"
MAX_KEPT_BYTES = 256 << 10
"""Of an answer whose owner has not asked for them yet; then nothing more is read."""

Headers = Iterable[tuple[bytes, bytes]]


class Unreachable(Exception):
    """No connection: the engine has not seen the request."""


class LinkBroken(Exception):
    """The connection ended before the answer did, or what came is not HTTP."""


class Address(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int
    tls: bool


class Answer(asyncio.Protocol):
    """A link, and the answer that it carries."""

    def __init__(self, links: Links, address: Address) -> None:
        self.address = address
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.paused = False
        self.heard_s = 0.0
        """When the engine said something, or had to say something from then on (the loop's time)."""
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._descriptor = -1
        self._parser: Any = None
        self._bare_bytes = 0
        """Those of the answer that are no body, since the last piece of one."""
        self._parts: list[bytes] = []
        self._kept_bytes = 0
        self._coded: list[bytes] | None = None
        """What came of a body in chunked coding, as it came; None: it has another coding, or parts of it were taken."""
        self._stop: Callable[[], None] | None = None
        """Ends the use of a lent socket; None: it is not lent."""
        self._waiter: asyncio.Future[None] | None = None
        self._in_head = True
        self._head_end = b""
        """The last bytes of the head so far."""
        self._complete = False
        self._ends_with_link = False
        """Whether only the end of the connection ends the body."""
        self._kept = False
        """Whether the engine keeps the connection after this answer."""
        self._broken: LinkBroken | None = None
        self.closed = False
        self.idle_timer: asyncio.TimerHandle | None = None

    # -- for the owner ---------------------------------------------------------------------------------------

    def write(self, request: Iterable[bytes]) -> None:
        """Begin a request."""
        self._parser = self._links.make_parser(self)
        self.status, self.headers, self._bare_bytes, self._head_end = 0, [], 0, b""
        self._parts, self._kept_bytes, self._coded, self._in_head = [], 0, None, True
        self._complete = self._ends_with_link = self._kept = False
        self._transport.writelines(request)

    async def head(self) -> None:
        """Wait for the status and the headers. Raises LinkBroken."""
        while self._in_head:
            await self._wait()

    async def part(self) -> bytes:
        """The next part of the body; empty at its end. Raises LinkBroken."""
        while not self._parts:
            if self._complete:
                return b""
            await self._wait()
        part = self._take()
        self.resume()
        return part

    async def whole(self, most_bytes: int) -> bytes:
        """The body up to so many bytes. Raises LinkBroken."""
        body = b""
        while len(body) < most_bytes and (part := await self.part()):
            body += part
        return body[:most_bytes]

    async def begun(self) -> bytes:
        """The first bytes of the body, which stay for `part` or `lend`; empty if it has none. Raises LinkBroken."""
        while not self._parts and not self._complete:
            await self._wait()
        return b"".join(self._parts)

    @property
    def lendable(self) -> bool:
        """Whether the socket can be lent: more of a body in chunked coding is to come, over a bare connection."""
        whole = self._complete or self._broken is not None
        return self._coded is not None and not (whole or self.closed or self.address.tls)

    def lend(self, stop: Callable[[], None]) -> tuple[int, bytes]:
        """The socket, and the coded body so far. `stop` makes its user end soon. REQUIRES: it is lendable."""
        self.pause()
        self._stop = stop
        coded, self._coded = b"".join(self._coded or ()), None
        self._parts.clear()
        return self._descriptor, coded

    def taken_back(self, *, whole: bool) -> None:
        """The socket is used no longer. `whole`: the body has ended, and nothing followed."""
        self._stop = None
        self._complete = whole
        if whole:
            self.resume()
        else:
            self.close()

    def pause(self) -> None:
        """Read no further."""
        if not self.paused and not self.closed:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.paused and not self.closed:
            self.paused = False
            self.heard_s = self._loop.time()
            self._transport.resume_reading()

    def end(self) -> None:
        """The owner is done: keep the link for another request if the answer has ended, else close it. Idempotent."""
        if self.closed or not self._transport:
            return
        keeps = self._complete and not self._ends_with_link and not self._parts and self._kept
        if keeps and not self.paused:
            self._links.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection now, or when it is taken back. Idempotent."""
        if self._stop is not None:
            self._stop()
        elif not self.closed:
            self.closed = True
            self._links.drop(self)
            self._transport.abort()

    def _take(self) -> bytes:
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._kept_bytes, self._coded = 0, None
        return part

    async def _wait(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._waiter = self._loop.create_future()
        self.heard_s = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._broken is not None and not self._complete and not self._parts:
            raise self._broken

    @property
    def awaited(self) -> bool:
        """Whether the owner waits for the engine to say something."""
        return self._waiter is not None and not self.paused

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- asyncio's callbacks -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._links.drop(self)
        if self._ends_with_link and exc is None:
            self._complete = True
        elif not self._complete:
            self._break("the engine closed the connection")
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._complete:  # nobody has asked, or more than the answer has come
            self.close()
            return
        self.heard_s = self._loop.time()
        before, received = self._kept_bytes, len(data)
        try:
            if self._in_head:
                data = self._feed_head(data)
            if data:
                if self._coded is not None:
                    self._coded.append(data)
                self._parser.feed_data(data)
        except self._links.not_http as error:
            self._break(f"not HTTP: {error}")
        self._bare_bytes = self._bare_bytes + received if self._kept_bytes == before else 0
        if self._bare_bytes > MAX_HEAD_BYTES and not self._complete:
            self._break(f"more than {MAX_HEAD_BYTES} bytes that are no body")
        if self._broken is not None:
            self.close()
        if self._in_head or (self._broken is not None and not self._complete):
            if self._broken is not None:
                self._wake()
            return
        if self._kept_bytes > MAX_KEPT_BYTES:
            self.pause()
        self._wake()

    def _feed_head(self, data: bytes) -> bytes:
        """Parse the bytes of the head; returns those after it."""
        while self._in_head and data and self._broken is None:
            before = len(self._head_end)
            end = (self._head_end + data).find(b"\r\n\r\n")
            part = data[: end + 4 - before] if end >= 0 else data
            self._head_end = (self._head_end + part)[-3:] if end < 0 else b""
            self._parser.feed_data(part)
            data = data[len(part) :]
        return data

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def _break(self, why: str) -> None:
        self._broken = self._broken or LinkBroken(why)

    # -- httptools' callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Another answer begins: the first, or one that nobody asked for."""
        if self._complete:
            self._break("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers are passed over."""
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head has ended; heads of 1xx are passed over."""
        if self._complete:
            return
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:
            self.headers = []
            return
        if not 200 <= self.status < 600:
            self._break(f"not HTTP: the status {self.status}")
            return
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [CHUNKED]):
            self._break(f"the transfer codings {b', '.join(codings)!a:.100}, which nobody asked for")
            return
        self._in_head = False
        framed = bool(codings) or any(name == b"content-length" for name, _ in self.headers)
        if codings:
            self._coded = []
        self._ends_with_link = not framed and self.status not in (204, 304)
        self._kept = bool(self._parser.should_keep_alive())  # the parser tells it only here

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._complete:
            self._parts.append(body)
            self._kept_bytes += len(body)

    def on_message_complete(self) -> None:
        """The answer has ended."""
        if not self._in_head and not self._ends_with_link:
            self._complete = True


class Links:
    """The links of a gateway to all engines. Belongs to the event loop."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: how addresses with TLS are proven; None: by the authorities that this host trusts."""
        import httptools

        self.make_parser = httptools.HttpResponseParser
        self.not_http = (httptools.HttpParserError, httptools.HttpParserUpgrade)
        self._idle: dict[Address, list[Answer]] = {}
        self._open: set[Answer] = set()
        self._tls = tls

    async def send(self, address: Address, request: list[bytes]) -> Answer:
        """Send a request, on a kept link if there is one; the caller calls `end` of the answer. Raises Unreachable."""
        idle = self._idle.get(address)
        answer = idle.pop() if idle else None
        if answer is None:
            answer = await self._connect(address)
        elif answer.idle_timer is not None:
            answer.idle_timer.cancel()
            answer.idle_timer = None
        answer.write(request)
        return answer

    async def _connect(self, address: Address) -> Answer:
        loop = asyncio.get_running_loop()
        if address.tls and self._tls is None:
            self._tls = await loop.run_in_executor(None, ssl.create_default_context)
        try:
            async with asyncio.timeout(CONNECT_S):
                _, answer = await loop.create_connection(
                    lambda: Answer(self, address),
                    address.host,
                    address.port,
                    ssl=self._tls if address.tls else None,
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:  # TLS errors too
            raise Unreachable(str(error.strerror or error)) from None
        except UnicodeError as error:
            raise Unreachable(f"not a name of a host: {error}") from None
        self._open.add(answer)
        return answer

    def keep(self, answer: Answer) -> None:
        """Keep a link that carries nothing, for KEPT_S."""
        self._idle.setdefault(answer.address, []).append(answer)
        answer.idle_timer = asyncio.get_running_loop().call_later(KEPT_S, answer.close)

    def drop(self, answer: Answer) -> None:
        """The link is closed."""
        self._open.discard(answer)
        if answer.idle_timer is not None:
            answer.idle_timer.cancel()
            answer.idle_timer = None
            idle = self._idle[answer.address]
            idle.remove(answer)
            if not idle:
                del self._idle[answer.address]

    async def close(self) -> None:
        """Close all links."""
        for answer in list(self._open):
            answer.close()


def request_bytes(method: str, target: str, address: Address, headers: Headers, body: bytes) -> list[bytes]:
    """A request as it is written; the last part is the body itself."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [f"{method} {target} HTTP/1.1\r\nhost: {host}:{address.port}\r\n".encode("latin-1")]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    if body or method == "POST":
        lines.append(b"content-length: %d\r\n" % len(body))
    lines.append(b"\r\n")
    return [b"".join(lines), body] if body else [b"".join(lines)]
