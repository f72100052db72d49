"""Sends replies, and runs each request that takes time as a task with the request's deadline."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from kvstrata import failpoints
from kvstrata.errors import DeadlineExceeded, InternalError, KvstrataError, Refused
from kvstrata.observability.metrics import ServerCounters
from kvstrata.patience import patience
from kvstrata.policy.processes import Owner
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.session import Address, Call, Effect, Sessions
from kvstrata.rpc.wire import MAX_DEADLINE_MS, Error, Reply, encode
from kvstrata.server.requests.effects import Effects, Send

MAX_UNKEPT_TASKS = 64
"""Most tasks of unkept requests (`begin_unkept`) at a time."""
MAX_UNKEPT_OF_PROCESS = 16
"""Most such tasks of one process, so that other processes can still ask."""
MAX_KEPT_OF_PROCESS = 2_048
"""Most tasks of kept requests of one process at a time, over all its sessions."""

MAX_UNKEPT_OF_TOKEN = 32
"""Most of them of all processes with one token."""
NOBODY = Owner(0, None)
"""The owner of requests without a session."""
GRACE_S = 0.02
"""Grace after a request's deadline before it is answered with the deadline's error."""
UNREAD = "this connection leaves too many bytes of replies unread; read them, then ask again"

Key = TypeVar("Key")
KeptOutcome = tuple[Reply, Effect | None]
"""A reply, and the effect that the request left behind, if any."""


class Replies:
    """Encodes errors and sends replies, with the failpoints around them."""

    def __init__(self, epoch: int, counters: ServerCounters, send: Send) -> None:
        self._epoch = epoch
        self._counters = counters
        self._send = send

    def error(self, seq: int, error: KvstrataError) -> bytes:
        """The reply that carries an error."""
        counters = self._counters.errors
        counters[error.code] = counters.get(error.code, 0) + 1
        return encode(
            Error(seq, self._epoch, error.code, error.message[:2000], error.field[:200], error.retryable)
        )

    def our_mistake(self, seq: int, error: Exception) -> bytes:
        """The reply for an unexpected exception; the log has the trace."""
        logging.getLogger("kvstrata.rpc").error("request_failed", exc_info=error)
        name = type(error).__name__
        return self.error(
            seq, InternalError(f"the server failed on this request ({name}); its log has details")
        )

    def send_error(self, address: Address, reply: bytes) -> None:
        """Send an error in answer to a frame that names no operation."""
        self._send(address, reply)

    def send(self, op: str, addresses: Iterable[Address], reply: bytes) -> None:
        """Send the outcome of a kept request. If it is dropped, the client asks for it again."""
        failpoints.hit(op, "done")
        for address in addresses:
            self._send(address, reply)
        failpoints.hit(op, "replied")

    def send_unkept(self, op: str, address: Address, seq: int, reply: bytes) -> None:
        """Send an outcome that is not kept. If it is dropped, an error says so to the client."""
        failpoints.hit(op, "done")
        if self._send(address, reply) is True:
            self._send(address, self.error(seq, Refused(UNREAD)))
        failpoints.hit(op, "replied")

    def ended(self, op: str, started_s: float) -> None:
        """Count the time of an answered request, which arrived at `started_s` of `time.perf_counter`."""
        self._counters.request_ended(op, time.perf_counter() - started_s)


class Running:
    """The tasks of requests that take time. Belongs to the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        sessions: Sessions,
        effects: Effects,
        replies: Replies,
    ) -> None:
        self._loop = loop
        self._supervisor = supervisor
        self._sessions = sessions
        self._effects = effects
        self._replies = replies
        self._work: dict[Call, asyncio.Task[None]] = {}
        self._kept: Counter[int | bytes] = Counter()
        self._unkept: Counter[int | bytes] = Counter()
        self._unkept_of_token: Counter[frozenset[str]] = Counter()

    def begin(
        self,
        call: Call,
        work: Coroutine[Any, Any, KeptOutcome],
        deadline_s: float,
        owner: Owner,
        started_s: float,
    ) -> None:
        """Run a kept request as a task; its outcome, or the deadline's error, is sent when it ends.

        `started_s`: when it arrived, by `time.perf_counter`.
        """
        self._kept[owner.process] += 1
        task = self._supervisor.job(self._run(call, work, deadline_s, started_s), call.op)
        task.add_done_callback(lambda _: _one_less(self._kept, owner.process))
        self._work[call] = task
        # Not cancelled at once: a task that is cancelled before its first step never enters its own `try`.
        call.stop = functools.partial(self._loop.call_soon, task.cancel)

    def begin_unkept(
        self,
        op: str,
        address: Address,
        seq: int,
        work: Coroutine[Any, Any, Reply],
        owner: Owner,
        started_s: float,
    ) -> None:
        """Run a request whose outcome is not kept as a task. `started_s` as for `begin`."""
        self._unkept[owner.process] += 1
        task = self._supervisor.job(self._run_unkept(op, address, seq, work, started_s), op)
        task.add_done_callback(lambda _: _one_less(self._unkept, owner.process))
        if (token := owner.token) is not None:
            self._unkept_of_token[token] += 1
            task.add_done_callback(lambda _: _one_less(self._unkept_of_token, token))

    def check_room_for_kept(self, owner: Owner) -> None:
        """Raises Refused if one more `begin` is too many for its owner."""
        if self._kept[owner.process] >= MAX_KEPT_OF_PROCESS:
            raise Refused(
                f"this process has {self._kept[owner.process]} requests that take time running; wait for some"
            )

    def check_room_for_unkept(self, owner: Owner) -> None:
        """Raises Refused if one more `begin_unkept` is too many now."""
        if (
            self._unkept[owner.process] >= MAX_UNKEPT_OF_PROCESS
            or (owner.token is not None and self._unkept_of_token[owner.token] >= MAX_UNKEPT_OF_TOKEN)
            or self._unkept.total() >= MAX_UNKEPT_TASKS
        ):
            raise Refused("too many requests of this kind are running; try again")

    def stop(self, calls: Iterable[Call]) -> None:
        """Cancel the tasks of these requests."""
        for call in calls:
            if call.stop is not None:
                call.stop()

    async def ended(self, calls: Iterable[Call]) -> None:
        """Wait until none of these requests runs."""
        await asyncio.gather(
            *(self._work[call] for call in calls if call in self._work), return_exceptions=True
        )

    async def _run(
        self, call: Call, work: Coroutine[Any, Any, KeptOutcome], deadline_s: float, started_s: float
    ) -> None:
        overdue = self._loop.call_later(deadline_s + patience(GRACE_S), self._expire, call)
        effect: Effect | None = None
        frame = b""
        try:
            reply, effect = await work
            frame = encode(reply)
        except KvstrataError as error:
            frame = self._replies.error(call.seq, error)
        except asyncio.CancelledError:
            pass  # stopped by its owner: no client waits, and the work has undone what it did
        except Exception as error:
            frame = self._replies.our_mistake(call.seq, error)
        overdue.cancel()
        self._work.pop(call, None)
        if not frame:
            frame = self._replies.error(call.seq, InternalError("the request was stopped; try again"))
        try:
            waiters = self._effects.finish(call, frame, effect)
        except Exception as error:  # a defect of ours costs this request, and not the server
            waiters, frame = call.waiters, self._replies.our_mistake(call.seq, error)
        self._replies.send(call.op, waiters, frame)
        self._replies.ended(call.op, started_s)

    def _expire(self, call: Call) -> None:
        frame = self._replies.error(
            call.seq,
            DeadlineExceeded("no outcome before the deadline; nothing was promised", field="deadline_ms"),
        )
        self._replies.send(call.op, self._sessions.expire(call, frame), frame)
        if call.stop is not None:
            call.stop()

    async def _run_unkept(
        self, op: str, address: Address, seq: int, work: Coroutine[Any, Any, Reply], started_s: float
    ) -> None:
        try:
            async with asyncio.timeout(MAX_DEADLINE_MS / 1000):
                frame = encode(await work)
        except KvstrataError as error:
            frame = self._replies.error(seq, error)
        except TimeoutError:
            frame = self._replies.error(seq, DeadlineExceeded("no outcome in time; nothing was promised"))
        except Exception as error:
            frame = self._replies.our_mistake(seq, error)
        self._replies.send_unkept(op, address, seq, frame)
        self._replies.ended(op, started_s)


def _one_less(counts: Counter[Key], owner: Key) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
