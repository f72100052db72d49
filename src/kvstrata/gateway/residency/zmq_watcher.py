"""The thread that hears the KV events of all engines: their sockets, replays and time limits.

Batches are numbered from 0 in each life of an engine.  The publisher keeps the last ones and sends them again from a
number on (a replay).

    joining ──replay from 0──▶ in order ──gap, or silence──▶ asking ──replay from the next number──▶ in order
       ▲                          │
       └── forget ── a new connection, perhaps to another life of the engine

1. Batches are applied in the order of their numbers, each once.
2. Batches that cannot be had again mean that everything is forgotten.
3. The loop hands over engines and corrections by `post`; the thread alone changes the caches.
4. A replay has a socket of its own, so that nothing of an earlier one that took too long is mistaken for it.
5. An engine that floods delays the others by one turn, and fills no memory: what it publishes waits at the engine,
   whose publisher drops what nobody takes.  What it sends again is taken at once, since vLLM 0.32 drops without a word
   what its socket cannot hold; above AGAIN_BYTES the rest waits.
6. A defect ends one round of the thread: everything is forgotten, and after a pause, which doubles, it joins anew.
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

from kvstrata.gateway.residency.cache import Cache, decoded
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
"""After this time without a batch what follows the last one is asked for: it shows a lost end."""
REPLAY_S = 5.0
"""Longest time between two messages of a replay."""
REPLAY_MESSAGES = 200_000
AGAIN_BYTES = 1 << 20
"""Of a replay that were not taken in yet; then nothing more is read."""
QUEUED, REPLAY_QUEUED = 64, 1_000
"""Messages of each engine, and of its replay, that wait for this thread; further ones wait there."""
MESSAGE_BYTES = 4 << 20
"""A step of an engine stores some 100,000 tokens at most, of 5 bytes each."""
SWEEP_CELLS = 65_536
ROUND_S = 0.5
AGAIN_S, AGAIN_MAX_S = 1.0, 60.0
"""Pause after a defect."""
END = (-1).to_bytes(8, "big", signed=True)


class Feed:
    """One engine's events in order: what the numbers of its batches mean. Belongs to the thread of the watcher."""

    def __init__(self, cache: Cache, *, replays: bool) -> None:
        """`replays`: whether the engine sends batches again."""
        self.cache = cache
        self.replays = replays
        self.asking = self.joining = replays
        """Whether a replay is needed or under way, and whether it is the first one of this connection."""
        self.next = 0 if replays else -1
        """The number of the batch to come; -1: any."""
        self.batches = 0
        self.gaps = 0
        """Times that batches were lost for good."""
        self.restarts = 0
        """Times that an engine may have begun another life."""
        self.malformed = 0
        self.whole = False
        """Whether every event of the engine's life was heard."""

    @property
    def phase(self) -> str:
        """See the module."""
        return "joining" if self.joining else "asking" if self.asking else "in_order"

    def published(self, number: int, payload: bytes) -> bool:
        """A batch has come; returns whether a replay is needed first, after which the batch must be given again."""
        if number > self.next >= 0 and self.replays:
            self.asking = True
        if self.asking:
            return True
        self.take(number, payload)
        return False

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch, also of a replay, unless it was applied before; what should have come before it is lost."""
        if number < self.next:
            return
        if not number:
            self.whole = True
        elif self.joining or self.next < 0:
            if number > self.next:
                self.cache.missed()
        elif number > self.next:
            self._lost()
        self.next = number + 1
        self.batches += 1
        try:
            self.cache.apply(decoded(payload))
        except ValueError:
            self.malformed += 1
            self._lost()

    def asked(self, *, answered: bool) -> None:
        """The replay has ended, or could not be had."""
        if answered and not self.next:
            self.whole = True
        elif not answered:
            if not self.joining:
                self._lost()
            self.next = -1
        self.asking = self.joining = False

    def restarted(self) -> None:
        """The engine may have another life now."""
        self.restarts += 1
        self.cache.emptied()
        self.whole = False
        self.next = 0 if self.replays else -1
        self.asking = self.joining = self.replays

    def _lost(self) -> None:
        self.gaps += 1
        self.whole = False
        self.cache.missed()


class Watched:
    """An engine whose events are heard. Belongs to the thread, but for the plain numbers of `feed`."""

    def __init__(self, name: str, source: Source, feed: Feed) -> None:
        self.name, self.source, self.feed = name, source, feed
        self.heard_s = 0.0
        """When the last batch came, or the last replay ended."""
        self.published: zmq.Socket[Any] | None = None
        self.monitor: zmq.Socket[Any] | None = None
        """Tells of new connections of `published`."""
        self.met = False
        """Whether there was a connection."""
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

    @property
    def to_be_asked(self) -> bool:
        """Whether a replay is needed that was put off."""
        return self.replay is None and self.feed.asking

    def close_replay(self) -> None:
        """Nothing of the replay under way is wanted any more."""
        if self.replay is not None:
            self.replay.close()
            self.replay = None
        self.again.clear()
        self.again_bytes = 0

    def close(self) -> None:
        """Hear nothing any more, and know nothing."""
        if self.published is not None:
            self.published.disable_monitor()
            self.published.close()
            self.published = self.monitor = None
        self.close_replay()
        self.held, self.met, self.connected = None, False, False
        self.feed.cache.forget()


class Watcher:
    """See the module."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._context = zmq.Context()
        self._watched: dict[str, Watched] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self.hears = True
        self.error = ""
        """The last defect."""
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

    def restarted(self, engine: Watched) -> None:
        """An engine may have another life: hear all of it."""

        def work() -> None:
            if self._watched.get(engine.name) is engine:
                self._join(engine)

        self.post(work)

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread()
        os.nice(5)  # of this thread only: requests come first
        pause_s, began_s = AGAIN_S, time.monotonic()
        while not self._stopping.is_set():
            try:
                self._round()
            except Exception as error:  # a defect of ours: what was heard is no longer kept up to date
                self.hears = False
                self.error = f"{type(error).__name__}: {error}"
                pause_s = (
                    AGAIN_S if time.monotonic() - began_s > AGAIN_MAX_S else min(2 * pause_s, AGAIN_MAX_S)
                )
                self._log.error("kv_events_crashed", error=self.error, again_s=pause_s)
                for engine in self._watched.values():
                    engine.close()
                self._stopping.wait(pause_s)
                for engine in list(self._watched.values()):
                    engine.feed.restarted()
                    self._open(engine)
                self.hears, began_s = True, time.monotonic()
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
            self._posted.popleft()()
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
        return ASK_S if any(engine.to_be_asked for engine in self._watched.values()) else ROUND_S

    def _open(self, engine: Watched) -> None:
        self._close(engine.name)
        socket = self._socket(zmq.SUB, QUEUED)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
        socket.setsockopt(zmq.SUBSCRIBE, engine.source.topic.encode())
        engine.published = socket
        engine.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(engine.source.endpoint)
        except zmq.ZMQError as error:
            engine.close()
            self._log.warning("kv_events_unreachable", engine=engine.name, reason=str(error))
            return
        self._watched[engine.name] = engine
        engine.heard_s = time.monotonic()
        if engine.feed.asking:
            self._ask(engine)

    def _socket(self, kind: int, queued: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, queued)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _close(self, name: str) -> None:
        if (engine := self._watched.pop(name, None)) is not None:
            engine.close()

    def _join(self, engine: Watched) -> None:
        """Forget an engine, and hear all that it can tell."""
        engine.feed.restarted()
        engine.held = None
        if engine.feed.asking:
            self._ask(engine)

    def _read(self, engine: Watched, socket: zmq.Socket[Any]) -> None:
        if socket is engine.replay:
            self._read_replay(engine, socket)
            return
        size = 0
        for _ in range(TURN):
            self._look_for_connections(engine)
            if engine.replay is not None or size > TURN_BYTES:
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._published(engine, frames)
            size += sum(map(len, frames))

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

    def _look_for_connections(self, engine: Watched) -> None:
        """Join anew if the connection is another one than before."""
        assert engine.monitor is not None
        fresh = 0
        while engine.monitor.poll(0):
            event = recv_monitor_message(engine.monitor)["event"]
            engine.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            fresh += engine.connected
        if fresh and (engine.met or fresh > 1):
            self._join(engine)
        elif fresh and engine.feed.replays:
            self._ask(engine)  # what was published since the first replay was not heard
        engine.met |= bool(fresh)

    def _published(self, engine: Watched, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            engine.feed.malformed += 1
            return
        engine.heard_s = time.monotonic()
        if engine.feed.published(int.from_bytes(frames[1], "big"), frames[2]):
            engine.held = frames
            self._ask(engine)

    def _ask(self, engine: Watched) -> None:
        """Begin a replay, unless the last one was begun a moment ago: `_in_time` asks later."""
        now_s = time.monotonic()
        engine.close_replay()
        engine.feed.asking = True
        if now_s < engine.asked_s + ASK_S:
            return
        engine.replay = socket = self._socket(zmq.DEALER, REPLAY_QUEUED)
        engine.asked_s = engine.replayed_s = now_s
        engine.replayed = 0
        try:
            socket.connect(engine.source.replay)
            socket.send_multipart((b"", max(0, engine.feed.next).to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            says = {"engine": engine.name, "reason": str(error)}
            self._log.repeated(30, engine.name, "kv_events_not_repeated", **says)
            self._end_replay(engine, answered=False)

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
            if len(frames) != 4 or len(frames[2]) != 8:
                engine.feed.malformed += 1
                self._end_replay(engine, answered=False)
            elif frames[2] == END:
                self._end_replay(engine, answered=True)
            else:
                engine.feed.take(int.from_bytes(frames[2], "big"), frames[3])

    def _end_replay(self, engine: Watched, *, answered: bool) -> None:
        engine.close_replay()
        engine.heard_s = time.monotonic()
        engine.connected |= answered
        engine.feed.asked(answered=answered)
        held, engine.held = engine.held, None
        if held is not None:
            self._published(engine, held)

    def _in_time(self, engine: Watched, now_s: float) -> None:
        if engine.replay is not None:
            if not engine.again and now_s - engine.replayed_s > patience(REPLAY_S):
                self._end_replay(engine, answered=False)
            return
        self._look_for_connections(engine)
        silent = engine.source.replay and now_s - engine.heard_s > IDLE_S
        if engine.replay is None and (silent or engine.to_be_asked):
            self._ask(engine)
