"""The server's side of an adapter that runs in a child process of its own (`"isolation": "process"`).

states.py has the table of its states.  When a child was reaped, another is started after a pause.  The pauses double up
to `max_pause_s`, until a child has been steady (pauses.py).

While no child is UP, `exists` answers UNKNOWN('host_down'), `put` THROTTLED('host_down') and `load`
FAILED('host_down'), at once.  Operations under way when the child ends are FAILED or UNKNOWN with 'host_died'.

Invariants
1. Each item's hold is in the request table (requests.py) until the adapter has finished with its bytes or the child was
   reaped: no deadline, cancelled wait or closed channel drops it.
2. The server does not trust the child: the bytes that it wrote into extents are verified where they are used, and a
   child that sends an impossible answer is killed.
3. Sending never blocks.  Frames that the child has not read wait here; beyond QUEUE_BYTES, requests are refused.
4. A child that has work and has sent nothing for `kill_ms` is killed.  Where `capabilities.quiesce` is `never`, a child
   with an operation older than `kill_ms` is killed too.  Both limits grow with the bytes under way, as deadlines do.
   A clear has no time limit.  COUNTS and ADVERTISED do not count as signs of work: the child's loop sends them even if
   its adapter hangs.

The process: child.py, process.py, pauses.py; the messages: channel.py, pipe.py, kinds.py; the requests: requests.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvstrata.errors import ConfigError, StorageError
from kvstrata.native.batches import pack_keys
from kvstrata.policy.reasons import BAD_ITEM, CLOSED, HOST_DIED, HOST_DOWN, QUEUE_FULL
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
    MAX_ITEMS,
    MAX_KINDS,
    Answer,
    ChannelError,
    Counted,
    Kind,
    host_config,
)
from kvstrata.storage.host.kinds import KnownKinds
from kvstrata.storage.host.pauses import MAX_PAUSE_S, STEADY_S, Pauses
from kvstrata.storage.host.pipe import Pipe
from kvstrata.storage.host.process import HostProcess
from kvstrata.storage.host.requests import RequestTable, outcome_of
from kvstrata.storage.host.states import MACHINE, HostEvent, HostState
from kvstrata.storage.peers import ReadsPeers
from kvstrata.storage.recipe import Recipe
from kvstrata.storage.work import Work
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 600.0
"""Longest wait for a restarted child to open its adapter. (The first open has no time limit here.)"""
CLOSE_S = 3.0
"""Time that the child has to end after CLOSE before it is killed; it begins again with each answer."""


class HostedAdapter(StorageAdapter, ReadsPeers):
    """Runs a tier's medium and codec in a child process. `capabilities` are the medium's once it is open.

    A child is killed after `kill_ms` of silence, and as long again for every `bytes_per_kill` of payload under way.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        kill_ms: int,
        bytes_per_kill: int = 64 << 20,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self.name = recipe.name
        self.capabilities = Capabilities(persistent=False, shared=False)
        self.restarts = 0
        """How often a child was started in place of one that had ended."""
        self._recipe = recipe
        self._requests = RequestTable(kill_ms / 1000, bytes_per_kill)
        self._pauses = Pauses(max_pause_s, -STEADY_S)
        self._state = MACHINE.first
        self._context: AdapterContext | None = None
        self._pool_fds: list[int] = []
        self._counted = Counted()
        self._advertisement = b""
        self._told = KnownKinds()
        """The payload kinds that the child was told."""
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
            "restarts": self.restarts,
            "requests": len(self._requests),
        }

    def stats(self) -> dict[str, int]:
        """The counters of the codecs in the child, about a second old; empty after the child has ended."""
        return self._counted.codec

    def numbers(self) -> dict[str, int]:
        """The counters of the adapter in the child, about a second old; empty after the child has ended."""
        return self._counted.numbers

    def remarks(self) -> dict[str, str]:
        """The adapter's remarks in the child, about a second old; also the reason if no more children are started."""
        return {**self._counted.remarks, **self._work.remarks()}

    def advertisement(self) -> bytes:
        """The medium's last advertisement; empty while no child is up, and for a medium that reads no peers."""
        return self._advertisement if self._state is HostState.UP else b""

    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """Pass the preference on to the child; it is lost while no child is up, or while the child does not read."""
        if self._state is HostState.UP and not self._is_full():
            for part in host_channel.parts_of(keys):
                self._send(host_channel.prefer(pack_keys(part), source))

    # --- the contract ------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Start the child and open the adapter there. After ConfigError, StorageError or OSError no child is left."""
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

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the adapter in the child."""
        try:
            waits = self._ask_keys(Kind.EXISTS, keys)
        except ValueError:  # a key of another length
            return [Found(Presence.UNKNOWN, 0, BAD_ITEM)] * len(keys)
        found: list[Found] = []
        for (future, why_not), part in zip(waits, host_channel.parts_of(keys), strict=True):
            found += await outcome_of(future, [Found(Presence.UNKNOWN, 0, why_not or HOST_DIED)] * len(part))
        return found

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the adapter in the child; None while no child is up."""
        most = min(most, MAX_ITEMS - MORE_KEYS)
        future, _ = self._ask(Kind.LIST, 0, [], lambda number: host_channel.list_keys(number, cursor, most))
        page: KeyPage | None = await outcome_of(future, None)
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
        """As the adapter in the child; keys whose deletion was not answered count as absent."""
        waits = self._ask_keys(Kind.DELETE, [key for key in keys if len(key) == KEY_BYTES])
        counts: list[int] = [await outcome_of(future, 0) for future, _ in waits]
        return sum(counts)

    async def clear(self) -> int:
        """As the adapter in the child. Raises StorageError if the adapter does, and while no child is up."""
        future, why_not = self._ask_bare(Kind.CLEAR)
        removed: int | None = await outcome_of(future, None)
        if removed is None:
            raise StorageError(f"{self.name}: not cleared: {why_not or HOST_DIED}", field=self.name)
        return removed

    async def usage(self) -> Usage:
        """As the adapter in the child; all zero while no child is up."""
        future, _ = self._ask_bare(Kind.USAGE)
        return await outcome_of(future, Usage(0, 0, 0))

    async def close(self) -> None:
        """Let the child finish its operations and close its adapter; kill it when it is silent for CLOSE_S.

        Returns when the child was reaped and every hold is dropped. Idempotent.
        """
        self._closed = True
        was_up = self._state is HostState.UP
        await self._work.stop()
        if self._ended is not None and not self._ended.done():
            if was_up:
                self._send(host_channel.bare(Kind.CLOSE, 0))
                await self._until_ended_or_silent(self._ended)
            assert self._process is not None
            self._process.kill()
            await asyncio.wait({self._ended})
        self._step(HostEvent.CLOSE)
        while self._pool_fds:
            os.close(self._pool_fds.pop())

    async def _until_ended_or_silent(self, ended: asyncio.Future[str]) -> None:
        loop = asyncio.get_running_loop()
        self._requests.heard(loop.time())
        while not ended.done() and (left_s := self._requests.heard_s + CLOSE_S - loop.time()) > 0:
            await asyncio.wait({ended}, timeout=left_s)
        if not ended.done():
            log.warning("%s: its host did not end within %.0f s of CLOSE; killing it", self.name, CLOSE_S)

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

    def _ask_keys(self, kind: Kind, keys: Sequence[bytes]) -> list[tuple[asyncio.Future[Any] | None, str]]:
        """`_ask` for each part of the keys. Raises ValueError, and asks nothing, if a key has another length."""
        packed = [pack_keys(part) for part in host_channel.parts_of(keys)]
        asks = [functools.partial(host_channel.keyed, kind, keys=part) for part in packed]
        return [
            self._ask(kind, len(part) // KEY_BYTES, [], ask) for part, ask in zip(packed, asks, strict=True)
        ]

    def _ask_items(
        self, kind: Kind, items: Sequence[PutItem | LoadItem]
    ) -> tuple[asyncio.Future[Any] | None, str]:
        holds: list[Hold | None] = [item.hold for item in items]

        def frame(number: int) -> bytes:
            if kind is Kind.PUT and self._recipe.codec.chain.encodes:
                self._tell_kinds(items)
            return host_channel.moved(kind, number, items)

        return self._ask(kind, len(items), holds, frame)

    def _tell_kinds(self, items: Sequence[PutItem | LoadItem]) -> None:
        """Tell the child the kinds of these payloads that it does not know yet."""
        assert self._context is not None
        news = self._told.news([item.hold for item in items], self._context.payload_kind)
        for at in range(0, len(news), MAX_KINDS):
            self._send(host_channel.kinds(news[at : at + MAX_KINDS]))

    def _ask_bare(self, kind: Kind) -> tuple[asyncio.Future[Any] | None, str]:
        return self._ask(kind, 0, [], lambda number: host_channel.bare(kind, number))

    def _ask(
        self, kind: Kind, count: int, holds: list[Hold | None], frame: Callable[[int], bytes]
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
        self._send(frame(number))
        if self._timer is None:
            self._look_later(loop)
        return future, ""

    def _is_full(self) -> bool:
        return self._pipe is not None and self._pipe.is_full

    def _send(self, frame: bytes) -> None:
        if self._pipe is not None:  # else the child was just found dead: `_reaped` settles the table
            self._pipe.send(frame)

    # --- being answered ----------------------------------------------------------------------------------

    def _came(self, frame: bytes) -> None:
        try:
            answer = host_channel.read_answer(frame)
            if answer.kind not in (Kind.COUNTS, Kind.ADVERTISED):
                self._requests.heard(asyncio.get_running_loop().time())
            self._take(answer)
        except ChannelError as error:
            self._broken(f"it sent an invalid frame: {error}")

    def _take(self, answer: Answer) -> None:
        """Handle one frame of the child. Raises ChannelError if it contradicts the state or the requests."""
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
                raise ChannelError("ADVERTISED, but its adapter is not open")
            self._advertisement = answer.advertisement
            return
        if answer.kind in (Kind.OPENED, Kind.REFUSED):
            self._take_opening(answer)
            return
        if self._requests.take(answer):
            self._pauses.answered_well(asyncio.get_running_loop().time())

    def _take_opening(self, answer: Answer) -> None:
        if self._opening is None or self._opening.done():
            raise ChannelError(f"{answer.kind.name}, but its adapter is not being opened")
        if answer.capabilities is not None:
            self.capabilities, self._advertisement = answer.capabilities, answer.advertisement
            self._step(HostEvent.OPENED)
            self._opening.set_result(None)
            return
        assert answer.problem is not None
        kind = ConfigError if answer.problem.kind == "ConfigError" else StorageError
        self._opening.set_exception(kind(answer.problem.message, field=answer.problem.field))

    # --- its life ----------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Spawn a child and wait until its adapter is open. Raises as `open`, after telling the child to end."""
        loop = asyncio.get_running_loop()
        context = self._context
        assert context is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = HostProcess(self.name, theirs.fileno(), self._pool_fds, self._reaped)
        except OSError:
            ours.close()
            theirs.close()
            raise
        theirs.detach()
        self._step(HostEvent.SPAWN)
        self._process = process
        self._pipe = Pipe(ours, self._came, lambda: self._broken(""))
        self._opening, self._ended = loop.create_future(), loop.create_future()
        self._told = KnownKinds()
        process.start()
        try:
            self._send(host_channel.configure(host_config(self._recipe, context, log.getEffectiveLevel())))
            await self._opening
        except ChannelError as error:
            self._opening.cancel()
            self._broken("")
            where = self._recipe.place.path
            raise ConfigError(f"{where}: {error}", field=where) from None
        except BaseException:
            self._broken("")
            raise
        log.info("%s: its host is up, process %d", self.name, process.pid)

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
        self._step(HostEvent.BROKEN)
        assert self._process is not None
        self._process.kill()

    def _reaped(self, how: str) -> None:
        """The child was reaped, so it cannot touch the bytes any more."""
        if self._pipe is not None:
            self._pipe.read_last()
        self._counted = Counted()
        under_way = self._requests.settle()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed:
            log.error("%s: its host ended with %s, %d operations were under way", self.name, how, under_way)
        if self._opening is not None and not self._opening.done():
            self._opening.set_exception(
                StorageError(
                    f"{self.name}: its host process ended with {how} before the adapter was open; see its lines in the "
                    "log above",
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

    def _step(self, event: HostEvent) -> None:
        self._state = MACHINE.after(self._state, event)
