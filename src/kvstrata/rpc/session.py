"""What a request did, remembered per session: the sans-IO core of the RPC protocol.

Messages get lost, come late and come twice.  A session (an attached process) numbers its requests; this
module decides for each message whether it is done now, joined to the same request still running, answered
from memory, or refused.  It holds no socket, reads no clock and touches no pool: the caller executes, sends
and undoes what the methods return.

States of one (session, seq), and what each event makes of them::

    state        request           finish              cancel                 ping without it     forget
    -----------  ----------------  ------------------  ---------------------  ------------------  ---------
    ABSENT       RUNNING, RUN      -                   CANCELLED              -                   -
    RUNNING      JOINED            DONE, send          CANCELLING, send       as cancel (lookup)  -
    CANCELLING   replay the error  CANCELLED, undo     no change              no change           -
    DONE         replay the reply  -                   CANCELLED, undo if     as cancel (lookup   FORGOTTEN
                                                       it has an effect       with own share)
    CANCELLED    replay the error  -                   no change              no change           FORGOTTEN
    FORGOTTEN    refused: too old  -                   undo a kept effect     as DONE             -

A deadline that passes makes CANCELLING out of RUNNING too, with the error `deadline` in place of `cancelled`.

Invariants:

1. A (session, seq) gives RUN at most once in the life of its session.
2. Every effect (lease, reservation) is in `effects` of its session from `finish` until it is returned for
   undoing, settled, or its session is closed; nothing else holds one.
3. At most `max_outcomes` outcomes and about `max_reply_bytes` of replies are kept per session; a seq not kept
   and not above the highest forgotten one is refused, never executed.
4. An outcome of a request still running is never forgotten.

It does not know sessions' processes, groups or tenants (policy/processes.py), nor what an effect is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import NamedTuple

from kvstrata.errors import BadRequest, Cancelled, KvstrataError, Refused, UnknownSession

Address = Hashable
"""Where a reply goes; any value that the transport understands. It says nothing about who asked."""

MAX_WAITERS = 4
"""Connections on which one running request can be asked again; the newest are answered."""


class State(enum.Enum):
    """State of an outcome that is kept; ABSENT and FORGOTTEN keep none."""

    RUNNING = enum.auto()
    CANCELLING = enum.auto()
    DONE = enum.auto()
    CANCELLED = enum.auto()


class Effect:
    """What a finished request left behind until it is released, committed, aborted or undone.

    `wanted_by_ping`: the owner must name it in each ping, else it is undone (leases whose own share is
    still held).
    """

    __slots__ = ("wanted_by_ping",)

    def __init__(self, *, wanted_by_ping: bool) -> None:
        self.wanted_by_ping = wanted_by_ping


class Call:
    """One request of one session and its outcome. Made by `Sessions.request`, ended by `Sessions.finish`."""

    __slots__ = ("op", "reply", "seq", "session", "state", "stop", "waiters", "wanted_by_ping")

    def __init__(self, session: Session, seq: int, op: str, wanted_by_ping: bool) -> None:
        self.session = session
        self.seq = seq
        self.op = op
        self.state = State.RUNNING
        self.reply = b""
        self.waiters: list[Address] = []
        self.wanted_by_ping = wanted_by_ping
        self.stop: Callable[[], object] | None = None
        """Set by the caller for a request that takes time: asks the work to end early."""


class Session:
    """The outcomes of one attached process."""

    __slots__ = ("calls", "effects", "floor", "name", "open", "reply_bytes", "running")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.open = True
        self.calls: dict[int, Call] = {}
        self.running: dict[int, Call] = {}
        self.effects: dict[int, Effect] = {}
        self.floor = 0
        """Highest seq whose outcome was forgotten."""
        self.reply_bytes = 0


class Verdict(enum.Enum):
    """What to do with a request."""

    RUN = enum.auto()
    JOINED = enum.auto()
    REPLAY = enum.auto()


class Receipt(NamedTuple):
    """Answer to a request. `call` is what to run or what runs already, `reply` the bytes to replay."""

    verdict: Verdict
    call: Call


class Undoing(NamedTuple):
    """What a cancel or a ping leaves to do: effects to undo, work to stop, replies to send."""

    effects: list[Effect]
    stopped: list[Call]
    replies: list[tuple[Address, bytes]]


class Limits(NamedTuple):
    """Bounds per session."""

    max_outcomes: int = 1024
    max_reply_bytes: int = 2 << 20
    kept_anyway: int = 8
    """The newest outcomes are kept whatever their bytes."""
    max_running: int = 1024
    max_effects: int = 8192


class Sessions:
    """All sessions of one instance. Single-threaded.

    `encode_error(seq, error)` gives the reply that carries an error.
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
        """The session of an attached process; the same one when it attaches again."""
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = Session(name)
        return session

    def get(self, name: bytes) -> Session | None:
        """The open session of that name."""
        return self._sessions.get(name)

    def close(self, name: bytes) -> Undoing:
        """The process is gone: nobody waits any more, running work is to stop.

        Returns the effects left behind; the caller decides which of them died with the process.
        """
        session = self._sessions.pop(name, None)
        if session is None:
            return Undoing([], [], [])
        session.open = False
        stopped = [call for call in session.running.values() if call.state is State.RUNNING]
        for call in stopped:
            call.state = State.CANCELLING
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
        """A request arrived. Raises UnknownSession, BadRequest (seq) or Refused; then nothing changed.

        `takes`: it may end with an effect; one that gives back is never refused for how many there are.
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
        call = Call(session, seq, op, wanted_by_ping)
        call.waiters.append(address)
        session.calls[seq] = call
        session.running[seq] = call
        return Receipt(Verdict.RUN, call)

    def finish(
        self, call: Call, reply: bytes, effect: Effect | None = None
    ) -> tuple[list[Address], Effect | None]:
        """The work of `call` ended. Returns who gets `reply`, and the effect to undo if it was cancelled."""
        session = call.session
        if call.state is State.CANCELLING:
            session.running.pop(call.seq, None)
            call.state = State.CANCELLED
            self._forget(session)
            return [], effect
        assert call.state is State.RUNNING, call.state
        del session.running[call.seq]
        call.state = State.DONE
        call.reply = reply
        call.stop = None
        session.reply_bytes += len(reply)
        if effect is not None:
            session.effects[call.seq] = effect
        waiters, call.waiters = call.waiters, []
        self._forget(session)
        return waiters, None

    def expire(self, call: Call, reply: bytes) -> list[Address]:
        """The deadline passed while `call` runs: `reply` is its outcome, its work is undone when it ends.

        Returns who gets the reply; nobody if the call is not running any more.
        """
        if call.state is not State.RUNNING:
            return []
        call.state = State.CANCELLING
        call.reply = reply
        call.session.reply_bytes += len(reply)
        waiters, call.waiters = call.waiters, []
        return waiters

    def cancel(self, name: bytes, target: int) -> Undoing:
        """The owner wants `target` not to have happened. Raises UnknownSession."""
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        undoing = Undoing([], [], [])
        if target not in session.calls and target not in session.effects:
            if target > session.floor:
                call = Call(session, target, "", False)
                call.state = State.CANCELLED
                call.reply = self._cancelled(target)
                session.calls[target] = call
                session.reply_bytes += len(call.reply)
                self._forget(session)
            return undoing
        self._cancel(session, target, undoing)
        return undoing

    def ping(self, name: bytes, seq: int, live: list[int]) -> Undoing:
        """The owner names the lookups it still wants among those older than `seq`. Raises UnknownSession."""
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        undoing = Undoing([], [], [])
        if not session.effects and not session.running:
            return undoing
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
                f"seq: {seq} is older than the outcomes kept (up to {session.floor} forgotten); "
                "number requests upwards and give up old ones",
                field="seq",
            )

    def _cancel(self, session: Session, seq: int, undoing: Undoing) -> None:
        call = session.calls.get(seq)
        effect = session.effects.pop(seq, None)
        if effect is not None:
            undoing.effects.append(effect)
            if call is not None:
                session.reply_bytes -= len(call.reply)
                call.reply = self._cancelled(seq)
                session.reply_bytes += len(call.reply)
                call.state = State.CANCELLED
        elif call is not None and call.state is State.RUNNING:
            call.state = State.CANCELLING
            call.reply = self._cancelled(seq)
            session.reply_bytes += len(call.reply)
            undoing.stopped.append(call)
            undoing.replies.extend((address, call.reply) for address in call.waiters)
            call.waiters.clear()

    def _cancelled(self, seq: int) -> bytes:
        return self._encode_error(seq, Cancelled("the session cancelled this request itself"))

    def _forget(self, session: Session) -> None:
        """Drop the oldest outcomes beyond the bounds; what still runs stays."""
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
