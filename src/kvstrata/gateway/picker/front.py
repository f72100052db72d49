"""Answers the ext_authz checks of this gateway's own Envoy over HTTP/1.1 on a unix socket.

    /choose/PATH     chooses the engine of a request to PATH: 200 with headers for Envoy, or the client's refusal
    /enter/PATH      authenticates the sender of a long request before its body arrives: 200, or the client's refusal
    /v1/models …     clients' requests that the gateway itself answers; Envoy forwards them here
    /healthz         Envoy's health check of this process

Only Envoy reaches the socket, since its folder is closed to others.  Heads and bodies are bounded all the same, and a
head that is not HTTP gets 400.  A connection carries one check at a time; closing the connection cancels the check.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import msgspec

from kvstrata import __version__
from kvstrata.gateway.envoy.configuration import ENDPOINT, FRAGMENT, NUMBER, READ_BYTES, STREAM, UNAVAILABLE
from kvstrata.gateway.errors import Failure, error_body
from kvstrata.gateway.marks import CANCELLED
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.picker.taskless import begin
from kvstrata.gateway.request import Chosen, Head, request_id
from kvstrata.observability.logging import EventLog
from kvstrata.text import type_and_place

CHOOSE, ENTER = "/choose", "/enter"
PARTIAL = b"x-envoy-auth-partial-body"
MAX_HEAD_BYTES = 256 << 10
MAX_DIGITS = 15
"""Maximum digits of a Content-Length."""
MAX_HELD_BYTES = 1 << 30
"""Maximum total bytes of request bodies held in memory while they arrive."""


class AuthzServer:
    """The server on the picker's unix socket. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.held_bytes = 0
        self.open: set[EnvoyCheck] = set()
        self._server: asyncio.Server | None = None
        self.log = EventLog("picker")

    async def start(self, path: Path) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: EnvoyCheck(self), str(path), backlog=4_096)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for one in list(self.open):
            one.transport.abort()


class EnvoyCheck(asyncio.Protocol):
    """A connection from Envoy, with the check that arrives or is answered on it."""

    transport: asyncio.Transport

    def __init__(self, front: AuthzServer) -> None:
        self._front = front
        self._received: bytes | bytearray = b""
        self._head: tuple[str, str, dict[bytes, bytes]] | None = None
        """Method, target and headers of the arriving check; None: its head is incomplete."""
        self._begins = 0
        self._length = 0
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._front.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.open.discard(self)
        self._front.held_bytes -= len(self._received)
        self._received = b""
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._received:  # most checks arrive whole: no copy
            self._received = data
        else:
            if isinstance(self._received, bytes):
                self._received = bytearray(self._received)
            self._received += data
        self._front.held_bytes += len(data)
        if self._front.held_bytes > MAX_HELD_BYTES:
            self.transport.abort()
            return
        if self._head is None:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                if len(self._received) > MAX_HEAD_BYTES:
                    self.transport.abort()
                return
            first, *lines = bytes(self._received[:end]).split(b"\r\n")
            words = first.decode("latin-1").split(" ")
            # Envoy sends names in lower case; of several headers with the same name the last counts.
            headers = {name: value.strip() for name, _, value in (one.partition(b":") for one in lines)}
            length = headers.get(b"content-length", b"0")
            if len(words) != 3 or not length.isdigit() or len(length) > MAX_DIGITS:
                self._refuse(Failure(400, "invalid_head", "the request's head is not HTTP"), "")
                self.transport.close()
                return
            self._head, self._begins, self._length = (words[0], words[1], headers), end + 4, int(length)
        if self._task is None and len(self._received) >= self._begins + self._length:
            body = bytes(memoryview(self._received)[self._begins : self._begins + self._length])
            self._front.held_bytes -= len(self._received)
            self._received = b""
            (method, target, headers), self._head = self._head, None
            self._task = begin(self._answer(method, target, headers, body))

    async def _answer(self, method: str, target: str, headers: dict[bytes, bytes], body: bytes) -> None:
        path = target.partition("?")[0]
        word = request_id(headers.get(b"x-request-id", b""))
        try:
            if path.startswith(CHOOSE):
                stream = headers.get(STREAM.encode(), b"").decode("latin-1")
                await self._choose(Head(method, path.removeprefix(CHOOSE), headers, word, stream), body)
            elif path.startswith(ENTER):
                failure = self._front.parts.door.body_failure(headers)
                if failure is not None:
                    self._refuse(failure, path.removeprefix(ENTER))
                else:
                    self._front.parts.requests.on_body_begins(
                        headers.get(STREAM.encode(), b"").decode("latin-1")
                    )
                    self._write(200, (), b"")
            else:
                self._page(path, headers)
        except Exception as error:  # the boundary of the port: a defect of the gateway ends one request
            self._front.log.error("request_crashed", path=path, error=type_and_place(error))
            self._refuse(Failure(500, "defect", "a bug in the gateway; see its log"), path)
        finally:
            self._task = None

    async def _choose(self, head: Head, body: bytes) -> None:
        failure = self._front.parts.door.origin_failure(head.headers, head.path)
        if failure is not None:
            self._refuse(failure, head.path)
            return
        requests = self._front.parts.requests
        request = requests.arrived(head)
        # Envoy does not mark a body as partial whose first part has exactly the maximum length.
        parts_only = not self._front.parts.door.needs_keys
        cut = head.headers.get(PARTIAL) == b"true" or (parts_only and len(body) >= READ_BYTES)
        decided = await requests.decide(request, body, cut=cut)
        if isinstance(decided, Failure):
            self._refuse(decided, head.path)
        elif self.transport.is_closing():
            requests.end(request, CANCELLED)
        else:
            self._write(200, _chosen(decided), b"")

    def _page(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Answer a client's GET; /v1/models and /version need a tenant's key if there are tenants."""
        parts = self._front.parts
        if path == "/healthz":
            self._json(200, {"ready": True})
            return
        failure = parts.door.origin_failure(headers, path)
        models = path.startswith("/v1/models")
        if failure is None and (models or path == "/version"):
            tenant = parts.door.tenant_of(headers)
            failure = tenant if isinstance(tenant, Failure) else None
        if failure is not None:
            self._refuse(failure, path)
        elif models:
            self._models(path)
        elif path == "/version":
            self._json(200, {"version": __version__, "gateway": "kvstrata"})
        else:
            ready, why = parts.readiness()
            self._json(200 if ready else 503, {"ready": ready, "why": why})

    def _models(self, path: str) -> None:
        models, name = self._front.parts.fleet.models(), path.removeprefix("/v1/models").removeprefix("/")
        if not name:
            self._json(200, {"object": "list", "data": list(models.values())})
        elif name in models:
            self._json(200, models[name])
        else:
            says = f"model: no engine here has {name!a:.200}"
            self._refuse(Failure(404, "model_not_found", says, "model"), path)

    def _refuse(self, failure: Failure, path: str) -> None:
        headers = [("content-type", "application/json")]
        if failure.retry_after_s:
            headers.append(("retry-after", str(failure.retry_after_s)))
        status = UNAVAILABLE if failure.status == 503 else failure.status
        self._write(status, headers, error_body(failure, path))

    def _json(self, status: int, value: object) -> None:
        self._write(status, [("content-type", "application/json")], msgspec.json.encode(value))

    def _write(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.transport.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)


def _header(json_text: str) -> str:
    """The same JSON as a header can hold it: an engine's words in it may have any characters."""
    if json_text.isascii() and json_text.isprintable():
        return json_text
    return re.sub(r"[^ -~]", lambda one: json.dumps(one[0])[1:-1], json_text)


def _chosen(chosen: Chosen) -> list[tuple[str, str]]:
    """The response headers that tell Envoy where to send a request and what to change in it."""
    found = [(ENDPOINT, ",".join(chosen.endpoints)), (NUMBER, str(chosen.number)), *chosen.headers.items()]
    if chosen.removed:
        found.append(("x-envoy-auth-headers-to-remove", ",".join(chosen.removed)))
    if chosen.fragment:
        found.append((FRAGMENT, _header(chosen.fragment.decode())))
    return found
