"""The child of an adapter host: spawned, asked, killed when it is silent, reaped, and replaced by another.

states.py has the table of its states.  When a child was reaped, another is started after a pause.  The pauses double up
to `max_pause_s`, until a child has been steady (pauses.py).

Invariants
1. The server does not trust the child: a child that sends an impossible answer is killed.
2. Sending never blocks.  Frames that the child has not read wait here; beyond QUEUE_BYTES, requests are refused.
3. A child that has work and has sent nothing for `kill_ms` is killed.  Where `capabilities.quiesce` is `never`, a child
   with an operation older than `kill_ms` is killed too.  Both limits grow with the bytes under way, as deadlines do.
   A clear has no time limit.  COUNTS and ADVERTISED do not count as signs of work: the child's loop sends them even if
   its adapter hangs.

The process: child.py, process.py; the messages: channel.py, pipe.py, kinds.py; the requests: requests.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.errors import ConfigError, StorageError
from kvstrata.observability.logging import follow_level, unfollow_level
from kvstrata.patience import patience
from kvstrata.policy.reasons import CLOSED, HOST_DOWN, QUEUE_FULL
from kvstrata.storage.base import AdapterContext, Capabilities
from kvstrata.storage.host import channel as host_channel
from kvstrata.storage.host.channel import MAX_KINDS, Answer, ChannelError, Counted, Kind
from kvstrata.storage.host.config import host_config
from kvstrata.storage.host.kinds import KnownKinds
from kvstrata.storage.host.pauses import STEADY_S, Pauses
from kvstrata.storage.host.pipe import Pipe
from kvstrata.storage.host.process import HostProcess
from kvstrata.storage.host.requests import RequestTable
from kvstrata.storage.host.states import MACHINE, HostEvent, HostState
from kvstrata.storage.recipe import Recipe
from kvstrata.storage.work import Work

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

log = logging.getLogger(__name__)

OPEN_S = 600.0
"""Longest wait for a restarted child to open its adapter. (The first open has no time limit here.)"""
CLOSE_S = 3.0
"""Time that the child has to end after CLOSE before it is killed; it begins again with each answer."""


class HostLife:
    """The children of one hosted adapter, one after the other. Belongs to the event loop.

    A child is killed after `kill_ms` of silence, and as long again for every `bytes_per_kill` of payload under way.
    """

    def __init__(self, recipe: Recipe, *, kill_ms: int, bytes_per_kill: int, max_pause_s: float) -> None:
        self.name = recipe.name
        self.capabilities = Capabilities(persistent=False, shared=False)
        """The medium's, once a child has opened it."""
        self.counted = Counted()
        """The child's counters and remarks, about a second old; empty after the child has ended."""
        self._recipe = recipe
        self._restarts = 0
        """How often a child was started in place of one that had ended."""
        self._requests = RequestTable(kill_ms / 1000, bytes_per_kill)
        self._pauses = Pauses(max_pause_s, -STEADY_S)
        self._state = MACHINE.first
        self._context: AdapterContext | None = None
        self._pool_fds: list[int] = []
        self._advertisement = b""
        self._told = KnownKinds()
        """The payload kinds that the child was told."""
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

    @property
    def is_up(self) -> bool:
        """Whether a child's adapter is open."""
        return self._state is HostState.UP

    @property
    def is_full(self) -> bool:
        """Whether the child does not read what it is sent."""
        return self._pipe is not None and self._pipe.is_full

    def advertisement(self) -> bytes:
        """The medium's last advertisement; empty while no child is up, and for a medium that reads no peers."""
        return self._advertisement if self.is_up else b""

    def remarks(self) -> dict[str, str]:
        """The adapter's remarks in the child, and the reason if no more children are started."""
        return {**self.counted.remarks, **self._work.remarks()}

    def status(self) -> dict[str, Any]:
        """For status pages: pid (0: none), state, restarts, requests under way."""
        return {
            "pid": 0 if self._process is None else self._process.pid,
            "state": str(self._state),
            "restarts": self._restarts,
            "requests": len(self._requests),
        }

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

    async def close(self) -> None:
        """Let the child finish its operations and close its adapter; kill it when it is silent for CLOSE_S.

        Returns when the child was reaped and every hold is dropped. Idempotent.
        """
        self._closed = True
        unfollow_level(self._level_changed)
        was_up = self.is_up
        await self._work.stop()
        if self._ended is not None and not self._ended.done():
            if was_up:
                self.send(host_channel.bare(Kind.CLOSE, 0))
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
        close_s = patience(CLOSE_S)
        while not ended.done() and (left_s := self._requests.heard_s + close_s - loop.time()) > 0:
            await asyncio.wait({ended}, timeout=left_s)
        if not ended.done():
            log.warning("%s: its host did not end within %.0f s of CLOSE; killing it", self.name, close_s)

    # --- asking ------------------------------------------------------------------------------------------

    def ask(
        self, kind: Kind, count: int, holds: list[Hold | None], frame: Callable[[int], bytes]
    ) -> tuple[asyncio.Future[Any] | None, str]:
        """The future of the answer, or None and why nothing was asked; in that case the caller still owns `holds`."""
        if self._closed:
            return None, CLOSED
        if not self.is_up:
            return None, HOST_DOWN
        if self.is_full or self._requests.is_full:
            return None, QUEUE_FULL
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        number = self._requests.add(kind, count, holds, future, loop.time())
        self.send(frame(number))
        if self._timer is None:
            self._look_later(loop)
        return future, ""

    def send(self, frame: bytes) -> None:
        """Send a frame that has no answer."""
        if self._pipe is not None:  # else the child was just found dead: `_reaped` settles the table
            self._pipe.send(frame)

    def tell_kinds(self, holds: Sequence[Hold]) -> None:
        """Tell the child the kinds of the payloads of these records that it does not know yet."""
        assert self._context is not None
        news = self._told.news(holds, self._context.payload_kind)
        for at in range(0, len(news), MAX_KINDS):
            self.send(host_channel.kinds(news[at : at + MAX_KINDS]))

    def _level_changed(self) -> None:
        """Tell the child the level of this process's log, unless it knows it."""
        if (level := log.getEffectiveLevel()) != self._told_level:
            self._told_level = level
            self.send(host_channel.level(level))

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
            self.counted = answer.counts
            return
        if answer.kind is Kind.ADVERTISED:
            if not self.is_up:
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
        problem = answer.problem
        if problem.kind == "ConfigError":
            self._opening.set_exception(ConfigError(problem.message, field=problem.field))
            return
        self._opening.set_exception(
            StorageError(f"{problem.message}{self._last_lines()}", field=problem.field)
        )

    def _last_lines(self) -> str:
        lines = "" if self._process is None else self._process.last_lines()
        return f"; its last lines: {lines}" if lines else ""

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
            self._told_level = log.getEffectiveLevel()
            self.send(host_channel.configure(host_config(self._recipe, context, self._told_level)))
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
        self.counted = Counted()
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

    def _step(self, event: HostEvent) -> None:
        self._state = MACHINE.after(self._state, event)
