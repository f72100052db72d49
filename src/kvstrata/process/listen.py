"""Runs an HTTP API on the process's own loop.

`prepare` imports FastAPI, which takes longer than the rest of a start and holds the interpreter meanwhile: so it comes
before the process says that it is ready, and on a thread, where signals are still answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.config.model import ListenSettings
from kvstrata.errors import ConfigError
from kvstrata.process.ports import port_holder

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine only. Names other than localhost count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(settings: ListenSettings, *, insecure: bool) -> str:
    """The bearer token, empty where none is needed. Raises ConfigError off loopback without one."""
    if settings.token_file:
        try:
            token = Path(settings.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"http.token_file: cannot be read: {error}", field="http.token_file") from None
        if len(token) < 16:
            raise ConfigError(
                f"http.token_file: {settings.token_file}: holds {len(token)} characters, needs at least 16",
                field="http.token_file",
            )
        return token
    if not is_loopback(settings.host) and not insecure:
        raise ConfigError(
            f"http.host: {settings.host!r} is not loopback: set http.token_file, or --insecure to go without",
            field="http.host",
        )
    return ""


def listen(settings: ListenSettings, *, flag: str = "--http-port") -> socket.socket:
    """A listening socket. Raises ConfigError that says who holds the port and names the flag that sets it."""
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
    """What `serve` serves, and counts of its port."""

    server: uvicorn.Server
    stats: Callable[[], dict[str, int]]


async def prepare(make_app: Callable[[], FastAPI], *, streams: frozenset[str] = frozenset()) -> Prepared:
    """What `serve` serves. `make_app` is called on a thread; `streams`: paths that bound their requests themselves."""
    server = await asyncio.get_running_loop().run_in_executor(None, _make_server, make_app, streams)
    from anyio import to_thread

    to_thread.current_default_thread_limiter()  # or the first request would import the rest of anyio
    return server


async def serve(listener: socket.socket, prepared: Prepared) -> None:
    """Serve until cancelled; the listener is closed at the end."""
    try:
        await prepared.server.serve(sockets=[listener])
    finally:
        listener.close()


def _make_server(make_app: Callable[[], FastAPI], streams: frozenset[str]) -> Prepared:
    import uvicorn

    from kvstrata.process.http_connections import Bounds, protocol_of

    class _Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are the server process's own business."""
            yield

    bounds = Bounds()
    config = uvicorn.Config(
        bounds.limited(make_app(), streams),
        http=protocol_of(bounds),  # type: ignore[arg-type]  # called to make one, as a class is
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=15,
        h11_max_incomplete_event_size=64 << 10,
    )
    config.load()
    return Prepared(_Server(config), bounds.stats)
