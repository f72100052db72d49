"""An HTTP server on the test's loop with as much of an engine's API as the gateway needs, which breaks it on demand.

It reads whole requests and writes raw bytes, so that a test decides about every byte of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Self

from tests.harness.daemon import free_port


class Got(NamedTuple):
    method: str
    target: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Line:
    """The connection on which an answer is written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, document: Any, status: int = 200, more: str = "") -> None:
        """Write a whole answer with a JSON body; `more`: further header lines."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        await self.raw(head.encode() + body)

    async def begin(self, kind: str = "text/event-stream") -> None:
        await self.raw(
            f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )

    async def part(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, document: Any) -> None:
        await self.part(b"data: " + json.dumps(document).encode() + b"\n\n")

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        self.writer.transport.abort()

    async def gone(self) -> None:
        with contextlib.suppress(OSError):
            while await self.reader.read(1 << 16):
                pass


Behaviour = Callable[[Got, Line], Awaitable[None]]


def delta(text: str) -> dict[str, Any]:
    """An event of a chat completion."""
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": text}}]}


async def chat(got: Got, line: Line) -> None:
    """Answer a completion of five tokens, as a stream if that is asked for."""
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 7}}
    if not got.document.get("stream"):
        await line.answer({"id": "chatcmpl-1", "choices": [], "usage": usage})
        return
    await line.begin()
    for text in "abcde":
        await line.event(delta(text))
    await line.event({"id": "chatcmpl-1", "choices": [], "usage": usage})
    await line.part(b"data: [DONE]\n\n")
    await line.end()


class ScriptedEngine:
    """One engine. `behaviour` answers everything but /health and /v1/models."""

    def __init__(
        self, *models: str, behaviour: Behaviour = chat, tls: ssl.SSLContext | None = None, path: str = ""
    ) -> None:
        """`path`: of the unix socket on which it listens in place of a port."""
        self.models = list(models) or ["m"]
        self.parents: dict[str, str] = {}
        """Of those models that are LoRA adapters."""
        self.behaviour = behaviour
        self._tls = tls
        self.healthy = True
        self.got: list[Got] = []
        """Requests but for probes, in the order of their arrival."""
        self.probes = 0
        self.port = 0
        self.path = path
        self._server: asyncio.Server | None = None
        self._lines: set[Line] = set()

    @property
    def url(self) -> str:
        return f"unix:{self.path}" if self.path else f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        """What the gateway calls it."""
        return self.path[1:].replace("/", "-") if self.path else f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, again on the port that it had before."""
        if self.path:
            self.port = 1
            self._server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 26)
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port = self.port or free_port()
        listener.bind(("127.0.0.1", self.port))
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=1 << 26, ssl=self._tls)

    async def stop(self) -> None:
        """Stop listening and cut all connections, as if the process had died."""
        if self._server is not None:
            self._server.close()
            for line in list(self._lines):
                line.cut()
            await self._server.wait_closed()
            self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        self._lines.add(line)
        try:
            while (got := await _read(reader)) is not None:
                await self._answer(got, line)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._lines.discard(line)
            line.cut()

    async def _answer(self, got: Got, line: Line) -> None:
        if got.target == "/health":
            self.probes += 1
            await line.answer({}, 200 if self.healthy else 503)
        elif got.target == "/v1/models":
            entries = [
                {"id": name, "object": "model", "parent": self.parents.get(name)} for name in self.models
            ]
            await line.answer({"object": "list", "data": entries})
        elif got.target in ("/kv_event_sources", "/is_sleeping"):
            await line.answer({"detail": "Not Found"}, 404)
        else:
            self.got.append(got)
            await self.behaviour(got, line)


async def _read(reader: asyncio.StreamReader) -> Got | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Got(method, target, headers, body)
