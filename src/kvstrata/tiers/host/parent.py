"""The server's side of an adapter that runs in a child process of its own (`"isolation": "process"`).

While no child is up, `exists` answers UNKNOWN('host_down'), `put` THROTTLED('host_down') and `load`
FAILED('host_down'), at once.  Operations under way when the child ends are FAILED or UNKNOWN with 'host_died'.

A child is spawned, gets requests, is killed when it is silent, reaped, and replaced after a pause.  The pauses double
up to `max_pause_s`, until a child has lived for STEADY_S.

    closed ─spawned─▶ starting ─opened─▶ up ─broken─▶ down ─spawned─▶ starting ─broken─▶ down
    any state ─close()─▶ closed

Invariants
1. Each item's hold is in the table of requests from the moment its item was accepted until the child says that the
   adapter has finished with its bytes, or until the child was reaped: no deadline, cancelled wait or closed channel
   drops it.
2. The server does not trust the child.  An answer must name a request in the table, fit its operation and have one
   outcome per item; a drop must name a hold in the table.  A child that sends anything else is killed, and the bytes
   that it wrote into extents are verified where they are used.
3. Frames that the child has not read wait here; beyond QUEUE_BYTES or MAX_REQUESTS, requests are refused.
4. A child that has work and has sent nothing for `kill_ms` is killed.  Where `capabilities.quiesce` is `never`, a child
   with an operation older than `kill_ms` is killed too.  Both limits grow with the bytes under way, as deadlines do.
   A clear has no time limit.  A Report does not count as a sign of work: the child's loop sends it even if its adapter
   hangs.

The process: child.py, process.py; the messages: frames.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from kvstrata.errors import ConfigError, StorageError
from kvstrata.patience import patience
from kvstrata.tiers.base import (
    MORE_KEYS,
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    KeyPage,
    Outcome,
    Presence,
    ReadsPeers,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.host import frames
from kvstrata.tiers.host.frames import MAX_ITEMS, Call, Channel, ChannelError, Message
from kvstrata.tiers.host.process import HostProcess
from kvstrata.tiers.reasons import HOST_DIED, HOST_DOWN, QUEUE_FULL
from kvstrata.tiers.work import Work
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)

MAX_REQUESTS = 4_096
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0
STEADY_S = 10.0
"""Lifetime of a child after which the pauses begin again with the shortest."""
OPEN_S = 600.0
"""Maximum wait for a restarted child to open its adapter. (The first open has no time limit here.)"""
CLOSE_S = 3.0
"""Time for the child to end after Close before it is killed; each answer restarts it."""


class _Request:
    """A row of the table, removed when the request is answered and all its holds are dropped."""

    __slots__ = ("begun_s", "bytes", "call", "count", "future", "held", "items")

    def __init__(self, call: Call, items: Sequence[Item], begun_s: float) -> None:
        self.call = call
        self.count = len(call.keys) // KEY_BYTES or len(items)
        self.items = items
        self.held = set(range(len(items)))
        """Items whose holds the child has not dropped."""
        self.bytes = sum([item.hold.length for item in items])
        self.begun_s = begun_s
        self.future: asyncio.Future[Any] | None = asyncio.get_running_loop().create_future()
        """Gets the adapter's answer, see frames.py; None once the request was answered."""

    def take(self, message: frames.Answer | frames.Raised | frames.Dropped) -> None:
        """Apply a message of the child about this request. Raises ChannelError if it contradicts the request."""
        if not isinstance(message, frames.Dropped):
            if self.future is None:
                raise ChannelError(f"request {message.number} was answered before")
            if isinstance(message, frames.Answer):
                result: Any = frames.result_of(self.call.operation, self.count, message)
                for item, outcome, reason in zip(self.items, *result, strict=True) if self.items else ():
                    item.outcome, item.reason = outcome, reason
            else:
                result = (StorageError if message.kind == "StorageError" else HostedError)(message.message)
        for index in message.dropped:
            if index not in self.held:
                raise ChannelError(f"item {index} of {self.count} is dropped but not held")
            self.held.remove(index)
            self.items[index].hold.drop()
        if not isinstance(message, frames.Dropped):
            self._end(result)

    def leave(self, name: str, outcome: Outcome, why: str) -> None:
        """End an unanswered request: its items get this outcome, its keys are unknown or not deleted."""
        for index in self.held:
            self.items[index].hold.drop()
        if self.future is None:
            return
        for item in self.items:
            item.outcome, item.reason = outcome, why
        result: Any = None
        match self.call.operation:
            case "exists":
                result = bytes([Presence.UNKNOWN]) * self.count, why
            case "delete":
                result = 0
            case "clear":
                result = StorageError(f"{name}: not cleared: {why}", field=name)
            case "usage":
                result = Usage(0, 0, 0)
        self._end(result)

    def _end(self, result: Any) -> None:
        future, self.future = self.future, None
        if future is None or future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


class HostedError(Exception):
    """The adapter in the child raised, which its contract forbids; the child's log has the traceback."""


class HostedAdapter(StorageAdapter, ReadsPeers):
    """Runs a tier's medium in a child process. `capabilities` are the medium's once it is open.

    A child is killed after `kill_ms` of silence, and as long again for every `bytes_per_kill` of payload under way.
    """

    def __init__(
        self,
        config: TierConfig,
        *,
        kill_ms: int,
        bytes_per_kill: int = 64 << 20,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self.name = config.name
        self.capabilities = Capabilities(persistent=False, shared=False)
        self.kill_s = kill_ms / 1000
        self._bytes_per_kill = bytes_per_kill
        self._max_pause_s = max_pause_s
        self._config = config
        self._reported = frames.Report()
        """The child's counters and remarks, about a second old; empty after the child has ended."""
        self._advertisement = b""
        self._restarts = 0
        """Number of children started to replace one that had ended."""
        self._requests: dict[int, _Request] = {}
        self._last_number = 0
        self._heard_s = 0.0
        """When the child last showed a sign of work, or got work after it had none."""
        self._context: AdapterContext | None = None
        self._pool_fds: list[int] = []
        self._process: HostProcess | None = None
        self._channel: Channel | None = None
        """None while no child accepts requests."""
        self._opening: asyncio.Future[None] | None = None
        self._refusal: frames.Raised | None = None
        """Why the child could not open its adapter; it ends then."""
        self._ended: asyncio.Future[str] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._work = Work(self.name)
        self._closed = False

    @property
    def state(self) -> str:
        """The state of the child, as in the module's diagram."""
        if self._channel is None:
            return "closed" if self._closed or self._process is None else "down"
        return "up" if self._opening is not None and self._opening.done() else "starting"

    def host_status(self) -> dict[str, Any]:
        """For status pages: pid (0: none), state, restarts, requests under way."""
        return {
            "pid": 0 if self._process is None else self._process.pid,
            "state": self.state,
            "restarts": self._restarts,
            "requests": len(self._requests),
        }

    def numbers(self) -> dict[str, int]:
        """The counters of the adapter in the child, about a second old; empty after the child has ended."""
        return self._reported.numbers or {}

    def remarks(self) -> dict[str, str]:
        """The adapter's remarks in the child, about a second old; also the reason if no more children are started."""
        return {**self._reported.remarks, **self._work.remarks()}

    def advertisement(self) -> bytes:
        """The medium's last advertisement; empty while no child is up, and for a medium that reads no peers."""
        return self._advertisement if self.state == "up" else b""

    # --- the contract ------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Start the first child and open the adapter there; from then on a child that ends is replaced.

        After ConfigError, StorageError or OSError no child is left.
        """
        if context.region_fd < 0:
            raise StorageError(f"{self.name}: an adapter host needs the pool's descriptor", field=self.name)
        self._context = context
        self._pool_fds = [os.dup(fd) for fd in (context.region_fd, context.lock_fd) if fd >= 0]
        try:
            await self._begin()
        except BaseException:
            await self.close()
            raise
        self._work.background(self._keep_up(), "host_keeper")

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        calls = self._calls("exists", keys, each=ask.each, owner=ask.owner)
        answers = [await call for call in calls]
        ask.reason = next((why for _, why in answers if why), "")
        return b"".join([found for found, _ in answers])

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        page: KeyPage | None = await self._call(
            "list_keys", cursor=cursor, most=min(most, MAX_ITEMS - MORE_KEYS)
        )
        return page

    async def put(self, items: Sequence[Item]) -> None:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        await self._move("put", items)

    async def load(self, items: Sequence[Item]) -> None:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        await self._move("load", items)

    async def delete(self, keys: bytes) -> int:
        """See the contract; keys whose deletion was not answered count as absent."""
        return sum([await call for call in self._calls("delete", keys)])

    async def clear(self) -> int:
        """See the contract. Raises StorageError also while no child is up."""
        removed: int = await self._call("clear")
        return removed

    async def usage(self) -> Usage:
        """See the contract; all zero while no child is up."""
        found: Usage = await self._call("usage")
        return found

    async def close(self) -> None:
        """Let the child finish its operations and close its adapter; kill it when it is silent for CLOSE_S.

        Returns when the child was reaped and every hold is dropped. Idempotent.
        """
        was_up, self._closed = self.state == "up", True
        await self._work.stop()
        if self._ended is not None and not self._ended.done():
            if was_up:
                self._send(frames.Close())
                await self._until_ended_or_silent(self._ended)
            self._break("")
            await asyncio.wait({self._ended})
        while self._pool_fds:
            os.close(self._pool_fds.pop())

    async def _until_ended_or_silent(self, ended: asyncio.Future[str]) -> None:
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        close_s = patience(CLOSE_S)
        while not ended.done() and (left_s := self._heard_s + close_s - loop.time()) > 0:
            await asyncio.wait({ended}, timeout=left_s)
        if not ended.done():
            log.warning("%s: its host did not end within %.0f s of Close; killing it", self.name, close_s)

    # --- requests ----------------------------------------------------------------------------------------

    async def _move(self, operation: frames.Operation, items: Sequence[Item]) -> None:
        parts = [items[at : at + MAX_ITEMS] for at in range(0, len(items), MAX_ITEMS)]
        for future in [self._call(operation, part) for part in parts]:
            await future

    def _calls(self, operation: frames.Operation, keys: bytes, **fields: Any) -> list[asyncio.Future[Any]]:
        """The results for MAX_ITEMS of these keys at a time."""
        step = MAX_ITEMS * KEY_BYTES
        parts = [keys[at : at + step] for at in range(0, len(keys), step)]
        return [self._call(operation, keys=part, **fields) for part in parts]

    def _call(
        self, operation: frames.Operation, items: Sequence[Item] = (), **fields: Any
    ) -> asyncio.Future[Any]:
        """Send a call, and return its future (`_Request`). Settles the items, and owns their holds."""
        if items and items[0].ask is not None:
            fields["owner"] = items[0].ask.owner
        rows = [
            (item.key, item.hold.offset, item.hold.length, item.ask is not None and item.ask.each)
            for item in items
        ]
        self._last_number += 1
        call = Call(self._last_number, operation, rows, log_level=log.getEffectiveLevel(), **fields)
        request = _Request(call, items, asyncio.get_running_loop().time())
        future, channel = request.future, self._channel
        assert future is not None
        if channel is None or self.state != "up" or channel.is_full or len(self._requests) >= MAX_REQUESTS:
            why = HOST_DOWN if self.state != "up" else QUEUE_FULL
            request.leave(self.name, Outcome.THROTTLED if operation == "put" else Outcome.FAILED, why)
            return future
        if not any(request.call.operation != "clear" for request in self._requests.values()):
            self._heard_s = request.begun_s
        self._requests[call.number] = request
        self._send(call)
        if self._timer is None:
            self._look_later()
        return future

    def _send(self, message: Message) -> None:
        if self._channel is not None:  # if None, the child was just found dead: `_reaped` settles the table
            self._channel.send(frames.frame_of(message))

    def _came(self, frame: bytes) -> None:
        try:
            message = frames.read_answer(frame)
            if not isinstance(message, frames.Report):
                self._heard_s = asyncio.get_running_loop().time()
            self._take(message)
        except ChannelError as error:
            self._break(f"it sent an invalid frame: {error}")

    def _take(self, message: Message) -> None:
        """Handle one message of the child. Raises ChannelError if it contradicts the state or the requests."""
        match message:
            case frames.Report() if message.advertisement is None or self.state == "up":
                assert self._context is not None
                for key in message.evicted:
                    self._context.record_evicted(key)
                if message.numbers is not None:
                    self._reported = message
                if message.advertisement is not None:
                    self._advertisement = message.advertisement
            case frames.Opened() if self.state == "starting":
                assert self._opening is not None
                self.capabilities, self._advertisement = message.capabilities, message.advertisement
                self._opening.set_result(None)
            case frames.Raised(number=0) if self.state == "starting":
                self._refusal = message
            case frames.Answer() | frames.Raised() | frames.Dropped() if message.number in self._requests:
                request = self._requests[message.number]
                request.take(message)
                if request.future is None and not request.held:
                    del self._requests[message.number]
            case _:
                raise ChannelError(f"{type(message).__name__} while it is {self.state}, or for no request")

    # --- silence -----------------------------------------------------------------------------------------

    def _look_later(self) -> None:
        due_s = self._due_s()
        self._timer = None if due_s is None else asyncio.get_running_loop().call_at(due_s, self._look)

    def _look(self) -> None:
        """Kill a child that has been silent for too long, or check again later."""
        if self._channel is not None:
            self._channel.read()  # frames that came while the loop was busy count as signs of work
        due_s, self._timer = self._due_s(), None
        if due_s is not None and due_s <= asyncio.get_running_loop().time():
            self._break(f"{len(self._requests)} operations under way, silent or slow for too long")
        else:
            self._look_later()

    def _due_s(self) -> float | None:
        """When the child is to be killed if it sends nothing; None while it has no work with a time limit."""
        working = [request for request in self._requests.values() if request.call.operation != "clear"]
        if self._channel is None or not working:
            return None
        due = [(self._heard_s, sum([request.bytes for request in working]))]
        if self.capabilities.quiesce == "never":
            due += [(request.begun_s, request.bytes) for request in working]
        return min(since_s + self.kill_s * (1 + size / self._bytes_per_kill) for since_s, size in due)

    # --- the children ------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Spawn a child and wait until its adapter is open. Raises as `open`, after telling the child to end."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = HostProcess(self.name, theirs.detach(), self._pool_fds, self._reaped)
        self._channel = Channel(ours, self._came, lambda: self._break(""))
        self._refusal = None
        self._opening, self._ended = loop.create_future(), loop.create_future()
        self._process.start()
        try:
            self._send(self._configuration())
            await self._opening
        except BaseException as error:
            self._opening.cancel()
            self._break("")
            if not isinstance(error, ChannelError):
                raise
            where = self._config.place.path
            raise ConfigError(f"{where}: its fields take {error}", field=where) from None
        log.info("%s: its host is up, process %d", self.name, self._process.pid)

    def _configuration(self) -> frames.Configure:
        context, tier = self._context, self._config
        assert context is not None
        return frames.Configure(
            medium=tier.medium,
            config=msgspec.json.encode(tier.fields),
            place=tier.place,
            name=tier.name,
            instance_id=context.instance_id,
            region_bytes=context.region_bytes,
            import_paths=[path or os.getcwd() for path in sys.path],
            log_level=log.getEffectiveLevel(),
        )

    def _break(self, why: str) -> None:
        """Kill the child and stop reading from it; idempotent. Its operations wait until it was reaped.

        `why` is logged; empty: the log line of the child's end is enough.
        """
        if self._channel is None:
            return
        if why and not self._closed:
            log.warning("%s: killing its host: %s", self.name, why)
        self._channel.close()
        self._channel = None
        assert self._process is not None
        self._process.kill()

    def _reaped(self, how: str) -> None:
        """The child was reaped, so it cannot touch the bytes any more."""
        if self._channel is not None:
            self._channel.read(frames.LAST_FRAMES)
        self._break("")
        self._reported = frames.Report()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.leave(self.name, Outcome.FAILED, HOST_DIED)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed:
            log.error(
                "%s: its host ended with %s, %d operations were under way", self.name, how, len(requests)
            )
        assert self._process is not None and self._opening is not None and self._ended is not None
        if not self._opening.done():
            self._opening.set_exception(self._why_not_open(how, self._process.last_lines()))
        self._ended.set_result(how)

    def _why_not_open(self, how: str, lines: str) -> Exception:
        refusal = self._refusal
        if refusal is not None and refusal.kind == "ConfigError":
            return ConfigError(refusal.message, field=refusal.field)
        ended = f"{self.name}: its host process ended with {how} before the adapter was open"
        text, field = (ended, self.name) if refusal is None else (refusal.message, refusal.field)
        return StorageError(f"{text}; its last lines: {lines}" if lines else text, field=field)

    async def _keep_up(self) -> None:
        """Whenever a child has ended, start another one after a growing pause."""
        loop = asyncio.get_running_loop()
        pause_s, begun_s = FIRST_PAUSE_S, loop.time()
        while True:
            assert self._ended is not None
            await asyncio.wait({self._ended})
            if loop.time() - begun_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._max_pause_s)
            self._restarts += 1
            try:
                async with asyncio.timeout(OPEN_S):  # wait_for may swallow a cancellation
                    await self._begin()
            except (StorageError, ConfigError, TimeoutError, OSError) as error:
                log.error("%s: its host could not be started again: %s", self.name, error)
            begun_s = loop.time()
