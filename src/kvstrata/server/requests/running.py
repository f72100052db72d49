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
from kvstrata.rpc.wire import Error, Reply, encode
from kvstrata.server.requests.effects import Effects

MAX_TASKS_OF_PROCESS = 2_048
"""Maximum number of tasks of one process at a time, over all its sessions."""
GRACE_S = 0.02
"""Grace after a request's deadline before it is answered with the deadline's error."""

Key = TypeVar("Key")
KeptOutcome = tuple[Reply, Effect | None]
"""A reply, and the effect that the request left behind, if any."""


class Replies:
    """Encodes errors and sends replies, with the failpoints around them."""

    def __init__(self, epoch: int, counters: ServerCounters) -> None:
        self._epoch = epoch
        self._counters = counters

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

    def send(self, op: str, addresses: Iterable[Address], reply: bytes) -> None:
        """Send the outcome of a request. If it is dropped, the client asks for it again."""
        failpoints.hit(op, "done")
        for address in addresses:
            address.send(reply)
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

    def begin(
        self,
        call: Call,
        work: Coroutine[Any, Any, KeptOutcome],
        deadline_s: float,
        owner: Owner,
        started_s: float,
    ) -> None:
        """Run a request as a task; its outcome, or the deadline's error, is sent when it ends.

        `started_s`: when it arrived, by `time.perf_counter`.
        """
        self._kept[owner.process] += 1
        task = self._supervisor.job(self._run(call, work, deadline_s, started_s), call.op)
        task.add_done_callback(lambda _: _one_less(self._kept, owner.process))
        self._work[call] = task
        # Not cancelled at once: a task that is cancelled before its first step never enters its own `try`.
        call.stop = functools.partial(self._loop.call_soon, task.cancel)

    def check_room(self, owner: Owner) -> None:
        """Raises Refused if one more `begin` is too many for its owner."""
        if self._kept[owner.process] >= MAX_TASKS_OF_PROCESS:
            raise Refused(
                f"this process has {self._kept[owner.process]} requests that take time running; wait for some"
            )

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


def _one_less(counts: Counter[Key], owner: Key) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
