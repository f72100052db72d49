"""Requests under way to one server: numbering, repetition, deadlines.  Sans-IO; belongs to one thread.

A request gets its number when it is first sent and keeps it, so that a repeat does nothing twice.  Three kinds differ
in what ends them besides an answer:

    kind     deadline   server silent (breaker opens)   connection lost         server restarted (epoch)
    -------  ---------  ------------------------------  ----------------------  ------------------------
    ASK      fails      fails                           fails                   (failed before)
    SETUP    -          kept                            fails (made anew)       (failed before)
    SETTLE   -          kept                            kept, repeated later    fails

ASK are lookups and reserves: somebody waits.  SETTLE gives something back or makes something visible (release,
commit, abort, cancel, corrupt, quiesced): it is repeated until answered, since what it speaks of stays as it is for
as long as the server's epoch lasts.  SETUP is hello and identify.

An error ends a request, but SETUP and SETTLE not if it says that another time may do (refused, deadline, unavailable):
they are said again when their next repeat is due, under a new number, because the server may remember the old one's
outcome.

Invariants
1. Exactly one of `replied` and `failed` is called for each request added, once.
2. At most `MAX_ASKS` ASK requests are under way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator

from kvstrata.errors import (
    WIRE_ERRORS,
    BadRequest,
    DeadlineExceeded,
    InternalError,
    KvstrataError,
    Refused,
    Unavailable,
)
from kvstrata.rpc import wire

MAX_ASKS = 1024
FIRST_REPEAT_S = 0.25
LAST_REPEAT_S = 2.0
FULL_QUEUE_RETRY_S = 0.02
MAX_RENUMBERED = 3
REFUSED_FOR_NOW = (Refused, DeadlineExceeded, Unavailable)


class Kind(enum.Enum):
    """What ends a request besides its answer; see the module's table."""

    ASK = enum.auto()
    SETUP = enum.auto()
    SETTLE = enum.auto()


class Pending:
    """One request under way."""

    __slots__ = (
        "deadline_s",
        "failed",
        "kind",
        "message",
        "renumbered",
        "repeat_s",
        "replied",
        "send_s",
        "seq",
    )

    def __init__(
        self,
        kind: Kind,
        message: Callable[[int, int], wire.AnyRequest | None],
        replied: Callable[[wire.AnyReply], None],
        failed: Callable[[KvstrataError], None],
        deadline_s: float = math.inf,
    ) -> None:
        """`message(seq, remaining_ms)` makes the request, or None while it cannot be sent yet (`wake_unsent`).

        It may raise KvstrataError, which fails the request.
        """
        self.kind = kind
        self.message = message
        self.replied = replied
        self.failed = failed
        self.deadline_s = deadline_s
        self.seq = 0
        self.send_s = -math.inf
        self.repeat_s = FIRST_REPEAT_S
        self.renumbered = 0


class RequestTable:
    """All requests of one session."""

    def __init__(self) -> None:
        self._last_seq = 0
        self._unsent: dict[Pending, None] = {}
        self._sent: dict[int, Pending] = {}
        self._asks = 0
        self._due_s = math.inf
        """A time at or before which nothing falls due; may be too early, never too late."""

    def __len__(self) -> int:
        return len(self._sent) + len(self._unsent)

    @property
    def n_asks(self) -> int:
        """Lookups and reserves under way."""
        return self._asks

    @property
    def awaited(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._sent)

    def next_seq(self) -> int:
        """A fresh number, for messages that are not kept here (pings)."""
        self._last_seq += 1
        return self._last_seq

    def add(self, pending: Pending) -> bool:
        """Take a request up; False, and nothing happens, when too many are under way."""
        if pending.kind is Kind.ASK:
            if self._asks >= MAX_ASKS:
                return False
            self._asks += 1
        self._unsent[pending] = None
        self._due_s = -math.inf
        return True

    def remove(self, pending: Pending) -> None:
        """Forget a request without calling it back, wherever it stands. Idempotent."""
        if pending in self._unsent:
            del self._unsent[pending]
        elif self._sent.get(pending.seq) is pending:
            del self._sent[pending.seq]
        else:
            return
        if pending.kind is Kind.ASK:
            self._asks -= 1

    def wake_unsent(self) -> None:
        """Something that unsent requests wait for has changed."""
        for pending in self._unsent:
            pending.send_s = -math.inf
        self._due_s = -math.inf

    def due_s(self) -> float:
        """When `expire` or `to_send` may have something to do."""
        return self._due_s

    def expire(self, now_s: float) -> None:
        """Fail the requests whose deadline has passed."""
        if now_s < self._due_s:
            return
        for pending in [p for p in self._all() if p.deadline_s <= now_s]:
            self._fail(pending, DeadlineExceeded("no answer before the request's deadline"))

    def to_send(self, now_s: float) -> Iterator[tuple[Pending, bytes]]:
        """Frames to send now, first ones and repeats. Report each by `sent` or `not_sent`."""
        if now_s < self._due_s:
            return
        due = [p for p in self._all() if p.send_s <= now_s]
        # What somebody waits for goes first.
        for pending in sorted(due, key=lambda p: p.kind is not Kind.ASK) if len(due) > 1 else due:
            if pending not in self._unsent and self._sent.get(pending.seq) is not pending:
                continue  # ended by the failure of one before it
            fresh = pending.seq == 0
            seq = self._last_seq + 1 if fresh else pending.seq
            remaining_s = min(pending.deadline_s - now_s, wire.MAX_DEADLINE_MS / 1000)
            try:
                message = pending.message(seq, max(0, int(remaining_s * 1000)))
            except KvstrataError as error:
                self._fail(pending, error)
                continue
            if message is None:
                pending.send_s = math.inf
                continue
            if fresh:
                self._last_seq = pending.seq = seq
                del self._unsent[pending]
                self._sent[seq] = pending
            yield pending, wire.encode(message)
        self._due_s = min((min(p.send_s, p.deadline_s) for p in self._all()), default=math.inf)

    def sent(self, pending: Pending, now_s: float) -> None:
        """A frame of `to_send` went out."""
        pending.send_s = now_s + pending.repeat_s
        pending.repeat_s = min(2 * pending.repeat_s, LAST_REPEAT_S)

    def not_sent(self, pending: Pending, now_s: float) -> None:
        """It could not be queued; it is tried again soon."""
        pending.send_s = now_s + FULL_QUEUE_RETRY_S

    def reply(self, reply: wire.AnyReply) -> KvstrataError | None:
        """Hand a reply to its request; the error it carries, if any. Unknown numbers are ignored."""
        pending = self._sent.get(reply.seq)
        if pending is None:
            return None
        if not isinstance(reply, wire.Error):
            self.remove(pending)
            pending.replied(reply)
            return None
        error = WIRE_ERRORS.get(reply.code, InternalError)(reply.message, field=reply.field)
        forgotten = isinstance(error, BadRequest) and error.field == "seq"
        if forgotten and pending.kind is Kind.SETTLE and pending.renumbered < MAX_RENUMBERED:
            # The number is older than the server remembers, so it was never executed: say it again anew.
            pending.send_s = -math.inf
            pending.renumbered += 1
            self._renumber(pending)
            return None
        if pending.kind is not Kind.ASK and isinstance(error, REFUSED_FOR_NOW):
            self._renumber(pending)
            return None
        self._fail(pending, error)
        return error

    def _renumber(self, pending: Pending) -> None:
        self.remove(pending)
        pending.seq = 0
        self.add(pending)

    def repeat_now(self) -> None:
        """A new connection in the same epoch: whatever was sent may be lost."""
        for pending in self._all():
            pending.send_s = -math.inf
            pending.repeat_s = FIRST_REPEAT_S
        self._due_s = -math.inf

    def fail_all(self, error: KvstrataError, *kinds: Kind) -> None:
        """End all requests of these kinds."""
        for pending in [p for p in self._all() if p.kind in kinds]:
            self._fail(pending, error)

    def _all(self) -> list[Pending]:
        return [*self._sent.values(), *self._unsent]

    def _fail(self, pending: Pending, error: KvstrataError) -> None:
        self.remove(pending)
        pending.failed(error)
