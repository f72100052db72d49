"""The thread that hears the KV events of all engines: their sockets, replays and time limits.

The loop hands over engines and corrections by `post`; the thread alone changes the caches.  A replay has a socket of
its own, so that nothing of an earlier one that took too long is mistaken for it.

An engine that floods delays the others by one turn, and fills no memory: what it publishes waits at the engine, whose
publisher drops what nobody takes.  What it sends again is taken at once, since vLLM 0.32 drops without a word what
its socket cannot hold; above AGAIN_BYTES the rest waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstrata.gateway.residency.feed import Feed
from kvstrata.gateway.residency.sources import Source
from kvstrata.naming import name_thread
from kvstrata.native.core import Registry
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience

TURN, TURN_BYTES = 32, 1 << 20
"""Messages of one engine that are taken in before others have their turn."""
ASK_S = 0.1
"""Least time between two replays of one engine."""
IDLE_S = 5.0
"""After this time without a batch the last one is asked for again: it shows a lost end, and a restart."""
REPLAY_S = 5.0
"""Longest time between two messages of a replay."""
REPLAY_MESSAGES = 200_000
AGAIN_BYTES = 1 << 20
"""Of a replay that were not taken in yet; then nothing more is read."""
QUEUED = 64
"""Messages that wait for this thread, of each engine; further ones wait there."""
REPLAY_QUEUED = 1_000
MESSAGE_BYTES = 4 << 20
"""A step of an engine stores some 100,000 tokens at most, of 5 bytes each."""
SWEEP_CELLS = 65_536
ROUND_S = 0.5
END = (-1).to_bytes(8, "big", signed=True)


class Watched:
    """An engine whose events are heard. Belongs to the thread, but for the plain numbers of `feed`."""

    def __init__(self, name: str, source: Source, feed: Feed) -> None:
        self.name = name
        self.source = source
        self.feed = feed
        self.heard_s = 0.0
        """When the last batch came, or the last replay ended."""
        self.published: zmq.Socket[Any] | None = None
        self.monitor: zmq.Socket[Any] | None = None
        """Tells of new connections of `published`."""
        self.connected = False
        """Whether the engine is there: its connection stands, or it has answered a replay since that was lost."""
        self.replay: zmq.Socket[Any] | None = None
        self.asked_s = float("-inf")
        """When the last replay began."""
        self.again: deque[list[bytes]] = deque()
        """Messages of the replay under way that were not taken in yet."""
        self.again_bytes = 0
        self.replayed_s = 0.0
        """When the last message of the replay under way came."""
        self.replayed = 0
        """Messages of the replay under way."""
        self.held: list[bytes] | None = None
        """A batch that waits for the end of the replay."""


class Watcher:
    """See the module."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._context = zmq.Context()
        self._watched: dict[str, Watched] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self.ended = False
        """Whether the thread hears nothing more."""
        self.error = ""
        """The defect that ended it."""
        self._log = EventLog("residency")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Have this done by the thread. From any thread."""
        self._posted.append(work)
        os.eventfd_write(self._wake, 1)

    def watch(self, engine: Watched) -> None:
        """Hear an engine from now on, in place of an earlier one of this name."""
        self.post(lambda: self._open(engine))

    def unwatch(self, name: str) -> None:
        """Forget an engine."""
        self.post(lambda: self._close(name))

    def check(self, engine: Watched, *, same_life: bool) -> None:
        """Ask an engine for its last batches again, or for all if it has another life."""

        def work() -> None:
            if self._watched.get(engine.name) is not engine:
                return
            if not same_life:
                engine.feed.forget()
            if engine.source.replay:
                self._ask(engine)

        self.post(work)

    def close(self) -> None:
        """End the thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread()
        os.nice(5)  # of this thread only: requests come first
        try:
            while not self._stopping:
                self._round()
        except Exception as error:  # a defect of ours: what was heard is no longer kept up to date
            self.error = f"{type(error).__name__}: {error}"
            self._log.error("kv_events_crashed", error=self.error)
        finally:
            self.ended = True
            for name in list(self._watched):
                self._close(name)
            self._context.destroy(linger=0)

    def _round(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        of: dict[Any, Watched] = {}
        for engine in self._watched.values():
            socket = engine.replay if engine.replay is not None else engine.published
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
                of[socket] = engine
            if engine.replay is None and engine.monitor is not None:
                poller.register(engine.monitor, zmq.POLLIN)  # `_in_time` reads it
        ready = [socket for socket, _ in poller.poll(round(1_000 * self._patience_s()))]
        if self._wake in ready:
            os.eventfd_read(self._wake)
            ready.remove(self._wake)
        while self._posted:
            try:
                self._posted.popleft()()
            except ValueError as error:
                self._log.repeated(30, "full", "kv_index_refuses", reason=str(error))
        for socket in ready:
            # What was posted, or was read before, may have closed it.
            if socket in of and not socket.closed and self._watched.get(of[socket].name) is of[socket]:
                self._read(of[socket], socket)
        for engine in list(self._watched.values()):
            self._replayed_turn(engine)
            self._in_time(engine, time.monotonic())
        if self._registry.usage().retired:
            self._registry.sweep(SWEEP_CELLS)

    def _patience_s(self) -> float:
        """How long to wait for messages."""
        if any(engine.again for engine in self._watched.values()):
            return 0.0
        asks = any(_to_be_asked(engine) for engine in self._watched.values())
        return ASK_S if asks else ROUND_S

    def _open(self, engine: Watched) -> None:
        self._close(engine.name)
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
        socket.setsockopt(zmq.SUBSCRIBE, engine.source.topic.encode())
        engine.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(engine.source.endpoint)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close()
            self._log.warning("kv_events_unreachable", engine=engine.name, reason=str(error))
            return
        engine.published = socket
        self._watched[engine.name] = engine
        engine.heard_s = time.monotonic()
        if engine.feed.asking:
            self._ask(engine)

    def _close(self, name: str) -> None:
        engine = self._watched.pop(name, None)
        if engine is None:
            return
        if engine.published is not None:
            engine.published.disable_monitor()
            engine.published.close()
        self._close_replay(engine)
        engine.connected = False
        engine.feed.cache.forget()

    def _close_replay(self, engine: Watched) -> None:
        if engine.replay is not None:
            engine.replay.close()
            engine.replay = None
        engine.again.clear()
        engine.again_bytes = 0

    def _read(self, engine: Watched, socket: zmq.Socket[Any]) -> None:
        if socket is engine.replay:
            self._read_replay(engine, socket)
            return
        size = 0
        for _ in range(TURN):
            if self._reconnected(engine):
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._published(engine, frames)
            size += sum(map(len, frames))
            if engine.replay is not None or size > TURN_BYTES:
                return

    def _read_replay(self, engine: Watched, socket: zmq.Socket[Any]) -> None:
        """Take what has come of a replay."""
        while engine.again_bytes < AGAIN_BYTES:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            engine.replayed_s = time.monotonic()
            engine.replayed += 1
            engine.again.append(frames)
            engine.again_bytes += sum(map(len, frames))
            if engine.replayed > REPLAY_MESSAGES:
                engine.feed.malformed += 1
                self._end_replay(engine, answered=False)
                return

    def _reconnected(self, engine: Watched) -> bool:
        """Look whether the connection is a new one; returns whether a replay has begun because of it."""
        assert engine.monitor is not None
        fresh = False
        while engine.monitor.poll(0):
            event = recv_monitor_message(engine.monitor)["event"]
            engine.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            fresh |= engine.connected
        if not fresh or not engine.feed.reconnected():
            return False
        return self._ask(engine)

    def _published(self, engine: Watched, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            engine.feed.malformed += 1
            return
        engine.heard_s = time.monotonic()
        if engine.feed.published(int.from_bytes(frames[1], "big"), frames[2]):
            engine.held = frames
            self._ask(engine)

    def _ask(self, engine: Watched) -> bool:
        """Begin a replay; returns False if the last one was begun a moment ago: `_in_time` asks later."""
        now_s = time.monotonic()
        self._close_replay(engine)
        first = engine.feed.replay_from
        engine.feed.ask()
        if now_s < engine.asked_s + ASK_S:
            return False
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, REPLAY_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        engine.replay = socket
        engine.asked_s = engine.replayed_s = now_s
        engine.replayed = 0
        try:
            socket.connect(engine.source.replay)
            socket.send_multipart((b"", first.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._log.repeated(
                30, engine.name, "kv_events_not_repeated", engine=engine.name, reason=str(error)
            )
            self._end_replay(engine, answered=False)
        return True

    def _replayed_turn(self, engine: Watched) -> None:
        """Take in the next messages of a replay."""
        size = 0
        for _ in range(TURN):
            if not engine.again or size > TURN_BYTES:
                return
            frames = engine.again.popleft()
            taken = sum(map(len, frames))
            engine.again_bytes -= taken
            size += taken
            self._replayed(engine, frames)

    def _replayed(self, engine: Watched, frames: list[bytes]) -> None:
        if len(frames) != 4 or len(frames[2]) != 8:
            engine.feed.malformed += 1
            self._end_replay(engine, answered=False)
        elif frames[2] == END:
            self._end_replay(engine, answered=True)
        elif not engine.feed.again(int.from_bytes(frames[2], "big"), frames[3]):
            self._ask(engine)

    def _end_replay(self, engine: Watched, *, answered: bool) -> None:
        self._close_replay(engine)
        engine.heard_s = time.monotonic()
        engine.connected |= answered
        if not engine.feed.asked(answered=answered):
            self._ask(engine)
            return
        held, engine.held = engine.held, None
        if held is not None:
            self._published(engine, held)

    def _in_time(self, engine: Watched, now_s: float) -> None:
        if engine.replay is not None:
            if not engine.again and now_s - engine.replayed_s > patience(REPLAY_S):
                self._end_replay(engine, answered=False)
            return
        self._reconnected(engine)
        if engine.replay is None and (
            _to_be_asked(engine) or (engine.source.replay and now_s - engine.heard_s > IDLE_S)
        ):
            self._ask(engine)


def _to_be_asked(engine: Watched) -> bool:
    """Whether a replay is needed that was put off."""
    return bool(engine.source.replay) and engine.replay is None and engine.feed.asking
