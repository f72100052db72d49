"""The server's side of an adapter that runs in a child process of its own (`"isolation": "process"`).

While no child is UP, `exists` answers UNKNOWN('host_down'), `put` THROTTLED('host_down') and `load`
FAILED('host_down'), at once.  Operations under way when the child ends are FAILED or UNKNOWN with 'host_died'.

A child is spawned, asked, killed when it is silent, reaped, and replaced by another after a pause.  The pauses double
up to `max_pause_s`, until a child has been steady (Pauses).

    CLOSED ─spawned─▶ STARTING ─opened─▶ UP ─broken─▶ DOWN ─spawned─▶ STARTING ─broken─▶ DOWN
    any state ─close()─▶ CLOSED

Invariants
1. Each item's hold is in the request table (requests.py) until the adapter has finished with its bytes or the child was
   reaped: no deadline, cancelled wait or closed channel drops it.
2. The server does not trust the child: a child that sends an impossible answer is killed, and the bytes that it wrote
   into extents are verified where they are used.
3. Sending never blocks.  Frames that the child has not read wait here; beyond QUEUE_BYTES, requests are refused.
4. A child that has work and has sent nothing for `kill_ms` is killed.  Where `capabilities.quiesce` is `never`, a child
   with an operation older than `kill_ms` is killed too.  Both limits grow with the bytes under way, as deadlines do.
   A clear has no time limit.  Told and Advertised do not count as signs of work: the child's loop sends them even if
   its adapter hangs.

The process: child.py, process.py; the messages: frames.py; the requests: requests.py.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import itertools
import logging
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvstrata.errors import ConfigError, StorageError
from kvstrata.observability.logging import follow_level, unfollow_level
from kvstrata.patience import patience
from kvstrata.tiers.base import (
    MORE_KEYS,
    AdapterContext,
    Ask,
    Capabilities,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    ReadsPeers,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.host import frames
from kvstrata.tiers.host.frames import MAX_ITEMS, Answer, ChannelError, Message, Opened, Refused, Told
from kvstrata.tiers.host.process import HostProcess, Pipe
from kvstrata.tiers.host.requests import RequestTable, outcome_of
from kvstrata.tiers.reasons import BAD_ITEM, CLOSED, HOST_DIED, HOST_DOWN, QUEUE_FULL
from kvstrata.tiers.work import Work
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.core import Hold

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0
STEADY_S = 60.0
"""After a child that was up for this long, the pauses begin again with the shortest."""
WELL_S = 3.0
"""They also begin again after a child whose first and last good answer were at least this far apart."""
OPEN_S = 600.0
"""Longest wait for a restarted child to open its adapter. (The first open has no time limit here.)"""
CLOSE_S = 3.0
"""Time that the child has to end after Close before it is killed; it begins again with each answer."""


class HostState(enum.StrEnum):
    """Whether a child can be asked."""

    CLOSED = "closed"
    """No child runs, and only `open` starts one."""
    STARTING = "starting"
    """A child was spawned; its adapter is not open yet."""
    UP = "up"
    """The child's adapter is open."""
    DOWN = "down"
    """The child has ended or is being killed; another is started after a pause."""


class Pauses:
    """The next pause is twice as long as the last, until a child was steady. Sans I/O."""

    def __init__(self, longest_s: float, now_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = FIRST_PAUSE_S
        self.begun(now_s)

    def begun(self, now_s: float) -> None:
        """A child is up, or could not be started."""
        self._begun_s = now_s
        self._well_s: tuple[float, float] | None = None
        """Times of the child's first and last good answer."""

    def answered_well(self, now_s: float) -> None:
        """The child's adapter has done what a request asked for."""
        self._well_s = (now_s if self._well_s is None else self._well_s[0], now_s)

    def next_s(self, now_s: float) -> float:
        """The pause before the next child, now that this one has ended."""
        well_s = 0.0 if self._well_s is None else self._well_s[1] - self._well_s[0]
        if well_s >= WELL_S or now_s - self._begun_s >= STEADY_S:
            self._next_s = FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s


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
        self._config = config
        self._told = Told()
        """The child's counters and remarks, about a second old; empty after the child has ended."""
        self._restarts = 0
        """How often a child was started in place of one that had ended."""
        self._requests = RequestTable(kill_ms / 1000, bytes_per_kill)
        self._pauses = Pauses(max_pause_s, -STEADY_S)
        self._state = HostState.CLOSED
        self._context: AdapterContext | None = None
        self._pool_fds: list[int] = []
        self._advertisement = b""
        self._told_level = logging.NOTSET
        """The log level that the child was told."""
        self._process: HostProcess | None = None
        self._pipe: Pipe | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[str] | None = None
        self._work = Work(self.name)
        self._random = random.Random()
        self._closed = False

    def host_status(self) -> dict[str, Any]:
        """For status pages: pid (0: none), state, restarts, requests under way."""
        return {
            "pid": 0 if self._process is None else self._process.pid,
            "state": str(self._state),
            "restarts": self._restarts,
            "requests": len(self._requests),
        }

    def numbers(self) -> dict[str, int]:
        """The counters of the adapter in the child, about a second old; empty after the child has ended."""
        return self._told.numbers

    def remarks(self) -> dict[str, str]:
        """The adapter's remarks in the child, about a second old; also the reason if no more children are started."""
        return {**self._told.remarks, **self._work.remarks()}

    # --- a medium that reads peers -----------------------------------------------------------------------

    def advertisement(self) -> bytes:
        """The medium's last advertisement; empty while no child is up, and for a medium that reads no peers."""
        return self._advertisement if self._state is HostState.UP else b""

    # --- the contract ------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Start the first child and open the adapter there; from then on a child that ends is replaced.

        After ConfigError, StorageError or OSError no child is left.
        """
        if context.region_fd < 0:
            raise StorageError(f"{self.name}: an adapter host needs the pool's descriptor", field=self.name)
        self._context = context
        follow_level(self._level_changed)
        self._pool_fds = [os.dup(fd) for fd in (context.region_fd, context.lock_fd) if fd >= 0]
        try:
            await self._begin()
        except BaseException:
            await self.close()
            raise
        self._work.background(self._keep_up(), "host_keeper")

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """As the adapter in the child."""
        waits = self._ask_keys(
            functools.partial(frames.Exists, each=ask.each, owner=ask.owner), frames.Exists, keys
        )
        presences, reason = b"", ""
        for (future, why_not), part in zip(waits, frames.key_parts_of(keys), strict=True):
            unknown = ask.unknown(part, why_not or HOST_DIED), why_not or HOST_DIED
            found, why = await outcome_of(future, unknown)
            presences, reason = presences + found, reason or why
        ask.reason = reason
        return presences

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the adapter in the child; None while no child is up."""
        most = min(most, MAX_ITEMS - MORE_KEYS)
        future, _ = self._ask(frames.ListKeys, 0, [], lambda number: frames.ListKeys(number, cursor, most))
        page: KeyPage | None = await outcome_of(future, None)
        return page

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the adapter in the child. A cancelled wait lets the batch go on to its end."""
        bad = PutOutcome(PutStatus.FAILED, BAD_ITEM)

        def refused(why_not: str) -> PutOutcome:
            died = why_not in (HOST_DIED, CLOSED)
            return PutOutcome(PutStatus.FAILED if died else PutStatus.THROTTLED, why_not)

        return await self._move(frames.Put, items, bad, refused)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the adapter in the child. A cancelled wait lets the batch go on to its end."""
        bad = LoadOutcome(LoadStatus.FAILED, BAD_ITEM)
        return await self._move(
            frames.Load, items, bad, lambda why_not: LoadOutcome(LoadStatus.FAILED, why_not)
        )

    async def delete(self, keys: bytes) -> int:
        """As the adapter in the child; keys whose deletion was not answered count as absent."""
        waits = self._ask_keys(frames.Delete, frames.Delete, keys)
        counts: list[int] = [await outcome_of(future, 0) for future, _ in waits]
        return sum(counts)

    async def clear(self) -> int:
        """As the adapter in the child. Raises StorageError if the adapter does, and while no child is up."""
        future, why_not = self._ask(frames.Clear, 0, [], frames.Clear)
        removed: int | None = await outcome_of(future, None)
        if removed is None:
            raise StorageError(f"{self.name}: not cleared: {why_not or HOST_DIED}", field=self.name)
        return removed

    async def usage(self) -> Usage:
        """As the adapter in the child; all zero while no child is up."""
        future, _ = self._ask(frames.GetUsage, 0, [], frames.GetUsage)
        return await outcome_of(future, Usage(0, 0, 0))

    async def close(self) -> None:
        """Let the child finish its operations and close its adapter; kill it when it is silent for CLOSE_S.

        Returns when the child was reaped and every hold is dropped. Idempotent.
        """
        self._closed = True
        unfollow_level(self._level_changed)
        was_up = self._state is HostState.UP
        await self._work.stop()
        if self._ended is not None and not self._ended.done():
            if was_up:
                self._send(frames.Close())
                await self._until_ended_or_silent(self._ended)
            assert self._process is not None
            self._process.kill()
            await asyncio.wait({self._ended})
        self._state = HostState.CLOSED
        while self._pool_fds:
            os.close(self._pool_fds.pop())

    async def _until_ended_or_silent(self, ended: asyncio.Future[str]) -> None:
        loop = asyncio.get_running_loop()
        self._requests.heard(loop.time())
        close_s = patience(CLOSE_S)
        while not ended.done() and (left_s := self._requests.heard_s + close_s - loop.time()) > 0:
            await asyncio.wait({ended}, timeout=left_s)
        if not ended.done():
            log.warning("%s: its host did not end within %.0f s of Close; killing it", self.name, close_s)

    # --- asking ------------------------------------------------------------------------------------------

    async def _move(
        self, kind: type[frames.Put | frames.Load], items: Sequence[Any], bad: T, refused: Callable[[str], T]
    ) -> list[T]:
        """Outcomes of a Put or Load; holds of items that are not sent are dropped at once."""
        outcomes = [bad] * len(items)
        places = [i for i, item in enumerate(items) if self._is_sound(item)]
        for i in set(range(len(items))).difference(places):
            items[i].hold.drop()
        waits = []
        for part, more in _parts_of(items, places):
            rows = [(items[i].key, items[i].hold.offset, items[i].hold.length) for i in part]
            holds: list[Hold | None] = [items[i].hold for i in part]
            message = functools.partial(kind, items=rows, **more)
            future, why_not = self._ask(kind, len(rows), holds, message)
            if future is None:
                for hold in holds:
                    assert hold is not None
                    hold.drop()
            waits.append((part, future, why_not))
        del items
        for part, future, why_not in waits:
            answers = await outcome_of(future, [refused(why_not or HOST_DIED)] * len(part))
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

    def _ask_keys(
        self,
        message: Callable[..., frames.Exists | frames.Delete],
        kind: type[frames.Exists | frames.Delete],
        keys: bytes,
    ) -> list[tuple[asyncio.Future[Any] | None, str]]:
        """`_ask` for each part of the keys."""
        return [
            self._ask(kind, len(part) // KEY_BYTES, [], functools.partial(message, keys=part))
            for part in frames.key_parts_of(keys)
        ]

    def _ask(
        self,
        kind: type[Any],
        count: int,
        holds: list[Hold | None],
        message: Callable[[int], Message],
    ) -> tuple[asyncio.Future[Any] | None, str]:
        """The future of the answer, or None and why nothing was asked; in that case the caller still owns `holds`."""
        if self._closed:
            return None, CLOSED
        if self._state is not HostState.UP:
            return None, HOST_DOWN
        if self._is_full() or self._requests.is_full:
            return None, QUEUE_FULL
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        number = self._requests.add(kind, count, holds, future, loop.time())
        self._send(message(number))
        if self._timer is None:
            self._look_later(loop)
        return future, ""

    def _is_full(self) -> bool:
        """Whether the child does not read what it is sent."""
        return self._pipe is not None and self._pipe.is_full

    def _send(self, message: Message) -> None:
        if self._pipe is not None:  # else the child was just found dead: `_reaped` settles the table
            self._pipe.send(frames.frame_of(message))

    def _level_changed(self) -> None:
        """Tell the child the level of this process's log, unless it knows it."""
        if (level := log.getEffectiveLevel()) != self._told_level:
            self._told_level = level
            self._send(frames.Level(level))

    # --- being answered ----------------------------------------------------------------------------------

    def _came(self, frame: bytes) -> None:
        try:
            answer = frames.read_answer(frame)
            if not isinstance(answer, (Told, frames.Advertised)):
                self._requests.heard(asyncio.get_running_loop().time())
            self._take(answer)
        except ChannelError as error:
            self._broken(f"it sent an invalid frame: {error}")

    def _take(self, answer: Answer) -> None:
        """Handle one message of the child. Raises ChannelError if it contradicts the state or the requests."""
        match answer:
            case frames.Evicted():
                assert self._context is not None
                for key in answer.keys:
                    self._context.record_evicted(key)
            case Told():
                self._told = answer
            case frames.Advertised():
                if self._state is not HostState.UP:
                    raise ChannelError("Advertised, but its adapter is not open")
                self._advertisement = answer.advertisement
            case Opened() | Refused():
                self._take_opening(answer)
            case _:
                if self._requests.take(answer):
                    self._pauses.answered_well(asyncio.get_running_loop().time())

    def _take_opening(self, answer: Opened | Refused) -> None:
        if self._opening is None or self._opening.done():
            raise ChannelError(f"{type(answer).__name__}, but its adapter is not being opened")
        if isinstance(answer, Opened):
            assert self._state is HostState.STARTING
            self.capabilities = answer.capabilities
            self._advertisement = answer.advertisement
            self._state = HostState.UP
            self._opening.set_result(None)
        elif answer.kind == "ConfigError":
            self._opening.set_exception(ConfigError(answer.message, field=answer.field))
        else:
            text = f"{answer.message}{self._last_lines()}"
            self._opening.set_exception(StorageError(text, field=answer.field))

    def _last_lines(self) -> str:
        lines = "" if self._process is None else self._process.last_lines()
        return f"; its last lines: {lines}" if lines else ""

    # --- the children ------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Spawn a child and wait until its adapter is open. Raises as `open`, after telling the child to end."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = HostProcess(self.name, theirs.fileno(), self._pool_fds, self._reaped)
        except OSError:
            ours.close()
            theirs.close()
            raise
        theirs.detach()
        assert self._state in (HostState.CLOSED, HostState.DOWN)
        self._state = HostState.STARTING
        self._process = process
        self._pipe = Pipe(ours, self._came, lambda: self._broken(""))
        self._opening, self._ended = loop.create_future(), loop.create_future()
        process.start()
        try:
            self._told_level = log.getEffectiveLevel()
            self._send(self._configuration())
            await self._opening
        except ChannelError as error:
            self._opening.cancel()
            self._broken("")
            where = self._config.place.path
            raise ConfigError(f"{where}: its fields take {error}", field=where) from None
        except BaseException:
            self._broken("")
            raise
        log.info("%s: its host is up, process %d", self.name, process.pid)

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
            log_level=self._told_level,
        )

    def _broken(self, why: str) -> None:
        """Kill the child and read nothing more from it. Its operations wait until it was reaped.

        `why` is logged; empty: the log line of the child's end is enough.
        """
        if self._pipe is None:
            return
        if why and not self._closed:
            log.warning("%s: killing its host: %s", self.name, why)
        self._pipe.close()
        self._pipe = None
        assert self._state in (HostState.STARTING, HostState.UP)
        self._state = HostState.DOWN
        assert self._process is not None
        self._process.kill()

    def _reaped(self, how: str) -> None:
        """The child was reaped, so it cannot touch the bytes any more."""
        if self._pipe is not None:
            self._pipe.read_last()
        self._told = Told()
        under_way = self._requests.settle()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed:
            log.error("%s: its host ended with %s, %d operations were under way", self.name, how, under_way)
        if self._opening is not None and not self._opening.done():
            self._opening.set_exception(
                StorageError(
                    f"{self.name}: its host process ended with {how} before the adapter was open{self._last_lines()}",
                    field=self.name,
                )
            )
        assert self._ended is not None
        self._ended.set_result(how)

    async def _keep_up(self) -> None:
        """Whenever a child has ended, start another after a pause that grows."""
        loop = asyncio.get_running_loop()
        self._pauses.begun(loop.time())
        while not self._closed:
            assert self._ended is not None
            await asyncio.wait({self._ended})
            await asyncio.sleep(self._pauses.next_s(loop.time()) * self._random.uniform(0.5, 1.0))
            self._restarts += 1
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
        """Kill a child that has been silent for too long, or look again later."""
        loop = asyncio.get_running_loop()
        if self._pipe is not None:
            self._pipe.read()  # frames that came while the loop was busy count as signs of work
        due_s = self._due_s()
        if due_s is not None and due_s <= loop.time():
            self._timer = None
            self._broken(f"{len(self._requests)} operations under way, silent or slow for too long")
        else:
            self._look_later(loop)

    def _due_s(self) -> float | None:
        """When the child is to be killed if it sends nothing; None while it has no work with a time limit."""
        if self._pipe is None:
            return None
        return self._requests.due_s(by_age=self.capabilities.quiesce == "never")


def _parts_of(items: Sequence[Any], places: Sequence[int]) -> Iterator[tuple[Sequence[int], dict[str, Any]]]:
    """The places of each frame's items, and the fields of the Ask that they share."""

    def ask_of(place: int) -> tuple[bool, bytes] | None:
        ask: Ask | None = getattr(items[place], "ask", None)
        return None if ask is None else (ask.each, ask.owner)

    for asked, group in itertools.groupby(places, ask_of):
        for part in frames.parts_of(list(group)):
            yield part, {} if asked is None else {"each": asked[0], "owner": asked[1]}
