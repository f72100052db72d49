"""The thread that receives the KV events of all engines: their sockets, replays and time limits.

Batches are numbered from 0 in each run of an engine.  The publisher keeps the last batches and sends them again from a
given number on (a replay).

    joining ──replay from 0──▶ in order ──gap, or silence──▶ asking ──replay from the next number──▶ in order
       ▲                          │
       └── forget ── a new connection, perhaps to another run of the engine

1. Batches are applied in the order of their numbers, each once.
2. If missed batches cannot be replayed, all blocks of the engine are forgotten.
3. The loop hands over engines and corrections by `post`; only this thread changes the caches.
4. A replay has a socket of its own, so that late messages of an earlier replay are not mistaken for it.
5. An engine that floods delays the others by one turn, and fills no memory here: its messages wait at the engine, whose
   publisher drops those that are not received.  Replayed batches are received at once, up to REPLAY_QUEUED messages,
   since vLLM 0.32 silently drops what its socket cannot hold.
6. A defect of the gateway ends the subscription to one engine only: its blocks are forgotten, and after a pause, which
   doubles, the thread subscribes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstrata.gateway.residency.cache import Cache, decoded
from kvstrata.gateway.residency.sources import Source
from kvstrata.naming import name_thread
from kvstrata.native.core import Registry
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience

TURN, TURN_BYTES = 32, 1 << 20
"""Maximum messages, and bytes, of one engine that are processed before the other engines have their turn."""
ASK_S = 0.1
"""Minimum time between two replays of one engine."""
IDLE_S = 5.0
"""Time without a batch after which a replay is requested, which shows whether the last batches were lost."""
REPLAY_S = 5.0
"""Maximum time between two messages of a replay."""
REPLAY_MESSAGES = 200_000
QUEUED, REPLAY_QUEUED = 64, 2_000
"""Maximum messages of an engine, and of its replay, in the sockets' queues; further ones wait at the engine."""
MESSAGE_BYTES = 4 << 20
"""Maximum size of a message; a step of an engine stores at most about 100,000 tokens of 5 bytes each."""
SWEEP_CELLS = 65_536
ROUND_S = 0.5
AGAIN_S, AGAIN_MAX_S = 1.0, 60.0
"""First and longest pause after a defect."""
END = (-1).to_bytes(8, "big", signed=True)


class Feed:
    """The sequence of one engine's batches: applies them in order, and detects gaps and restarts.

    Belongs to the watcher's thread; other threads may read its numbers.
    """

    def __init__(self, cache: Cache, source: Source, name: str = "", owner: object = None) -> None:
        """`owner`: the engine for which `Residency.listen` has subscribed."""
        self.cache, self.source, self.name, self.owner = cache, source, name, owner
        self.replays = replays = bool(source.replay)
        """Whether the engine can replay batches."""
        self.connected = False
        """Whether the engine is reachable: it is connected, or has answered a replay since the connection was lost."""
        self.error, self.failures = "", 0
        """Text of the last defect, and number of defects."""
        self.asking = self.joining = replays
        """Whether a replay is needed or under way, and whether it is the first one of this connection."""
        self.next = 0 if replays else -1
        """The number of the next batch; -1: any."""
        self.batches = 0
        self.gaps = 0
        """Number of losses of batches that could not be repaired."""
        self.restarts = 0
        """Number of times that the engine may have restarted."""
        self.malformed = 0
        self.whole = False
        """Whether all events since the engine's start have been applied."""

    @property
    def phase(self) -> str:
        """The state in the module's diagram."""
        return "joining" if self.joining else "asking" if self.asking else "in_order"

    def published(self, number: int, payload: bytes) -> bool:
        """Apply a received batch; returns True if a replay is needed first, after which this must be called again."""
        if number > self.next >= 0 and self.replays:
            self.asking = True
        if self.asking:
            return True
        self.take(number, payload)
        return False

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch, live or replayed, unless it was applied before; batches missing before it count as lost."""
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
        """Handle the end of a replay; `answered`: it was complete."""
        if answered and not self.next:
            self.whole = True
        elif not answered:
            if not self.joining:
                self._lost()
            self.next = -1
        self.asking = self.joining = False

    def restarted(self) -> None:
        """Begin anew, since the engine may have restarted."""
        self.restarts += 1
        self.cache.emptied()
        self.whole = False
        self.next = 0 if self.replays else -1
        self.asking = self.joining = self.replays

    def _lost(self) -> None:
        self.gaps += 1
        self.whole = False
        self.cache.missed()


class Watcher:
    """The thread that receives all engines' events."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._tasks: dict[Feed, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._context = zmq.Context()
        self._log = EventLog("residency")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` on the watcher's thread. May be called from any thread."""
        self._loop.call_soon_threadsafe(work)

    def watch(self, feed: Feed) -> None:
        """Subscribe to an engine; one that is subscribed already counts as restarted."""

        def work() -> None:
            if feed in self._tasks:
                self._close(feed)
                feed.restarted()
            self._tasks[feed] = self._loop.create_task(self._keep(feed))

        self.post(work)

    def unwatch(self, feed: Feed) -> None:
        """End a subscription, and forget the engine's blocks."""
        self.post(lambda: self._close(feed))

    def close(self) -> None:
        """End the thread."""
        self.post(self._loop.stop)
        self._thread.join()
        self._context.destroy(linger=0)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread()
        os.nice(5)  # for this thread only, since requests have priority
        sweeping = self._loop.create_task(self._sweep())
        self._loop.run_forever()
        tasks = [sweeping, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            while self._registry.usage().retired:
                self._registry.sweep(SWEEP_CELLS)
                await asyncio.sleep(0)

    def _close(self, feed: Feed) -> None:
        self._tasks.pop(feed).cancel()
        feed.connected = False
        feed.cache.forget()

    async def _keep(self, feed: Feed) -> None:
        """Receive one engine's events until cancelled; subscribes again after each defect."""
        pause_s = AGAIN_S
        while True:
            began_s = time.monotonic()
            try:
                await _Subscription(feed, self._context, self._log).run()
            except Exception as error:  # a defect of the gateway: the known blocks are no longer up to date
                feed.error, feed.failures = f"{type(error).__name__}: {error}", feed.failures + 1
                pause_s = (
                    AGAIN_S if time.monotonic() - began_s > AGAIN_MAX_S else min(2 * pause_s, AGAIN_MAX_S)
                )
                self._log.error("kv_events_failed", engine=feed.name, error=feed.error, again_s=pause_s)
                feed.connected = False
                feed.restarted()
                await asyncio.sleep(pause_s)


class _Subscription:
    """One engine's sockets, until a defect. Belongs to the watcher's thread."""

    def __init__(self, feed: Feed, context: zmq.Context[zmq.Socket[bytes]], log: EventLog) -> None:
        self.feed, self._context, self._log = feed, context, log
        self._woken = asyncio.Event()
        """Set when one of the sockets may have a message."""
        self._heard_s = time.monotonic()
        """Time of the last batch, or of the end of the last replay if later."""
        self._asked_s = float("-inf")
        """Time of the start of the last replay."""

    def _socket(self, kind: int, queued: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, queued)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    @contextlib.contextmanager
    def _read(self, *sockets: zmq.Socket[bytes]) -> Iterator[None]:
        """Set `_woken` when one of these sockets may have a message; closes the sockets at the end."""
        loop = asyncio.get_running_loop()
        for one in sockets:
            loop.add_reader(one, self._woken.set)
        try:
            yield
        finally:
            for one in sockets:
                loop.remove_reader(one)
                one.close()

    async def _wait(self) -> None:
        """Wait until a socket may have a message, for at most ROUND_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUND_S):
                await self._woken.wait()
        self._woken.clear()

    async def run(self) -> None:
        """Receive the engine's events until cancelled."""
        feed, met = self.feed, False
        socket = self._socket(zmq.SUB, QUEUED)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
        socket.setsockopt(zmq.SUBSCRIBE, feed.source.topic.encode())
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        with self._read(monitor, socket):
            try:
                socket.connect(feed.source.endpoint)
                while True:
                    met = self._connections(monitor, met=met)
                    silent = feed.replays and time.monotonic() - self._heard_s > IDLE_S
                    if feed.asking or silent:
                        await self._replay()
                    elif await self._published(socket):
                        await asyncio.sleep(0)
                    else:
                        await self._wait()
            finally:
                socket.disable_monitor()

    def _connections(self, monitor: zmq.Socket[bytes], *, met: bool) -> bool:
        """Handle changes of the connection; a second one counts as a restart. Returns whether there has been one."""
        feed, fresh = self.feed, 0
        while monitor.poll(0):
            event = recv_monitor_message(monitor)["event"]
            feed.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            fresh += feed.connected
        if fresh and (met or fresh > 1):
            feed.restarted()
        elif fresh and feed.replays:
            feed.asking = True  # batches after the first replay, before the connection, were not received
        return met or fresh > 0

    async def _published(self, socket: zmq.Socket[bytes]) -> bool:
        """Process received messages, with a replay at a gap. Returns False if the queue is empty now."""
        feed, size = self.feed, 0
        for _ in range(TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(frames) != 3 or len(frames[1]) != 8:
                feed.malformed += 1
                continue
            self._heard_s = time.monotonic()
            number, size = int.from_bytes(frames[1], "big"), size + sum(map(len, frames))
            while feed.published(number, frames[2]):
                await self._replay()
            if size > TURN_BYTES:
                break
        return True

    async def _replay(self) -> None:
        """Request and apply a replay of the batches after the last one, at least ASK_S after the previous replay."""
        feed, answered, size, count = self.feed, False, 0, 0
        feed.asking = True
        await asyncio.sleep(self._asked_s + ASK_S - time.monotonic())
        self._asked_s = came_s = time.monotonic()
        socket = self._socket(zmq.DEALER, REPLAY_QUEUED)
        with self._read(socket):
            try:
                socket.connect(feed.source.replay)
                socket.send_multipart((b"", max(0, feed.next).to_bytes(8, "big")), zmq.NOBLOCK)
                while not answered and time.monotonic() - came_s <= patience(REPLAY_S):
                    if not socket.poll(0):
                        await self._wait()
                        continue
                    frames, came_s = socket.recv_multipart(zmq.NOBLOCK), time.monotonic()
                    count, size = count + 1, size + sum(map(len, frames))
                    if len(frames) != 4 or len(frames[2]) != 8 or count > REPLAY_MESSAGES:
                        feed.malformed += 1
                        break
                    answered = frames[2] == END
                    if not answered:
                        feed.take(int.from_bytes(frames[2], "big"), frames[3])
                    if not count % TURN or size > TURN_BYTES:
                        size = 0
                        await asyncio.sleep(0)
            except zmq.ZMQError as error:
                says = {"engine": feed.name, "reason": str(error)}
                self._log.repeated(30, feed.name, "kv_events_not_repeated", **says)
        self._heard_s = time.monotonic()
        feed.connected |= answered
        feed.asked(answered=answered)
