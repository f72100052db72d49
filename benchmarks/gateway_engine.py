"""An engine's port without an engine: answers completions with events at a fixed pace, for `benchmarks.gateway`.

    python -m benchmarks.gateway_engine PORT

Raw asyncio, so that it takes as little of its core as possible.  The first event of an answer is written when the
request has arrived whole, the further ones by a common tick of TICK_S, as steps of an engine are.  Each event tells
when it was written (`t`, CLOCK_MONOTONIC in ns).  `max_tokens` in the body is the number of events;
after 0 the answer stays open after its first event.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import cast

import uvloop

TICK_S = 0.02
LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}],"t":%d}\n\n'
)
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"bench"}]}'


def event() -> bytes:
    """A chunk with one event of now."""
    body = EVENT % time.monotonic_ns()
    return b"%x\r\n%b\r\n" % (len(body), body)


class Port(asyncio.Protocol):
    """One connection."""

    def __init__(self, streams: dict[Port, int]) -> None:
        self._streams = streams
        self._got = bytearray()
        self._need = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._need:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return
            length = LENGTH.search(self._got, 0, end)
            self._need = end + 4 + (int(length[1]) if length else 0)
        if len(self._got) >= self._need:
            request, self._got, self._need = self._got, bytearray(), 0
            self._answer(request)

    def _answer(self, request: bytearray) -> None:
        if request.startswith(b"GET"):
            body = MODELS if b"/v1/models" in request[:40] else b"{}"
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
                body
            )
            self.transport.write(head + body)
            return
        asked = TOKENS.search(request)
        self.transport.write(HEAD + event())
        left = int(asked[1]) - 1 if asked else 0
        if left >= 0:
            self._streams[self] = left


async def serve(port: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    streams: dict[Port, int] = {}
    await loop.create_server(lambda: Port(streams), "127.0.0.1", port, backlog=4_096)
    print("ready", flush=True)
    next_s = loop.time()
    while True:
        next_s += TICK_S
        await asyncio.sleep(next_s - loop.time())
        for stream, left in list(streams.items()):
            if left > 0:
                stream.transport.write(event())
                streams[stream] = left - 1
            else:
                del streams[stream]
                stream.transport.write(DONE)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
