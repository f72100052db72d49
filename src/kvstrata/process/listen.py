"""Runs an HTTP API on the process's own loop.

`prepare` imports FastAPI, which takes longer than the rest of a start and occupies the interpreter meanwhile.  So it
runs before the process says that it is ready, and on a thread, so that the process still answers signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.config.model import ListenSettings
from kvstrata.config.tokens import read_bearer_token
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.process.http_gate import Access, guard, is_loopback, sized
from kvstrata.process.http_token import FIELD, TokenFile, fresh_token
from kvstrata.process.ports import port_holder

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI


def read_token(settings: ListenSettings, *, insecure: bool, fresh: bool) -> str:
    """The bearer token of the settings' file; without a file, with `fresh`, a new one; empty for an open port.

    Raises ConfigError if a port that can be reached from elsewhere would be open without `insecure`.
    """
    if settings.token_file:
        return read_bearer_token(settings.token_file, FIELD)
    if not is_loopback(settings.host) and not insecure:
        raise ConfigError(
            f"http.host: {settings.host!r} is not loopback: set http.token_file, or --insecure to go without",
            field="http.host",
        )
    return fresh_token() if fresh and not insecure else ""


def publish_token(settings: ListenSettings, token: str, port: int, log: EventLog) -> TokenFile | None:
    """Put a port's token where clients of the same user find it; None if the port has no token.

    Raises ConfigError, unless clients can be given the settings' own file.
    """
    if not token:
        return None
    try:
        return TokenFile(token, port)
    except ConfigError as error:
        if not settings.token_file:
            raise
        log.warning("http_token_not_found", note=f"clients need --token-file: {error.message}")
        return None


def warn_if_open(settings: ListenSettings, token: str, port: int, log: EventLog, *, insecure: bool) -> None:
    """Log that `--insecure` opens a port to everybody."""
    if insecure and not token:
        log.warning(
            "http_port_open",
            host=settings.host,
            port=port,
            note="--insecure: everybody who reaches this port may read and change everything; set http.token_file",
        )


def listen(settings: ListenSettings, *, flag: str = "--http-port") -> socket.socket:
    """A listening socket. Raises ConfigError that names the process that has the port, and the flag to change."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        holder = port_holder(settings.port)
        by = f", held by {holder}" if holder else ""
        raise ConfigError(
            f"http.port: cannot listen on {settings.host}:{settings.port}: {error.strerror}{by};"
            f" choose another {flag}, or 0 for a free one",
            field="http.port",
        ) from None
    listener.listen(128)
    listener.setblocking(False)
    return listener


class Prepared(NamedTuple):
    """A uvicorn server for `serve`, and the counters of its port's bounds."""

    server: uvicorn.Server
    stats: Callable[[], dict[str, int]]


async def prepare(
    make_app: Callable[[], FastAPI],
    access: Access,
    *,
    streams: frozenset[str] = frozenset(),
) -> Prepared:
    """Make a server for `serve`. `make_app` runs on a thread; `streams`: paths that bound their requests themselves."""
    server = await asyncio.get_running_loop().run_in_executor(None, _make_server, make_app, access, streams)
    from anyio import to_thread

    to_thread.current_default_thread_limiter()  # imports the rest of anyio now, not in the first request
    return server


async def serve(listener: socket.socket, prepared: Prepared) -> None:
    """Serve until cancelled; the listener is closed at the end."""
    try:
        await prepared.server.serve(sockets=[listener])
    finally:
        listener.close()


def _make_server(
    make_app: Callable[[], FastAPI],
    access: Access,
    streams: frozenset[str],
) -> Prepared:
    import uvicorn

    from kvstrata.process.http_connections import Bounds, protocol_of

    class _Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave signals to the process."""
            yield

    bounds = Bounds()
    config = uvicorn.Config(
        guard(bounds.limited(sized(make_app(), access), streams), access),
        ws="none",
        http=protocol_of(bounds),  # type: ignore[arg-type]  # a factory, which uvicorn calls as it would a class
        log_config=None,  # uvicorn's lines go where ours go, by the root logger
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=15,
        h11_max_incomplete_event_size=64 << 10,
    )
    config.load()
    return Prepared(_Server(config), bounds.stats)
