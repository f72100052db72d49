"""The process of one simulated engine: its port, its event sockets, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
import uvloop

from kvstrata.errors import ConfigError
from kvstrata.testing.engine_sim.app import Face, make_app
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.kv_events import Event
from kvstrata.testing.engine_sim.live import LiveEngine
from kvstrata.testing.engine_sim.metrics import Metrics
from kvstrata.testing.engine_sim.zmq_events import Publisher

LEAVE_S = 1
"""Time that answers in flight have to end after a signal."""


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated engine serves and where."""

    host: str
    port: int
    """0: any that is free."""
    served: tuple[str, ...]
    """The model's name, then its adapters'."""
    model: EngineModel
    speed: float
    events_endpoint: str
    """Empty: KV events are not published."""
    replay_endpoint: str
    topic: str
    renders: bool
    ranks: int = 1
    """Data-parallel ranks, each with a cache and a queue of its own."""
    make_engine: Callable[[EngineModel], SimEngine] = SimEngine
    """Makes a rank's engine, which is closed at the end."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def run(settings: SimSettings, say: Callable[[str], None]) -> int:
    """Serve until SIGINT or SIGTERM; returns 0. `say` gets one line once requests are answered. Raises ConfigError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, say))
    return 0


async def serve(settings: SimSettings, say: Callable[[str], None]) -> None:
    """As `run`, on the running loop."""
    with _listen(settings.host, settings.port) as listener:
        publishers: list[Publisher] = []
        engines: list[SimEngine] = []
        ranks: list[LiveEngine] = []
        try:
            if settings.events_endpoint:
                for rank in range(settings.ranks):
                    publishers.append(_publisher(settings, rank))
            for _ in range(settings.ranks):
                engines.append(settings.make_engine(settings.model))
            metrics = Metrics(engines, settings.served[0], settings.speed)
            for rank, engine in enumerate(engines):
                tell = publishers[rank].publish if publishers else _tell_nobody
                ranks.append(
                    LiveEngine(engine, speed=settings.speed, tell=tell, count=metrics.count_of(rank))
                )
            for publisher in publishers:
                publisher.start()
            face = Face(tuple(ranks), metrics, tuple(publishers), settings.served, settings.renders)
            first = publishers[0] if publishers else None
            await _serve_app(make_app(face), listener, lambda: say(_ready(settings, listener, first)))
        finally:
            for live in ranks:
                live.close()
            for engine in engines:
                engine.close()
            for publisher in publishers:
                await publisher.close()


def _publisher(settings: SimSettings, rank: int) -> Publisher:
    return Publisher(settings.events_endpoint, settings.replay_endpoint, topic=settings.topic, rank=rank)


def _tell_nobody(_: list[Event]) -> None:
    """KV events are not published."""


async def _serve_app(app: object, listener: socket.socket, ready: Callable[[], None]) -> None:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=LEAVE_S,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()

    def leave() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    try:
        ready()
        await server.serve(sockets=[listener])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _ready(settings: SimSettings, listener: socket.socket, publisher: Publisher | None) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    line = f"serving {settings.served[0]} at http://{host}:{listener.getsockname()[1]}"
    if publisher is not None:
        line += f", KV events at {publisher.endpoint}"
        if publisher.replay_endpoint is not None:
            line += f", their replay at {publisher.replay_endpoint}"
    return line


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(
            f"--port: {host}:{port} cannot be listened on: {why}; give another --host or --port, or --port 0",
            field="port",
        ) from None
