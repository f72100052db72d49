"""Runs an HTTP API on a thread and loop of its own, so that unauthenticated requests cannot delay the process's loop.

    connection ─▶ gate (http_gate.py) ─▶ whole body ─▶ operation ─┬─▶ process's loop: what uses its parts
                                                                  └─▶ this thread: everything else

1. An operation reaches the process's loop only if its sender has the token and its request is complete.  `/metrics`,
   which may be open, reaches it one request at a time.
2. A probe (PROBES) is answered after the next turn of the process's loop, so it detects a loop that hangs; all waiting
   probes share one turn.
3. `Access` is changed on this thread only.
4. A stop closes the connections, then cancels the running operations, then ends the thread.
5. FastAPI is imported for the first request that is neither a probe nor `/metrics`: its import takes longer than the
   rest of a start, and 15 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from kvstrata.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    KvstrataError,
    LayoutRefused,
    NotFound,
    NotLeading,
    NotPermitted,
    Refused,
    StorageError,
    Unavailable,
)
from kvstrata.process.http_gate import METRICS, PROBES, Access, gate
from kvstrata.process.listen import Listener
from kvstrata.process.operations import Error, Operation, Reply, TooLarge, asked
from kvstrata.process.supervisor import SWITCH_S, on_a_thread

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")
HTTP_STATUS = {
    BadRequest: 400,
    ConfigError: 400,
    NotPermitted: 403,
    NotFound: 404,
    LayoutRefused: 409,
    TooLarge: 413,
    StorageError: 422,
    Refused: 429,
    Unavailable: 503,
    NotLeading: 503,
    DeadlineExceeded: 504,
}
"""HTTP status of each error; 500 for those not listed."""


class Port:
    """One HTTP port of a process."""

    def __init__(
        self,
        title: str,
        operations: Sequence[Operation],
        parts: Any,
        access: Access,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`parts`: the first argument of all operations. `loop`: the process's."""
        from kvstrata.process.http_connections import Bounds, make_server

        self._title = title
        self._operations = operations
        self._parts = parts
        self._bare = {one.path: one for one in operations if one.path in (*PROBES, METRICS)}
        self._api: asyncio.Future[ASGIApp] | None = None
        self._access = access
        self._loop = loop
        self._own_loop: asyncio.AbstractEventLoop | None = None
        """The thread's loop, while the port is served."""
        self._running: set[asyncio.Task[Any]] = set()
        """Operations that run on the process's loop."""
        self._is_stopping = False
        self._turn: asyncio.Task[None] | None = None
        self._metrics = asyncio.Lock()
        bounds = Bounds()
        self.numbers = (bounds,)
        self.app = gate(self._answer, access, bounds)
        """The ASGI application."""
        self._server = make_server(self.app, bounds)

    def set_token(self, token: str) -> None:
        """Require this token from now on; see `Access.set_token`."""
        if self._own_loop is None:
            self._access.set_token(token)
        else:
            self._own_loop.call_soon_threadsafe(self._access.set_token, token)

    async def serve(self, listener: Listener) -> None:
        """Serve until cancelled; the listener is closed at the end."""
        sys.setswitchinterval(SWITCH_S)
        self._own_loop = own_loop = uvloop.new_event_loop()
        stop = asyncio.Event()
        ended = on_a_thread(lambda: self._run(own_loop, listener, stop), "kv-http")
        try:
            await asyncio.shield(ended)
        finally:
            self._is_stopping = True
            if not ended.done():
                own_loop.call_soon_threadsafe(stop.set)
                await ended
            self._cancel_running()
            await asyncio.gather(*self._running, return_exceptions=True)
            listener.close()

    # --- on the thread ----------------------------------------------------------------------------------------

    def _run(self, own_loop: asyncio.AbstractEventLoop, listener: Listener, stop: asyncio.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: own_loop) as runner:
            runner.run(self._serve(listener, stop))

    async def _serve(self, listener: Listener, stop: asyncio.Event) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[listener.socket]))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise RuntimeError("the HTTP port ended unexpectedly")
        for server in self._server.servers:
            server.close()
        state = self._server.server_state
        for connection in list(state.connections):
            connection.transport.abort()
        self._loop.call_soon_threadsafe(self._cancel_running)
        if state.tasks:
            await asyncio.wait(state.tasks)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a whole request."""
        one = self._bare.get(scope["path"]) if scope["method"] == "GET" else None
        # Cancelled only by a stop, which has cut the connection.
        with contextlib.suppress(asyncio.CancelledError):
            if one is None:
                if self._api is None:
                    self._api = asyncio.get_running_loop().run_in_executor(None, self._make_api)
                await (await asyncio.shield(self._api))(scope, receive, send)
                return
            reply = await self.carry_out(one, {}, {}, b"", dict(scope["headers"]), "")
            body = reply.body
            head = {"content-type": reply.media_type, "content-length": str(len(body))}
            headers = [(name.encode(), value.encode()) for name, value in head.items()]
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _make_api(self) -> ASGIApp:
        from kvstrata.process.http import make_app

        async def answer(one: Operation, request: Request) -> Reply:
            target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            headers, body = dict(request.headers.raw), await request.body()
            return await self.carry_out(one, request.path_params, request.query_params, body, headers, target)

        return make_app(self._title, self._operations, answer)

    async def carry_out(
        self,
        one: Operation,
        path: Mapping[str, str],
        query: Mapping[str, str],
        body: bytes,
        headers: Mapping[bytes, bytes],
        target: str,
    ) -> Reply:
        """Carry out an operation: here, or on the process's loop. `target`: path and query of its URL."""
        try:
            words = {"ask": await asked(one, path, query, body), "headers": headers, "target": target}
            if one.path in PROBES:
                await self._turned()
            if one.path == METRICS:
                async with self._metrics:
                    value = await self._across(one, words)
            elif one.here or one.path in PROBES:
                value = await one.call(self._parts, words)
            else:
                value = await self._across(one, words)
        except KvstrataError as error:
            status = HTTP_STATUS.get(type(error), 500)
            return Reply(Error(error.code, error.message, error.field), status)
        return value if isinstance(value, Reply) else Reply(value, one.status)

    async def _turned(self) -> None:
        """Wait for the next turn of the process's loop."""

        async def ask() -> None:
            await _on(self._loop, asyncio.sleep(0))

        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(ask())
        await asyncio.shield(self._turn)

    async def _across(self, one: Operation, words: Mapping[str, Any]) -> Any:
        """Carry out an operation on the process's loop."""
        return await _on(self._loop, self._there(one, words))

    # --- on the process's loop --------------------------------------------------------------------------------

    async def _there(self, one: Operation, words: Mapping[str, Any]) -> Any:
        task = asyncio.current_task()
        if self._is_stopping or task is None:
            raise asyncio.CancelledError
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await one.call(self._parts, words)

    def _cancel_running(self) -> None:
        for task in self._running:
            task.cancel()


async def make_port(title: str, operations: Sequence[Operation], parts: Any, access: Access) -> Port:
    """A port of this process, which `Port.serve` serves; uvicorn is imported on a thread."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, lambda: Port(title, operations, parts, access, loop))


def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Run a coroutine on another thread's loop."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
