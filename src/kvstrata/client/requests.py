"""Requests under way to one server: numbering, repetition, deadlines.  Sans-IO; belongs to one thread.

A request gets its number when it is first sent and keeps it, so that the server executes a repeated one only once.
Besides an answer, these events end a request, depending on its kind:

    kind     deadline   server silent                   connection lost         server restarted (epoch)
    -------  ---------  ------------------------------  ----------------------  ------------------------
    ASK      fails      fails                           fails                   (failed before)
    SETUP    -          kept                            fails (made anew)       (failed before)
    SETTLE   -          kept                            kept, repeated later    fails

ASK requests are lookups and reserves: a caller waits for them.  A SETTLE request gives something back or makes
something visible (release, commit, abort, cancel, corrupt, quiesced).  It is repeated until answered, since the lease
or extent stays as it is for as long as the server's epoch lasts.  SETUP requests are hello and identify.

An error ends a request, except for a SETUP or SETTLE that is refused for now (refused, deadline, unavailable).  Such a
request is sent again when its next repeat is due, under a new number, because the server may remember the old number's
outcome.

Invariants
1. For each request that was added and not removed, either `replied` or `failed` is called, once.
2. At most `MAX_ASKS` ASK requests are under way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator

from kvstrata.errors import (
    BadRequest,
    DeadlineExceeded,
    KvstrataError,
    Refused,
    Unavailable,
    from_wire,
)
from kvstrata.rpc import wire

MAX_ASKS = 1024
FIRST_REPEAT_S = 0.25
LAST_REPEAT_S = 2.0
FULL_QUEUE_RETRY_S = 0.02
MAX_RENUMBERED = 3
REFUSED_FOR_NOW = (Refused, DeadlineExceeded, Unavailable)


class Kind(enum.Enum):
    """The kind of a request decides what ends it besides an answer; see the module's table."""

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
        """Nothing falls due before this time; it may be too early, never too late."""

    def __len__(self) -> int:
        return len(self._sent) + len(self._unsent)

    @property
    def n_asks(self) -> int:
        """Lookups and reserves under way."""
        return self._asks

    @property
    def awaited(self) -> bool:
        """Whether any request waits for its answer."""
        return bool(self._sent)

    def next_seq(self) -> int:
        """A fresh number; pings, which are not kept here, take theirs directly."""
        self._last_seq += 1
        return self._last_seq

    def add(self, pending: Pending) -> bool:
        """Accept a request. Returns False, and does nothing, when too many ASKs are under way."""
        if pending.kind is Kind.ASK:
            if self._asks >= MAX_ASKS:
                return False
            self._asks += 1
        self._unsent[pending] = None
        self._due_s = -math.inf
        return True

    def remove(self, pending: Pending) -> None:
        """Forget a request without calling it back, sent or not. Idempotent."""
        if pending in self._unsent:
            del self._unsent[pending]
        elif self._sent.get(pending.seq) is pending:
            del self._sent[pending.seq]
        else:
            return
        if pending.kind is Kind.ASK:
            self._asks -= 1

    def wake_unsent(self) -> None:
        """Try the unsent requests again: something that they wait for has changed."""
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
        """Frames to send now, new and repeated. Report each by `sent` or `not_sent`."""
        if now_s < self._due_s:
            return
        due = [p for p in self._all() if p.send_s <= now_s]
        # Requests that a caller waits for go first.
        for pending in sorted(due, key=lambda p: p.kind is not Kind.ASK) if len(due) > 1 else due:
            if pending not in self._unsent and self._sent.get(pending.seq) is not pending:
                continue  # the failure of an earlier request has ended this one
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
        """Note that a frame of `to_send` went out."""
        pending.send_s = now_s + pending.repeat_s
        pending.repeat_s = min(2 * pending.repeat_s, LAST_REPEAT_S)

    def not_sent(self, pending: Pending, now_s: float) -> None:
        """Note that a frame of `to_send` could not be queued; it is tried again soon."""
        pending.send_s = now_s + FULL_QUEUE_RETRY_S

    def reply(self, reply: wire.AnyReply) -> KvstrataError | None:
        """Hand a reply to its request, if it is known. Returns the error that the reply carries, if any."""
        pending = self._sent.get(reply.seq)
        if pending is None:
            return None
        if not isinstance(reply, wire.Error):
            self.remove(pending)
            pending.replied(reply)
            return None
        error = from_wire(reply.code, reply.message, field=reply.field)
        forgotten = isinstance(error, BadRequest) and error.field == "seq"
        if forgotten and pending.kind is Kind.SETTLE and pending.renumbered < MAX_RENUMBERED:
            # The server does not remember the outcome of this number.  A SETTLE that is executed twice does no harm,
            # so it is sent again under a new number.
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
        """Send all requests again now: those sent on the old connection may be lost."""
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
