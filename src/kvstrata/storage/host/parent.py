"""The server's side of an adapter that runs in a child process of its own (`"isolation": "process"`).

    CLOSED ── open ──> STARTING ── OPENED ──> UP ── its end, a broken frame, silence ──> DOWN
    DOWN ── reaped, then a pause that doubles up to `max_pause_s` until a child was steady ──> STARTING
    any ── close ──> CLOSED

While it is not UP, `exists` answers UNKNOWN('host_down'), `put` THROTTLED('host_down') and `load`
FAILED('host_down'), at once.  What was under way when the child ended is FAILED or UNKNOWN with 'host_died'.

Invariants
1. Each item's hold is in the request table here from the moment it was accepted.  It leaves when the child says that
   the adapter has finished with its bytes, or when the child was reaped, and not before: no deadline, cancelled wait
   or closed channel drops it.
2. The server trusts nothing of the child but the bytes in the extents it lent, which are verified where they are used:
   an answer counts only for a request of the table, with as many outcomes as that has items.  Anything else is a
   broken child, which is killed.
3. Sending never blocks.  What the child does not read waits here, at most QUEUE_BYTES; more is refused.
4. A child with work that has said nothing at all for `kill_ms` is killed; where `capabilities.quiesce` is `never`,
   also one whose oldest operation is older than that.  Both longer for more bytes, as the deadline is.  Clearing
   takes as long as it takes.  What it counts is no word of that: its loop tells it whatever its adapter does.

child.py is the process, channel.py has the frames, process.py says how the process lives.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvstrata.errors import ConfigError, StorageError
from kvstrata.native.batches import pack_keys
from kvstrata.storage.base import (
    MORE_KEYS,
    AdapterContext,
    Capabilities,
    Found,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.host import channel as host_channel
from kvstrata.storage.host.channel import (
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_KINDS,
    Answer,
    ChannelError,
    Counted,
    HostConfig,
    Kind,
    KnownKinds,
)
from kvstrata.storage.host.process import HostProcess
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

log = logging.getLogger(__name__)

T = TypeVar("T")

HOST_DOWN = "host_down"
HOST_DIED = "host_died"
QUEUE_FULL = "queue_full"
BAD_ITEM = "bad_item"
CLOSED = "closed"
QUEUE_BYTES = 1 << 20
MAX_REQUESTS = 4_096
WHOSE = slice(320, 320 + 2 * KEY_BYTES)
"""Identity root and slice digest in a record's header."""
FRAMES_AT_A_TIME = 16
"""Frames of one child that are read before the loop sees to others."""
LAST_FRAMES = 10_000
"""More than a socket holds."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0
STEADY_S = 60.0
"""A child that was up for so long starts the pauses anew, …"""
WELL_S = 3.0
"""… and so does one whose good answers span so long."""
OPEN_S = 600.0
"""Longest wait for a restarted child to open its adapter. (The first open waits as long as one in process.)"""
CLOSE_S = 3.0
"""Time of the child to end after CLOSE, beyond which it is killed; again for each answer it gives."""

_ANSWER_TO = {
    Kind.EXISTS: Kind.FOUND,
    Kind.PUT: Kind.PUT_ENDED,
    Kind.LOAD: Kind.LOAD_ENDED,
    Kind.DELETE: Kind.COUNTED,
    Kind.CLEAR: Kind.COUNTED,
    Kind.USAGE: Kind.USED,
    Kind.LIST: Kind.LISTED,
}


class Pauses:
    """How long to wait before the next child: twice as long each time, until one was steady. Sans I/O."""

    def __init__(self, longest_s: float, now_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = FIRST_PAUSE_S
        self.begun(now_s)

    def begun(self, now_s: float) -> None:
        """A child is up, or could not be started."""
        self._begun_s = now_s
        self._well_s: tuple[float, float] | None = None
        """When it answered well first and last."""

    def answered_well(self, now_s: float) -> None:
        """The child's adapter has done what it was asked to."""
        self._well_s = (now_s if self._well_s is None else self._well_s[0], now_s)

    def next_s(self, now_s: float) -> float:
        """The child has ended: the pause before the next one."""
        well_s = 0.0 if self._well_s is None else self._well_s[1] - self._well_s[0]
        if well_s >= WELL_S or now_s - self._begun_s >= STEADY_S:
            self._next_s = FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s


class HostState(enum.StrEnum):
    """See the module."""

    CLOSED = "closed"
    STARTING = "starting"
    UP = "up"
    DOWN = "down"


class _Request:
    """A row of the request table: it goes when it is answered and all its holds are dropped."""

    __slots__ = ("begun_s", "bytes", "count", "future", "held", "holds", "kind")

    def __init__(
        self, kind: Kind, count: int, holds: list[Hold | None], future: asyncio.Future[Any], begun_s: float
    ) -> None:
        self.kind = kind
        self.count = count
        self.holds = holds
        self.held = len(holds)
        self.bytes = sum(hold.length for hold in holds if hold is not None)
        self.future: asyncio.Future[Any] | None = future
        """None once it was answered. Its result is None when the child died first."""
        self.begun_s = begun_s

    def drop(self, index: int) -> None:
        hold, self.holds[index] = self.holds[index], None
        if hold is not None:
            self.held -= 1
            hold.drop()


class HostedAdapter(StorageAdapter):
    """Runs the adapter of one entry of `l2_adapters` in a child process. `capabilities` are its own once it is open.

    `kill_ms` for `bytes_per_kill` of payload under way, and again for each further such amount.
    """

    def __init__(
        self,
        entry: Mapping[str, Any],
        index: int,
        *,
        name: str,
        kill_ms: int,
        bytes_per_kill: int = 64 << 20,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self.name = name
        self.capabilities = Capabilities(persistent=False, shared=False)
        self.restarts = 0
        """Times that a child was started in place of one that had ended."""
        self._entry = dict(entry)
        self._index = index
        self._kill_s = kill_ms / 1000
        self._bytes_per_kill = bytes_per_kill
        self._pauses = Pauses(max_pause_s, -STEADY_S)
        self._state = HostState.CLOSED
        self._table: dict[int, _Request] = {}
        self._last_number = 0
        self._context: AdapterContext | None = None
        self._pool_fds: list[int] = []
        self._counted = Counted()
        self._advertisement = b""
        self._told = KnownKinds()
        """What this child knows of payloads."""
        self._process: HostProcess | None = None
        self._socket: socket.socket | None = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._writes_later = False
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[str] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._random = random.Random()
        self._closed = False

    def host_status(self) -> dict[str, Any]:
        """For status pages: pid (0: none), state, restarts, requests under way."""
        return {
            "pid": 0 if self._process is None else self._process.pid,
            "state": str(self._state),
            "restarts": self.restarts,
            "requests": len(self._table),
        }

    def stats(self) -> dict[str, int]:
        """What the codecs in the child had counted a moment ago; nothing while there is no child."""
        return self._counted.codec

    def numbers(self) -> dict[str, int]:
        """As the adapter in the child, a moment ago; nothing while there is no child."""
        return self._counted.numbers

    def remarks(self) -> dict[str, str]:
        """As the adapter in the child, a moment ago; nothing while there is no child."""
        return self._counted.remarks

    def advertisement(self) -> bytes:
        """As the adapter in the child that is up, a moment ago; empty while there is none."""
        return self._advertisement if self._state is HostState.UP else b""

    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """As the adapter in the child that is up."""
        if self._state is HostState.UP and self._queued_bytes <= QUEUE_BYTES:
            for part in host_channel.parts_of(keys):
                self._send(host_channel.prefer(pack_keys(part), source))

    # --- the contract ------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Start the child and open the adapter there. Raises what the adapter raised, or StorageError."""
        if context.region_fd < 0:
            raise StorageError(f"{self.name}: an adapter host needs the pool's descriptor", field=self.name)
        self._context = context
        self._pool_fds = [os.dup(fd) for fd in (context.region_fd, context.lock_fd) if fd >= 0]
        try:
            await self._begin()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep_up(), name=f"{self.name}-host")

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the adapter in the child."""
        try:
            waits = self._ask_keys(Kind.EXISTS, keys)
        except ValueError:  # a key of another length
            return [Found(Presence.UNKNOWN, 0, BAD_ITEM)] * len(keys)
        found: list[Found] = []
        for (future, why_not), part in zip(waits, host_channel.parts_of(keys), strict=True):
            found += await _outcome(future, [Found(Presence.UNKNOWN, 0, why_not or HOST_DIED)] * len(part))
        return found

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the adapter in the child; None while there is none."""
        most = min(most, MAX_ITEMS - MORE_KEYS)
        future, _ = self._ask(Kind.LIST, 0, [], lambda number: host_channel.list_keys(number, cursor, most))
        page: KeyPage | None = await _outcome(future, None)
        return page

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the adapter in the child. A cancelled wait lets the batch go on to its end."""
        bad = PutOutcome(PutStatus.FAILED, BAD_ITEM)

        def refused(why_not: str) -> PutOutcome:
            died = why_not in (HOST_DIED, CLOSED)
            return PutOutcome(PutStatus.FAILED if died else PutStatus.THROTTLED, why_not)

        return await self._move(Kind.PUT, items, bad, refused)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the adapter in the child. A cancelled wait lets the batch go on to its end."""
        bad = LoadOutcome(LoadStatus.FAILED, BAD_ITEM)
        return await self._move(
            Kind.LOAD, items, bad, lambda why_not: LoadOutcome(LoadStatus.FAILED, why_not)
        )

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the adapter in the child; what it could not be asked counts as not there."""
        waits = self._ask_keys(Kind.DELETE, [key for key in keys if len(key) == KEY_BYTES])
        counts: list[int] = [await _outcome(future, 0) for future, _ in waits]
        return sum(counts)

    async def clear(self) -> int:
        """As the adapter in the child, which may raise StorageError; so does a child that is not there."""
        future, why_not = self._ask_bare(Kind.CLEAR)
        removed: int | None = await _outcome(future, None)
        if removed is None:
            raise StorageError(f"{self.name}: not cleared: {why_not or HOST_DIED}", field=self.name)
        return removed

    async def usage(self) -> Usage:
        """As the adapter in the child; all zero while there is none."""
        future, _ = self._ask_bare(Kind.USAGE)
        return await _outcome(future, Usage(0, 0, 0))

    async def close(self) -> None:
        """Let the child finish what is in flight and close its adapter, or kill it when it is silent for CLOSE_S.

        Returns when it was reaped and every hold is dropped. Idempotent.
        """
        self._closed = True
        was_up = self._state is HostState.UP
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None
        if self._ended is not None and not self._ended.done():
            if was_up:
                self._send(host_channel.bare(Kind.CLOSE, 0))
                await self._until_ended_or_silent(self._ended)
            assert self._process is not None
            self._process.kill()
            await asyncio.wait({self._ended})
        self._state = HostState.CLOSED
        while self._pool_fds:
            os.close(self._pool_fds.pop())

    async def _until_ended_or_silent(self, ended: asyncio.Future[str]) -> None:
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        while not ended.done() and (left_s := self._heard_s + CLOSE_S - loop.time()) > 0:
            await asyncio.wait({ended}, timeout=left_s)
        if not ended.done():
            log.warning(
                "%s: its host did not end within %.0f s of being told, it is killed", self.name, CLOSE_S
            )

    # --- asking ------------------------------------------------------------------------------------------

    async def _move(
        self,
        kind: Kind,
        items: Sequence[Any],
        bad: T,
        refused: Callable[[str], T],
    ) -> list[T]:
        """Outcomes of a PUT or LOAD; holds of items that are not sent are dropped at once."""
        outcomes = [bad] * len(items)
        places = [i for i, item in enumerate(items) if self._is_sound(item)]
        for i in set(range(len(items))).difference(places):
            items[i].hold.drop()
        waits = []
        for part in host_channel.parts_of(places):
            batch = [items[i] for i in part]
            future, why_not = self._ask_items(kind, batch)
            if future is None:
                for item in batch:
                    item.hold.drop()
            waits.append((part, future, why_not))
        del items
        for part, future, why_not in waits:
            answers = await _outcome(future, [refused(why_not or HOST_DIED)] * len(part))
            for i, outcome in zip(part, answers, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _is_sound(self, item: PutItem | LoadItem) -> bool:
        """Whether the child can reach the item's bytes by their offset."""
        hold, context = item.hold, self._context
        return (
            len(item.key) == KEY_BYTES
            and context is not None
            and 0 <= hold.offset <= context.region_bytes - hold.length
            and hold.address == context.region_address + hold.offset
        )

    def _ask_keys(self, kind: Kind, keys: Sequence[bytes]) -> list[tuple[asyncio.Future[Any] | None, str]]:
        """One of each part. Raises ValueError, and asks nothing, where a key has another length."""
        packed = [pack_keys(part) for part in host_channel.parts_of(keys)]
        return [
            self._ask(
                kind, len(part) // KEY_BYTES, [], functools.partial(host_channel.keyed, kind, keys=part)
            )
            for part in packed
        ]

    def _ask_items(
        self, kind: Kind, items: Sequence[PutItem | LoadItem]
    ) -> tuple[asyncio.Future[Any] | None, str]:
        holds: list[Hold | None] = [item.hold for item in items]

        def frame(number: int) -> bytes:
            if kind is Kind.PUT and self._entry.get("codec"):
                self._tell_kinds(items)
            return host_channel.moved(kind, number, items)

        return self._ask(kind, len(items), holds, frame)

    def _tell_kinds(self, items: Sequence[PutItem | LoadItem]) -> None:
        """Tell the child what these payloads are made of, as far as it does not know that."""
        assert self._context is not None
        news = []
        for whose in dict.fromkeys(bytes(item.hold.view()[WHOSE]) for item in items):
            identity, slice_digest = whose[:KEY_BYTES], whose[KEY_BYTES:]
            kind = self._context.payload_kind(identity, slice_digest)
            if kind != self._told.of(identity, slice_digest):
                news.append((whose, kind))
        for at in range(0, len(news), MAX_KINDS):
            self._send(host_channel.kinds(news[at : at + MAX_KINDS]))
        self._told.learn(news)

    def _ask_bare(self, kind: Kind) -> tuple[asyncio.Future[Any] | None, str]:
        return self._ask(kind, 0, [], lambda number: host_channel.bare(kind, number))

    def _ask(
        self, kind: Kind, count: int, holds: list[Hold | None], frame: Callable[[int], bytes]
    ) -> tuple[asyncio.Future[Any] | None, str]:
        """The future of the answer; or None and why it was not asked, then `holds` are still the caller's."""
        if self._closed:
            return None, CLOSED
        if self._state is not HostState.UP:
            return None, HOST_DOWN
        if self._queued_bytes > QUEUE_BYTES or len(self._table) >= MAX_REQUESTS:
            return None, QUEUE_FULL
        loop = asyncio.get_running_loop()
        self._last_number += 1
        now_s = loop.time()
        if not self._is_working():
            self._heard_s = now_s
        request = _Request(kind, count, holds, loop.create_future(), now_s)
        future = request.future
        self._table[self._last_number] = request
        self._send(frame(self._last_number))
        if self._timer is None:
            self._look_later(loop)
        return future, ""

    def _send(self, frame: bytes) -> None:
        if self._socket is None:
            return  # it was just found dead: the table is settled when it is reaped
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if len(self._queue) == 1:
            self._write()

    def _write(self) -> None:
        """Send what waits; the loop calls again when there is room."""
        assert self._socket is not None
        try:
            while self._queue:
                self._socket.send(self._queue[0])
                self._queued_bytes -= len(self._queue.popleft())
        except BlockingIOError:
            self._writes_later = True
            asyncio.get_running_loop().add_writer(self._socket, self._write)
            return
        except OSError:
            self._read_last()
            return
        if self._writes_later:
            self._writes_later = False
            asyncio.get_running_loop().remove_writer(self._socket)

    # --- being answered ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take some frames; the loop calls again while there are more."""
        for _ in range(FRAMES_AT_A_TIME):
            if not self._read_one():
                return

    def _read_one(self) -> bool:
        if self._socket is None:
            return False
        try:
            frame = self._socket.recv(MAX_FRAME_BYTES + 1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # told once by a child that ended with requests unread; what it had said can be read next
        except OSError:
            frame = b""
        if not frame:
            self._broken("")
            return False
        try:
            answer = host_channel.read_answer(frame)
            if answer.kind not in (Kind.COUNTS, Kind.ADVERTISED):
                self._heard_s = asyncio.get_running_loop().time()
            self._take(answer)
        except ChannelError as error:
            self._broken(f"it sent what makes no sense: {error}")
            return False
        return True

    def _read_last(self) -> None:
        """The child has closed the channel: what it said before counts."""
        for _ in range(LAST_FRAMES):
            if not self._read_one():
                break
        self._broken("")

    def _take(self, answer: Answer) -> None:
        """One frame of the child. Raises ChannelError where it cannot be true."""
        if answer.kind is Kind.EVICTED:
            assert self._context is not None
            for key in answer.keys:
                self._context.record_evicted(key)
            return
        if answer.kind is Kind.COUNTS:
            assert answer.counts is not None
            self._counted = answer.counts
            return
        if answer.kind is Kind.ADVERTISED:
            if self._state is not HostState.UP:
                raise ChannelError("ADVERTISED by an adapter that is not open")
            self._advertisement = answer.advertisement
            return
        if answer.kind in (Kind.OPENED, Kind.REFUSED):
            self._take_opening(answer)
            return
        request = self._table.get(answer.number)
        if request is None:
            raise ChannelError(f"{answer.kind.name} for request {answer.number}, which is not under way")
        if answer.kind is Kind.DROPPED:
            self._drop(request, answer.dropped)
        else:
            self._answer(request, answer)
        if request.future is None and not request.held:
            del self._table[answer.number]

    def _take_opening(self, answer: Answer) -> None:
        if self._opening is None or self._opening.done():
            raise ChannelError(f"{answer.kind.name} of an adapter that is not being opened")
        if answer.capabilities is not None:
            self.capabilities, self._advertisement = answer.capabilities, answer.advertisement
            self._state = HostState.UP
            self._opening.set_result(None)
            return
        assert answer.problem is not None
        kind = ConfigError if answer.problem.kind == "ConfigError" else StorageError
        self._opening.set_exception(kind(answer.problem.message, field=answer.problem.field))

    def _answer(self, request: _Request, answer: Answer) -> None:
        future = request.future
        if future is None:
            raise ChannelError(f"{answer.kind.name}: request {answer.number} was answered before")
        if answer.kind is Kind.RAISED:
            assert answer.problem is not None
            request.future = None
            if not future.done():
                kind = StorageError if answer.problem.kind == "StorageError" else HostedError
                future.set_exception(kind(answer.problem.message))
            return
        if answer.kind is not _ANSWER_TO[request.kind]:
            raise ChannelError(f"{answer.kind.name} as the answer to {request.kind.name}")
        if len(answer.outcomes) != (request.count if request.kind in _WITH_OUTCOMES else 0):
            raise ChannelError(f"{len(answer.outcomes)} outcomes for {request.count} items")
        self._drop(request, answer.dropped)
        request.future = None
        if any(outcome[0] in _WELL[request.kind] for outcome in answer.outcomes):
            self._pauses.answered_well(asyncio.get_running_loop().time())
        if not future.done():
            future.set_result(_result_of(request.kind, answer))

    def _drop(self, request: _Request, indices: list[int]) -> None:
        for index in indices:
            if index >= len(request.holds) or request.holds[index] is None:
                raise ChannelError(f"item {index} of {len(request.holds)} is dropped, which is not held")
            request.drop(index)

    # --- its life ----------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Spawn a child and wait until its adapter is open. Raises as `open`; then the child is on its way out."""
        loop = asyncio.get_running_loop()
        context = self._context
        assert context is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            process = HostProcess(self.name, theirs.fileno(), self._pool_fds, self._reaped)
        except OSError:
            ours.close()
            theirs.close()
            raise
        theirs.detach()
        self._process, self._socket, self._state = process, ours, HostState.STARTING
        self._opening, self._ended = loop.create_future(), loop.create_future()
        self._told = KnownKinds()
        self._queue.clear()
        self._queued_bytes, self._writes_later = 0, False
        loop.add_reader(ours, self._read)
        process.start()
        config = HostConfig(
            entry=self._entry,
            index=self._index,
            name=self.name,
            instance_id=context.instance_id,
            region_bytes=context.region_bytes,
            import_paths=[path or os.getcwd() for path in sys.path],
            log_level=logging.getLevelName(log.getEffectiveLevel()),
        )
        try:
            self._send(host_channel.configure(config))
            await self._opening
        except ChannelError as error:
            self._broken("")
            where = f"l2_adapters[{self._index}]"
            raise ConfigError(f"{where}: {error}", field=where) from None
        except BaseException:
            self._broken("")
            raise
        log.info("%s: its host is up, process %d", self.name, process.pid)

    def _broken(self, why: str) -> None:
        """The child is of no more use: kill it, hear it no more. What it had under way waits for its end.

        `why` is logged, unless it is empty because its end says it all.
        """
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        if why and not self._closed:
            log.warning("%s: its host is given up: %s", self.name, why)
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._socket.close()
        self._socket = None
        self._state = HostState.DOWN
        assert self._process is not None
        self._process.kill()

    def _reaped(self, how: str) -> None:
        """The child is gone, with everything that could touch the bytes."""
        self._read_last()
        self._counted = Counted()
        table, self._table = self._table, {}
        for request in table.values():
            for index in range(len(request.holds)):
                request.drop(index)
            if request.future is not None and not request.future.done():
                request.future.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed:
            log.error("%s: its host ended with %s, %d operations were under way", self.name, how, len(table))
        if self._opening is not None and not self._opening.done():
            self._opening.set_exception(
                StorageError(
                    f"{self.name}: its host process ended with {how} before the adapter was open; what it said is "
                    "in the log above",
                    field=self.name,
                )
            )
        assert self._ended is not None
        self._ended.set_result(how)

    async def _keep_up(self) -> None:
        """Start another child whenever one has ended, later and later."""
        loop = asyncio.get_running_loop()
        self._pauses.begun(loop.time())
        while not self._closed:
            assert self._ended is not None
            await asyncio.wait({self._ended})
            await asyncio.sleep(self._pauses.next_s(loop.time()) * self._random.uniform(0.5, 1.0))
            self.restarts += 1
            try:
                async with asyncio.timeout(OPEN_S):  # wait_for may swallow a cancellation
                    await self._begin()
            except (StorageError, ConfigError, TimeoutError, OSError) as error:
                log.error("%s: its host could not be started again: %s", self.name, error)
            self._pauses.begun(loop.time())

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = self._due_s()
        self._timer = None if due_s is None else loop.call_at(due_s, self._look)

    def _look(self) -> None:
        """Kill a child that is silent for too long, or look again later."""
        loop = asyncio.get_running_loop()
        self._read()  # what came while the loop was busy counts
        due_s = self._due_s()
        if self._socket is not None and due_s is not None and due_s <= loop.time():
            self._timer = None
            self._broken(f"{len(self._table)} operations under way and no word from it for too long")
        else:
            self._look_later(loop)

    def _is_working(self) -> bool:
        return any(request.kind is not Kind.CLEAR for request in self._table.values())

    def _due_s(self) -> float | None:
        """When the child is to be killed if nothing happens; None while it may take its time."""
        due: list[float] = []
        if self._is_working() and self._socket is not None:
            working = [request for request in self._table.values() if request.kind is not Kind.CLEAR]
            due.append(self._heard_s + self._patience_s(sum(request.bytes for request in working)))
            if self.capabilities.quiesce == "never":
                due += [request.begun_s + self._patience_s(request.bytes) for request in working]
        return min(due, default=None)

    def _patience_s(self, payload_bytes: int) -> float:
        return self._kill_s * (1 + payload_bytes / self._bytes_per_kill)


class HostedError(Exception):
    """The adapter in the child raised, which its contract forbids; the child's log has the traceback."""


_WITH_OUTCOMES = (Kind.EXISTS, Kind.PUT, Kind.LOAD)
_WELL: dict[Kind, tuple[int, ...]] = {
    Kind.EXISTS: (Presence.ABSENT, Presence.PRESENT),
    Kind.PUT: (PutStatus.STORED, PutStatus.EXISTS),
    Kind.LOAD: (LoadStatus.LOADED, LoadStatus.ABSENT),
}
"""Outcomes of an adapter that did what it was asked to."""


def _result_of(kind: Kind, answer: Answer) -> Any:
    if kind in _WITH_OUTCOMES:
        return answer.outcomes
    return answer.page if kind is Kind.LIST else answer.usage or answer.count


async def _outcome(future: asyncio.Future[T | None] | None, otherwise: T) -> T:
    """What the future brings; `otherwise` when there is none, or when the child died before it answered."""
    result = None if future is None else await future
    return otherwise if result is None else result
