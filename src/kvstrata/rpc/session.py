"""The outcomes of requests, remembered per session: the sans-IO core of the RPC protocol.

Messages get lost, arrive late and arrive twice.  A session (an attached process) numbers its requests; for each message
this module decides whether it is executed now, joins the same request that is still running, is answered from memory,
or is refused.  It holds no socket, reads no clock and touches no pool: the caller executes, sends and undoes what the
methods return.

The states of one (session, seq) are those of `MACHINE`.  If a ping does not name a lookup, a running lookup is
cancelled, and the lease of a finished one is undone, unless the session has released its own share.

Invariants:

1. A (session, seq) gives RUN at most once in the life of its session.
2. Every effect (lease, reservation) is in `effects` of its session from `finish` until it is returned for
   undoing or settled, or its session is closed; nothing else holds an effect.
3. At most `max_outcomes` outcomes and about `max_reply_bytes` of replies are kept per session.  Of the seqs up to the
   highest forgotten one, those whose outcome is not kept are refused, never executed.
4. A request that is still running is never forgotten.
5. A session's numbers rise by at most MAX_SEQ_STEP at a time, and so does the highest forgotten one.

This module does not know the processes, groups or tenants of sessions (policy/processes.py), nor what an effect is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from kvstrata.errors import BadRequest, Cancelled, KvstrataError, Refused, UnknownSession
from kvstrata.states import Machine


class Address(Hashable, Protocol):
    """Destination of a reply: the connection over which a request came."""

    def send(self, message: bytes) -> None:
        """Send a reply. After the connection's end, nothing happens."""


MAX_WAITERS = 4
"""Connections that may wait for the reply to one running request; only the newest are answered."""

MAX_SEQ_STEP = 1 << 24
"""Largest step by which a number may exceed all earlier ones of its session; the first may be any number.  So no single
request can use up the session's numbers."""


class State(enum.Enum):
    """What this module knows of one request."""

    ABSENT = enum.auto()
    """The request has not arrived; nothing is kept of it."""
    RUNNING = enum.auto()
    """Its work is under way; a repeated request waits for the same reply."""
    CANCELLING = enum.auto()
    """Its work is still under way and is undone when it ends; a repeated request gets the error."""
    DONE = enum.auto()
    """Its reply is kept; its effect, if it has one, is in `effects`."""
    CANCELLED = enum.auto()
    """It has no effect; the error is kept."""
    FORGOTTEN = enum.auto()
    """Its outcome is no longer kept; a repeated request is refused as too old."""


class Happening(enum.Enum):
    """What happens to one request."""

    REQUEST = enum.auto()
    """It arrives, for the first time or again."""
    FINISH = enum.auto()
    """Its work has ended."""
    STOP = enum.auto()
    """While it runs: its owner cancels it, a ping does not name it, its deadline passes, or its process ends."""
    UNDO = enum.auto()
    """Its effect is taken back because its owner cancels it or a ping does not name it."""
    FORESTALL = enum.auto()
    """Its owner cancels it before it arrives."""
    FORGET = enum.auto()
    """Its outcome is dropped to make room for newer ones."""


MACHINE = Machine(
    "Request of a session",
    State,
    Happening,
    State.ABSENT,
    {
        State.ABSENT: {Happening.REQUEST: State.RUNNING, Happening.FORESTALL: State.CANCELLED},
        State.RUNNING: {
            Happening.REQUEST: State.RUNNING,
            Happening.FINISH: State.DONE,
            Happening.STOP: State.CANCELLING,
        },
        State.CANCELLING: {Happening.REQUEST: State.CANCELLING, Happening.FINISH: State.CANCELLED},
        State.DONE: {
            Happening.REQUEST: State.DONE,
            Happening.UNDO: State.CANCELLED,
            Happening.FORGET: State.FORGOTTEN,
        },
        State.CANCELLED: {Happening.REQUEST: State.CANCELLED, Happening.FORGET: State.FORGOTTEN},
    },
)
_AFTER = MACHINE.after
# The states after the moves that every request makes, looked up once.
_BEGUN = _AFTER(MACHINE.first, Happening.REQUEST)
_ENDED = _AFTER(_BEGUN, Happening.FINISH)
_STOPPED = _AFTER(_BEGUN, Happening.STOP)
_UNDONE_AT_ITS_END = _AFTER(_STOPPED, Happening.FINISH)


class Effect:
    """The lease or reservation of a finished request, until it is released, committed, aborted or undone.

    `wanted_by_ping`: the effect is undone unless its owner names it in each ping (a lease whose own share is still
    held).
    """

    __slots__ = ("wanted_by_ping",)

    def __init__(self, *, wanted_by_ping: bool) -> None:
        self.wanted_by_ping = wanted_by_ping


class Call:
    """One request of one session, with its outcome. `Sessions.request` makes it, `Sessions.finish` ends it."""

    __slots__ = ("op", "reply", "seq", "session", "state", "stop", "waiters", "wanted_by_ping")

    def __init__(self, session: Session, seq: int, op: str, wanted_by_ping: bool) -> None:
        self.session = session
        self.seq = seq
        self.op = op
        self.state = _BEGUN
        self.reply = b""
        self.waiters: list[Address] = []
        self.wanted_by_ping = wanted_by_ping
        self.stop: Callable[[], object] | None = None
        """Asks the work to end early; the caller sets it for a request that takes time."""


class Session:
    """The outcomes of one attached process."""

    __slots__ = ("calls", "effects", "floor", "name", "open", "reply_bytes", "running", "top")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.open = True
        self.calls: dict[int, Call] = {}
        self.running: dict[int, Call] = {}
        self.effects: dict[int, Effect] = {}
        self.floor = 0
        """Highest seq whose outcome is forgotten."""
        self.top = 0
        """Highest seq of all requests and pings."""
        self.reply_bytes = 0


class Verdict(enum.Enum):
    """What the caller does with a request."""

    RUN = enum.auto()
    JOINED = enum.auto()
    REPLAY = enum.auto()


class Receipt(NamedTuple):
    """The decision on a request. `call` holds the request to run, or the one that runs or has run already."""

    verdict: Verdict
    call: Call


class Undoing(NamedTuple):
    """The work that a cancel or a ping gives the caller: effects to undo, calls to stop, replies to send."""

    effects: list[Effect]
    stopped: list[Call]
    replies: list[tuple[Address, bytes]]


_NOTHING = Undoing([], [], [])
"""The outcome of most pings, made once; nobody changes it."""


class Limits(NamedTuple):
    """Bounds per session."""

    max_outcomes: int = 1024
    max_reply_bytes: int = 2 << 20
    kept_anyway: int = 8
    """This many of the newest outcomes are kept, however many bytes they have."""
    max_running: int = 1024
    max_effects: int = 8192


class Sessions:
    """All sessions of one instance. Single-threaded.

    `encode_error(seq, error)` makes the reply that carries an error.
    """

    def __init__(
        self, encode_error: Callable[[int, KvstrataError], bytes], limits: Limits | None = None
    ) -> None:
        self._encode_error = encode_error
        self._limits = limits or Limits()
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, name: bytes) -> Session:
        """Open the session of an attached process; a process that attaches again gets the same session."""
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = Session(name)
        return session

    def get(self, name: bytes) -> Session | None:
        """The open session of that name."""
        return self._sessions.get(name)

    def close(self, name: bytes) -> Undoing:
        """The process has ended: drop its waiters, and return its running calls, to be stopped, and its effects.

        The caller decides which of the effects died with the process.
        """
        session = self._sessions.pop(name, None)
        if session is None:
            return Undoing([], [], [])
        session.open = False
        stopped = [call for call in session.running.values() if call.state is State.RUNNING]
        for call in stopped:
            call.state = _STOPPED
            call.waiters.clear()
        effects = list(session.effects.values())
        session.effects.clear()
        session.calls.clear()
        return Undoing(effects, stopped, [])

    def request(
        self,
        name: bytes,
        seq: int,
        op: str,
        address: Address,
        *,
        wanted_by_ping: bool = False,
        takes: bool = True,
    ) -> Receipt:
        """A request arrived. Raises UnknownSession, BadRequest (seq) or Refused; then nothing has changed.

        `takes`: the request may end with an effect, so it is refused if the session has too many.
        """
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        call = session.calls.get(seq)
        if call is not None:
            if call.op != op and call.op != "":
                raise BadRequest(
                    f"seq: {seq} was used before for {call.op}; number requests upwards", field="seq"
                )
            if call.state is State.RUNNING:
                if address not in call.waiters:
                    call.waiters.append(address)
                    del call.waiters[:-MAX_WAITERS]
                return Receipt(Verdict.JOINED, call)
            return Receipt(Verdict.REPLAY, call)
        self._check_new(session, seq)
        if len(session.running) >= self._limits.max_running:
            raise Refused(
                f"seq: {len(session.running)} requests of this session are running; wait for some",
                field="seq",
            )
        if takes and len(session.effects) >= self._limits.max_effects:
            raise Refused(
                f"seq: this session holds {len(session.effects)} leases and reservations; end some",
                field="seq",
            )
        session.top = max(session.top, seq)
        call = Call(session, seq, op, wanted_by_ping)
        call.waiters.append(address)
        session.calls[seq] = call
        session.running[seq] = call
        return Receipt(Verdict.RUN, call)

    def finish(
        self, call: Call, reply: bytes, effect: Effect | None = None
    ) -> tuple[list[Address], Effect | None]:
        """The work of `call` has ended. Returns the addresses that get `reply`, and the effect to undo if cancelled."""
        session = call.session
        if call.state is State.CANCELLING:
            session.running.pop(call.seq, None)
            call.state = _UNDONE_AT_ITS_END
            self._forget(session)
            return [], effect
        assert call.state is State.RUNNING, call.state
        del session.running[call.seq]
        call.state = _ENDED
        call.reply = reply
        call.stop = None
        session.reply_bytes += len(reply)
        if effect is not None:
            session.effects[call.seq] = effect
        waiters, call.waiters = call.waiters, []
        self._forget(session)
        return waiters, None

    def expire(self, call: Call, reply: bytes) -> list[Address]:
        """The deadline of `call` has passed: `reply` is its outcome, and its work is undone when it ends.

        Returns the addresses that get the reply; none if the call is not running any more.
        """
        if call.state is not State.RUNNING:
            return []
        call.state = _STOPPED
        call.reply = reply
        call.session.reply_bytes += len(reply)
        waiters, call.waiters = call.waiters, []
        return waiters

    def cancel(self, name: bytes, target: int) -> Undoing:
        """The owner cancels request `target`, which may not have arrived yet. Raises UnknownSession or BadRequest."""
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        undoing = Undoing([], [], [])
        if target not in session.calls and target not in session.effects:
            _check_step(session, target, "target")
            if target > session.floor:
                session.top = max(session.top, target)
                call = Call(session, target, "", False)
                call.state = _AFTER(MACHINE.first, Happening.FORESTALL)
                call.reply = self._cancelled(target)
                session.calls[target] = call
                session.reply_bytes += len(call.reply)
                self._forget(session)
            return undoing
        self._cancel(session, target, undoing)
        return undoing

    def ping(self, name: bytes, seq: int, live: list[int] | None) -> Undoing:
        """The owner names, in `live`, the lookups older than `seq` that it still wants; None: all of them.

        Raises UnknownSession or BadRequest (seq).
        """
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        _check_step(session, seq, "seq")
        if seq > session.top:
            session.top = seq
        if live is None or not (session.effects or session.running):
            return _NOTHING
        undoing = Undoing([], [], [])
        named = set(live)
        unwanted = [
            number
            for number, effect in session.effects.items()
            if effect.wanted_by_ping and number < seq and number not in named
        ]
        unwanted += [
            number
            for number, call in session.running.items()
            if call.wanted_by_ping and number < seq and number not in named
        ]
        for number in unwanted:
            self._cancel(session, number, undoing)
        return undoing

    def settle(self, name: bytes, seq: int) -> None:
        """The effect of (name, seq) is over: everything in it was released, committed or aborted."""
        session = self._sessions.get(name)
        if session is not None:
            session.effects.pop(seq, None)

    def validate(self) -> None:
        """Assert the invariants (tests call it after every step)."""
        for name, session in self._sessions.items():
            assert session.name == name and session.open
            assert session.floor <= session.top
            assert not session.calls or max(session.calls) <= session.top
            assert len(session.calls) - len(session.running) <= self._limits.max_outcomes
            assert session.reply_bytes == sum(len(call.reply) for call in session.calls.values())
            for seq, call in session.running.items():
                assert session.calls[seq] is call
            for seq, call in session.calls.items():
                assert call.seq == seq
                assert (call.state in (State.RUNNING, State.CANCELLING)) == (seq in session.running)
                assert bool(call.waiters) == (call.state is State.RUNNING)
                if seq in session.effects:
                    assert call.state is State.DONE

    def _check_new(self, session: Session, seq: int) -> None:
        if seq <= session.floor:
            raise BadRequest(
                f"seq: {seq} is too old: outcomes up to {session.floor} are forgotten; number requests upwards, and do "
                "not repeat old ones",
                field="seq",
            )
        _check_step(session, seq, "seq")

    def _cancel(self, session: Session, seq: int, undoing: Undoing) -> None:
        call = session.calls.get(seq)
        effect = session.effects.pop(seq, None)
        if effect is not None:
            undoing.effects.append(effect)
            if call is not None:
                session.reply_bytes -= len(call.reply)
                call.reply = self._cancelled(seq)
                session.reply_bytes += len(call.reply)
                call.state = _AFTER(call.state, Happening.UNDO)
        elif call is not None and call.state is State.RUNNING:
            call.state = _STOPPED
            call.reply = self._cancelled(seq)
            session.reply_bytes += len(call.reply)
            undoing.stopped.append(call)
            undoing.replies.extend((address, call.reply) for address in call.waiters)
            call.waiters.clear()

    def _cancelled(self, seq: int) -> bytes:
        return self._encode_error(seq, Cancelled("the session cancelled this request itself"))

    def _forget(self, session: Session) -> None:
        """Drop the oldest outcomes beyond the bounds, but no request that is still running."""
        limits = self._limits
        finished = len(session.calls) - len(session.running)
        if finished <= limits.max_outcomes and session.reply_bytes <= limits.max_reply_bytes:
            return
        reply_bytes = session.reply_bytes
        victims = []
        for seq, call in session.calls.items():
            few_bytes = reply_bytes <= limits.max_reply_bytes or finished <= limits.kept_anyway
            if finished <= limits.max_outcomes and few_bytes:
                break
            if seq not in session.running:
                victims.append(seq)
                reply_bytes -= len(call.reply)
                finished -= 1
        for seq in victims:
            del session.calls[seq]
        session.reply_bytes = reply_bytes
        session.floor = max(session.floor, *victims) if victims else session.floor


def _check_step(session: Session, seq: int, field: str) -> None:
    """Raises BadRequest for a number too far above all earlier ones of its session."""
    if session.top and seq > session.top + MAX_SEQ_STEP:
        raise BadRequest(
            f"{field}: {seq} is more than {MAX_SEQ_STEP} above {session.top}, this session's highest number; number "
            "requests by one counter",
            field=field,
        )
