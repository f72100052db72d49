"""Sessions against a network that loses, delays and repeats messages, and a client that gives up at any time.

The machine plays three parts: clients (which know the protocol's rules and nothing else), the network (a bag of
messages delivered in any order, any number of times, or never), and the server's executor (which ends requests at any
time).  The ledger knows only the promises: a request is executed at most once, and every granted ticket has been given
back exactly once when all clients have left.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvstrata.errors import BadRequest, KvstrataError, Refused, UnknownSession
from kvstrata.rpc.session import Call, Effect, Limits, Sessions, Undoing, Verdict
from tests.harness.amount import amount

NAMES = [bytes([number]) * 16 for number in range(2)]
LIMITS = Limits(max_outcomes=3, max_reply_bytes=200, kept_anyway=2, max_running=4, max_effects=8)


class Message(NamedTuple):
    """A message that a client sent."""

    session: bytes
    incarnation: int
    seq: int
    op: str
    target: int = 0
    live: tuple[int, ...] = ()


class Ticket(Effect):
    """Something that was granted to a request and must be given back."""

    __slots__ = ("ended", "granted_to")

    def __init__(self, granted_to: tuple[bytes, int, int], *, wanted_by_ping: bool) -> None:
        super().__init__(wanted_by_ping=wanted_by_ping)
        self.granted_to = granted_to
        self.ended = False


class Client:
    """One attached process: it numbers its requests and remembers which lookups it still wants."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.next_seq = 1
        self.wanted: set[int] = set()
        self.cancelled: set[int] = set()
        self.answered: dict[int, bytes] = {}


class LossyNetwork(RuleBasedStateMachine):
    messages = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.core = Sessions(lambda seq, error: f"{error.code} {seq}".encode(), LIMITS)
        self.clients: dict[bytes, Client] = {}
        self.incarnations = 0
        self.running: list[tuple[Call, Message]] = []
        self.pings: list[Message] = []
        self.executed: set[tuple[bytes, int, int]] = set()
        self.tickets: list[Ticket] = []
        self.held: dict[tuple[bytes, int, int], Ticket] = {}
        self.cancelled_before: set[tuple[bytes, int, int]] = set()

    # --- the ledger --------------------------------------------------------------------------------------

    def end(self, effect: Effect) -> None:
        assert isinstance(effect, Ticket)
        assert not effect.ended, "a ticket was given back twice"
        effect.ended = True
        self.held.pop(effect.granted_to, None)

    def carry_out(self, undoing: Undoing) -> None:
        for effect in undoing.effects:
            self.end(effect)
        for address, reply in undoing.replies:
            self.answer(address, reply)

    def answer(self, address: object, reply: bytes) -> None:
        name, incarnation, seq = address  # type: ignore[misc]
        client = self.clients.get(name)
        if client is None or client.incarnation != incarnation:
            return
        earlier = client.answered.setdefault(seq, reply)
        if seq not in client.cancelled and seq in client.wanted and b"cancelled" not in reply:
            assert earlier == reply, "the same request got two outcomes"

    # --- clients -----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def attach(self, name: bytes) -> None:
        if name not in self.clients:
            self.incarnations += 1
            self.clients[name] = Client(self.incarnations)
        self.core.open(name)  # attaching again changes nothing

    @rule(target=messages, name=st.sampled_from(NAMES), op=st.sampled_from(["lookup", "reserve", "release"]))
    def ask(self, name: bytes, op: str) -> object:
        client = self.clients.get(name)
        if client is None:
            return multiple()
        seq = client.next_seq
        client.next_seq += 1
        if op == "lookup":
            client.wanted.add(seq)
        return Message(name, client.incarnation, seq, op)

    @rule(target=messages, name=st.sampled_from(NAMES), op=st.sampled_from(["lookup", "reserve", "release"]))
    def ask_without_faults(self, name: bytes, op: str) -> object:
        """Send a request that is received, executed and answered at once; the network may still repeat it later."""
        message = self.ask(name, op)
        if isinstance(message, Message):
            self.deliver(message)
            if self.running and self.running[-1][1] is message:
                self.finish_call(len(self.running) - 1, True, 20)
        return message

    @rule(target=messages, name=st.sampled_from(NAMES), data=st.data())
    def give_up(self, name: bytes, data: st.DataObject) -> object:
        client = self.clients.get(name)
        if client is None or client.next_seq == 1:
            return multiple()
        goal = data.draw(st.integers(1, client.next_seq - 1))
        seq = client.next_seq
        client.next_seq += 1
        client.wanted.discard(goal)
        client.cancelled.add(goal)
        return Message(name, client.incarnation, seq, "cancel", target=goal)

    @rule(target=messages, name=st.sampled_from(NAMES), forget=st.booleans())
    def ping(self, name: bytes, forget: bool) -> object:
        client = self.clients.get(name)
        if client is None:
            return multiple()
        if forget and client.wanted:
            client.wanted.discard(min(client.wanted))
        seq = client.next_seq
        client.next_seq += 1
        self.pings.append(Message(name, client.incarnation, seq, "ping", live=tuple(client.wanted)))
        return self.pings[-1]

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: bytes) -> None:
        if self.clients.pop(name, None) is None:
            return
        left = self.core.close(name)
        assert not left.replies
        for effect in left.effects:
            self.end(effect)

    # --- the network -------------------------------------------------------------------------------------

    @rule(message=messages)
    def deliver(self, message: Message) -> None:
        """Deliver a message, which stays in the bag for later repeats."""
        client = self.clients.get(message.session)
        key = (message.session, message.incarnation, message.seq)
        if client is None or client.incarnation != message.incarnation:
            if client is None:
                try:
                    self.core.request(message.session, message.seq, message.op, key)
                    raise AssertionError("a request of an ended session was accepted")
                except UnknownSession:
                    pass
            return  # a real process has a new session name; names are reused here to save states
        if message.op == "ping":
            undoing = self.core.ping(message.session, message.seq, list(message.live))
            undone = {effect.granted_to[2] for effect in undoing.effects if isinstance(effect, Ticket)}
            undone |= {call.seq for call in undoing.stopped}
            assert not undone & client.wanted, "a ping ended a lookup that its owner still wants"
            self.carry_out(undoing)
            return
        try:
            receipt = self.core.request(
                message.session, message.seq, message.op, key, wanted_by_ping=message.op == "lookup"
            )
        except (BadRequest, Refused) as error:
            self.refused(message, error)
            return
        if receipt.verdict is Verdict.REPLAY:
            assert key in self.executed or message.seq in client.cancelled
            self.answer(key, receipt.call.reply)
        elif receipt.verdict is Verdict.RUN:
            assert key not in self.executed, "a request was executed twice"
            self.executed.add(key)
            if message.op == "cancel":
                self.carry_out(self.core.cancel(message.session, message.target))
                self.cancelled_before.add((message.session, message.incarnation, message.target))
            if message.op in ("cancel", "release"):
                waiters, undo = self.core.finish(receipt.call, b"ok")
                assert undo is None
                for address in waiters:
                    self.answer(address, b"ok")
            else:
                self.running.append((receipt.call, message))

    def refused(self, message: Message, error: KvstrataError) -> None:
        """Assert that the refused request was forgotten or exceeds a limit."""
        session = self.core.get(message.session)
        assert session is not None
        if isinstance(error, BadRequest):
            assert message.seq <= session.floor
        else:
            assert len(session.running) >= LIMITS.max_running or len(session.effects) >= LIMITS.max_effects

    @precondition(lambda self: self.pings)
    @rule(data=st.data())
    def deliver_a_late_ping(self, data: st.DataObject) -> None:
        self.deliver(self.pings.pop(data.draw(st.integers(0, len(self.pings) - 1))))

    @rule(message=consumes(messages))
    def lose(self, message: Message) -> None:
        """Remove a message, so that it does not arrive (again)."""

    # --- the executor ------------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(data=st.data(), grants=st.booleans(), size_bytes=st.integers(1, 120))
    def finish(self, data: st.DataObject, grants: bool, size_bytes: int) -> None:
        self.finish_call(data.draw(st.integers(0, len(self.running) - 1)), grants, size_bytes)

    def finish_call(self, number: int, grants: bool, size_bytes: int) -> None:
        call, message = self.running.pop(number)
        key = (message.session, message.incarnation, message.seq)
        ticket: Ticket | None = None
        if grants:
            ticket = Ticket(key, wanted_by_ping=message.op == "lookup")
            self.tickets.append(ticket)
        waiters, undo = self.core.finish(call, b"r" * size_bytes, ticket)
        if undo is not None:
            assert undo is ticket
            self.end(undo)
        elif ticket is not None:
            client = self.clients.get(message.session)
            assert client is not None and client.incarnation == message.incarnation, "granted to the dead"
            assert key not in self.cancelled_before, "granted although it was cancelled before"
            self.held[key] = ticket
        for address in waiters:
            self.answer(address, b"r" * size_bytes)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        call, _ = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        for address in self.core.expire(call, b"cancelled by the deadline"):
            self.answer(address, b"cancelled by the deadline")

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Let the owner release or commit a granted ticket."""
        key = data.draw(st.sampled_from(sorted(self.held)))
        ticket = self.held[key]
        self.core.settle(key[0], key[2])
        self.end(ticket)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """Let a scheduler release its own share of a lease, which its pings then no longer name."""
        self.held[data.draw(st.sampled_from(sorted(self.held)))].wanted_by_ping = False

    # --- promises ----------------------------------------------------------------------------------------

    @invariant()
    def bookkeeping_is_whole(self) -> None:
        self.core.validate()

    @invariant()
    def held_tickets_are_those_of_the_core(self) -> None:
        known = {id(effect) for name in NAMES if (s := self.core.get(name)) for effect in s.effects.values()}
        assert known == {id(ticket) for ticket in self.held.values()}

    def teardown(self) -> None:
        """Let all clients leave and assert that nothing stays granted."""
        for name in list(self.clients):
            self.die(name)
        for call, message in self.running:
            key = (message.session, message.incarnation, message.seq)
            late = Ticket(key, wanted_by_ping=True)
            self.tickets.append(late)
            waiters, undo = self.core.finish(call, b"late", late)
            assert waiters == [] and undo is late
            self.end(late)
        assert all(ticket.ended for ticket in self.tickets), "a ticket leaked"


TestLossyNetwork = LossyNetwork.TestCase
TestLossyNetwork.settings = settings(max_examples=amount(66, 200), stateful_step_count=60)


def test_a_ping_that_forgets_releases_even_when_the_lookup_arrives_after_it() -> None:
    """A lookup that arrives after its owner has given it up is granted a lease, which the next ping ends."""
    core = Sessions(lambda seq, error: b"e", LIMITS)
    core.open(NAMES[0])
    core.ping(NAMES[0], 2, [])
    call = core.request(NAMES[0], 1, "lookup", "a", wanted_by_ping=True).call
    core.finish(call, b"r", Ticket((NAMES[0], 1, 1), wanted_by_ping=True))
    assert len(core.ping(NAMES[0], 3, []).effects) == 1
