"""Runs an HTTP API on a thread of its own, with its own loop: nothing that a stranger sends delays the process's loop.

    connection ─▶ head (http_gate.py) ─▶ whole body ─▶ counted ─┬─▶ process's loop: the routes
                                                                └─▶ this thread: what uses nothing of the process

1. A request gets to the process's loop, whose parts its route uses, when its sender has the token and its body is
   whole.  `/metrics`, which may be open, gets there one request at a time.
2. Paths that need no token, those in `here`, and the API's description use nothing of the process.  A probe (PROBES) is
   answered once the process's loop has had a turn, so a loop that hangs shows; all probes that wait share one turn.
3. `Access` and `Logins` are changed on this thread only; the process's loop reads them.
4. A stop cuts the connections, then cancels the routes that run, then ends the thread.

`make_port` imports FastAPI, which takes longer than the rest of a start and occupies the interpreter meanwhile.  So it
runs before the process says that it is ready, and on a thread, so that the process still answers signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from kvstrata.process.http_gate import METRICS, PROBES, Access, guard, sized
from kvstrata.process.listen import Listener
from kvstrata.process.threads import SWITCH_S, on_a_thread

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")
DESCRIPTION = frozenset({"/docs", "/openapi.json"})
"""The pages that FastAPI makes of the API, which takes long the first time."""


class Port:
    """One HTTP port of a process."""

    def __init__(
        self,
        make_app: Callable[[], FastAPI],
        access: Access,
        loop: asyncio.AbstractEventLoop,
        *,
        here: frozenset[str] = frozenset(),
    ) -> None:
        """`loop`: the process's. `here`: paths of rule 2, beside those that need no token."""
        import uvicorn

        from kvstrata.process.http_connections import Bounds, protocol_of

        class _Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                """Leave signals to the process."""
                yield

        self._app: ASGIApp = make_app()
        self._access = access
        self._loop = loop
        self._here = here | DESCRIPTION
        self._own_loop: asyncio.AbstractEventLoop | None = None
        """The thread's loop, while the port is served."""
        self._running: set[asyncio.Task[None]] = set()
        """Routes that run on the process's loop."""
        self._is_stopping = False
        self._turn: asyncio.Task[None] | None = None
        self._metrics = asyncio.Lock()
        bounds = Bounds()
        self.stats = bounds.stats
        """Counts of the port's bounds, for status and metrics."""
        config = uvicorn.Config(
            guard(sized(bounds.limited(self._answer), access), access),
            ws="none",
            http=protocol_of(bounds),  # type: ignore[arg-type]  # a factory, which uvicorn calls as it would a class
            log_config=None,  # uvicorn's lines go where ours go, by the root logger
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=15,
            h11_max_incomplete_event_size=64 << 10,
        )
        config.load()
        self._server = _Server(config)

    def set_token(self, token: str) -> None:
        """Ask for this token from now on; see `Access.set_token`."""
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
            self._cancel_routes()
            await asyncio.gather(*self._running, return_exceptions=True)
            listener.close()

    # --- on the thread ----------------------------------------------------------------------------------------

    def _run(self, own_loop: asyncio.AbstractEventLoop, listener: Listener, stop: asyncio.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: own_loop) as runner:
            runner.run(self._serve(listener, stop))

    async def _serve(self, listener: Listener, stop: asyncio.Event) -> None:
        serving = asyncio.create_task(listener.serve(self._server))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise RuntimeError("the HTTP port has ended by itself")
        for server in self._server.servers:
            server.close()
        state = self._server.server_state
        for connection in list(state.connections):
            connection.transport.abort()
        self._loop.call_soon_threadsafe(self._cancel_routes)
        if state.tasks:
            await asyncio.wait(state.tasks)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for a whole request: here, or on the process's loop."""
        path = scope["path"]
        if path in PROBES:
            await self._turned()
            await self._app(scope, receive, send)
        elif path == METRICS:
            answer: list[Message] = []

            async def keep(message: Message) -> None:
                answer.append(message)

            async with self._metrics:
                await self._across(scope, receive, keep)
            for message in answer:  # for which a client that does not read may make us wait
                await send(message)
        elif path in self._here or self._access.is_public(path):
            await self._app(scope, receive, send)
        else:
            await self._across(scope, receive, send)

    async def _turned(self) -> None:
        """Returns when the process's loop has had a turn."""

        async def ask() -> None:
            await _on(self._loop, asyncio.sleep(0))

        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(ask())
        await asyncio.shield(self._turn)

    async def _across(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app on the process's loop."""
        first: Message | None = await receive()
        own_loop = asyncio.get_running_loop()

        async def receive_there() -> Any:
            nonlocal first
            message, first = first, None
            return await _on(own_loop, receive()) if message is None else message

        async def send_there(message: Message) -> None:
            await _on(own_loop, send(message))

        # Cancelled only by a stop, which has cut the connection.
        with contextlib.suppress(asyncio.CancelledError):
            await _on(self._loop, self._route(scope, receive_there, send_there))

    # --- on the process's loop --------------------------------------------------------------------------------

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if self._is_stopping or task is None:
            raise asyncio.CancelledError
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await self._app(scope, receive, send)

    def _cancel_routes(self) -> None:
        for task in self._running:
            task.cancel()


async def make_port(
    make_app: Callable[[], FastAPI],
    access: Access,
    *,
    here: frozenset[str] = frozenset(),
) -> Port:
    """A port of this process, which `Port.serve` serves; for the arguments see `Port`. `make_app` runs on a thread."""
    loop = asyncio.get_running_loop()
    port = await loop.run_in_executor(None, lambda: Port(make_app, access, loop, here=here))
    from anyio import to_thread

    to_thread.current_default_thread_limiter()  # imports the rest of anyio now, not in the first request
    return port


def _on(loop: asyncio.AbstractEventLoop, work: Awaitable[T]) -> asyncio.Future[T]:
    """Run a coroutine on another thread's loop."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))  # type: ignore[arg-type]
