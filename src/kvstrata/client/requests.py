"""Requests under way to one server: numbering, order, deadlines.  Sans-IO; belongs to one thread.

A request gets its number when it is sent, once.  What a connection carries arrives once and in order, so nothing is
repeated; what was sent over a connection that ends has no outcome.  Besides an answer, these events end a request:

    kind   deadline   server silent   connection lost
    -----  ---------  --------------  ---------------
    ASK    fails      fails           fails
    TELL   -          kept            fails

ASK requests are lookups and reserves: a caller waits for them.  TELL requests are all others; those that are made while
no server is attached go to the next one.

Invariants
1. For each request that was added and not removed, either `replied` or `failed` is called, once.
2. At most `MAX_ASKS` ASK requests are under way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator

from kvstrata.errors import DeadlineExceeded, KvstrataError, from_wire
from kvstrata.rpc import wire

MAX_ASKS = 1024


class Kind(enum.Enum):
    """The kind of a request decides what ends it besides an answer; see the module's table."""

    ASK = enum.auto()
    TELL = enum.auto()


class Pending:
    """One request under way."""

    __slots__ = ("deadline_s", "failed", "kind", "message", "replied", "seq", "waits")

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
        """Its number; 0 until it is sent."""
        self.waits = False
        """It cannot be sent yet."""


class RequestTable:
    """All requests of one session."""

    def __init__(self) -> None:
        self._last_seq = 0
        self._unsent: dict[Pending, None] = {}
        self._sent: dict[int, Pending] = {}
        self._asks = 0
        self._due_s = math.inf
        """No deadline is before this time, and nothing can be sent before it."""

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
            pending.waits = False
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

    def to_send(self, now_s: float) -> Iterator[bytes]:
        """Frames to send now, in this order; the caller sends each one that it takes, and may leave the others."""
        if now_s < self._due_s:
            return
        ready = [p for p in self._unsent if not p.waits]
        # Requests that a caller waits for go first.
        for pending in sorted(ready, key=lambda p: p.kind is not Kind.ASK) if len(ready) > 1 else ready:
            if pending not in self._unsent:
                continue  # the failure of an earlier request has ended this one
            seq = self._last_seq + 1
            remaining_s = min(pending.deadline_s - now_s, wire.MAX_DEADLINE_MS / 1000)
            try:
                message = pending.message(seq, max(0, int(remaining_s * 1000)))
            except KvstrataError as error:
                self._fail(pending, error)
                continue
            if message is None:
                pending.waits = True
                continue
            self._last_seq = pending.seq = seq
            del self._unsent[pending]
            self._sent[seq] = pending
            yield wire.encode(message)
        if all(p.waits for p in self._unsent):
            self._due_s = min((p.deadline_s for p in self._all()), default=math.inf)

    def reply(self, reply: wire.AnyReply) -> None:
        """Hand a reply to its request, if it is known."""
        pending = self._sent.get(reply.seq)
        if pending is None:
            return
        if isinstance(reply, wire.Error):
            self._fail(pending, from_wire(reply.code, reply.message, field=reply.field))
        else:
            self.remove(pending)
            pending.replied(reply)

    def fail_all(self, error: KvstrataError, *kinds: Kind) -> None:
        """End all requests of these kinds. Those that are made meanwhile stay."""
        for pending in [p for p in self._all() if p.kind in kinds]:
            self._fail(pending, error)

    def _all(self) -> list[Pending]:
        return [*self._sent.values(), *self._unsent]

    def _fail(self, pending: Pending, error: KvstrataError) -> None:
        self.remove(pending)
        pending.failed(error)
