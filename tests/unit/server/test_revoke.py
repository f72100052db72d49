"""Leases that the server asks back: which, how many, from whom, how often; only their holder's answer frees bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvstrata.client import CacheClient
from kvstrata.client.handles import LookupResult
from kvstrata.client.link import Step
from kvstrata.config.client_model import ClientSettings
from kvstrata.rpc import wire
from kvstrata.server.requests.grants import MAX_REVOKES, MAX_TOLD, Grants
from kvstrata.types import KEY_BYTES, LeaseName, MissReason, RequestIdentity, Role
from tests.harness.instance_in_process import InstanceInProcess, Said, said
from tests.harness.rpc_client import CHUNK_TOKENS, chain_of, layout

CHUNKS = 8
"""Chunks of one prompt; half of L1 has room for four prompts."""


class Process:
    """An attached process whose messages the test sends."""

    def __init__(
        self, server: InstanceInProcess, name: bytes, group: bytes, role: Role = Role.CLIENT
    ) -> None:
        self.server, self.session, self.seq = server, name * 16, 0
        server.attach(self.session, group * 16, role)
        [self.identity] = self.say(wire.Identify, RequestIdentity())

    def say(self, message: type[wire.Request], *fields: object) -> list[wire.AnyReply]:
        """Send a message; returns everything that the server sends then, to any process."""
        self.seq += 1
        return self.server.feed(said(self.session, message(self.seq, *fields)))

    def look_up(self, chain: bytes) -> tuple[wire.LookupReply, list[wire.AnyReply]]:
        """Look a prompt up; returns (the reply, the other messages that the server sent)."""
        groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
        sent = self.say(
            wire.Lookup, 1000, self.identity.identity_id, f"{self.session[:1]!r} {self.seq}", groups
        )
        [reply] = [message for message in sent if isinstance(message, wire.LookupReply)]
        return reply, [message for message in sent if message is not reply]

    def asked_back(self) -> list[int]:
        [pong] = self.say(wire.Ping)
        assert isinstance(pong, wire.Pong)
        return pong.revoked

    def give_back(self, seq: int, *, group: bool = True) -> int:
        [ok] = self.say(wire.Release, [(self.session, seq)], group)
        assert isinstance(ok, wire.Ok)
        return ok.count


@pytest.fixture
def server() -> Iterator[InstanceInProcess]:
    server = InstanceInProcess(4 << 20)
    yield server
    server.close()


@pytest.fixture
def old(server: InstanceInProcess) -> Process:
    return Process(server, b"a", b"A")


@pytest.fixture
def prompts(server: InstanceInProcess, old: Process) -> list[bytes]:
    """Chain keys of six prompts that are all in L1."""
    prompts = [chain_of(old.identity.root, CHUNKS, 1000 * number) for number in range(6)]
    for chain in prompts:
        server.store(old.session, old.seq + 1, old.identity, chain)
        old.seq += 2
    return prompts


@pytest.fixture
def held(old: Process, prompts: list[bytes]) -> list[int]:
    """Numbers of four lookups, oldest first, whose leases are all that may be leased."""
    replies = [old.look_up(chain)[0] for chain in prompts[:4]]
    assert [reply.n_chunks for reply in replies] == [CHUNKS] * 4
    return [reply.seq for reply in replies]


@pytest.fixture
def new(server: InstanceInProcess, old: Process) -> Process:
    return Process(server, b"b", b"B")


def leased_bytes(server: InstanceInProcess) -> int:
    return server.pool.stats()["leased_bytes"]


def test_the_oldest_lease_makes_room_for_the_next_lookup(server, old, new, prompts, held):
    reply, notices = new.look_up(prompts[4])
    assert (reply.n_chunks, reply.reason) == (0, MissReason.REFUSED), (
        "the lookup is answered at once, without the missing chunks"
    )
    [notice] = notices
    assert (notice.seq, notice.orphaned, notice.revoked) == (0, [], held[:1])
    assert leased_bytes(server) == server.pool.extents_bytes // 2, "asking frees nothing"
    assert old.give_back(held[0]) == 1
    reply, notices = new.look_up(prompts[4])
    assert (reply.n_chunks, reply.reason, notices) == (CHUNKS, "", [])


@pytest.mark.parametrize(("n", "asked"), [(1, 1), (8, 1), (9, 2), (16, 2)])
def test_so_many_leases_are_asked_back_as_the_rest_of_the_prefix_needs(
    server, old, new, prompts, held, n, asked
):
    # Two stored prompts of one chain, so that one lookup can want more than one lease covers.
    longer = chain_of(old.identity.root, 2 * CHUNKS, 9000)
    for first in (0, CHUNKS):
        server.store(
            old.session, old.seq + 1, old.identity, longer[first * KEY_BYTES : (first + CHUNKS) * KEY_BYTES]
        )
        old.seq += 2
    _, [notice] = new.look_up(longer[: n * KEY_BYTES])
    assert notice.revoked == held[:asked]


def test_a_lease_is_asked_back_with_each_ping_until_it_is_given_back(old, new, prompts, held):
    assert old.asked_back() == []
    new.look_up(prompts[4])
    assert old.asked_back() == old.asked_back() == held[:1]
    assert new.asked_back() == [], "a process without the lease is not asked"
    old.give_back(held[0])
    old.give_back(held[0])
    assert old.asked_back() == []


def test_each_lookup_asks_back_leases_that_were_not_asked_back_before(old, new, prompts, held):
    """A frozen engine keeps its leases; the next lookup asks back others."""
    new.look_up(prompts[4])
    _, [notice] = new.look_up(prompts[4])
    assert notice.revoked == held[:2]
    for _ in range(4):
        new.look_up(prompts[4])
    assert old.asked_back() == held
    assert new.look_up(prompts[4])[1] == [], "no lease is left to ask back"


def test_a_lease_in_use_is_not_asked_back(server, new, prompts):
    scheduler = Process(server, b"s", b"S", Role.SCHEDULER)
    worker = Process(server, b"w", b"S", Role.WORKER)
    scheduler.say(wire.Identify, RequestIdentity())
    seqs = [scheduler.look_up(chain)[0].seq for chain in prompts[:4]]
    assert scheduler.give_back(seqs[0], group=False) == 1, "handed on: its worker copies"
    assert worker.say(wire.Release, [(scheduler.session, seqs[1])], False)[0].count == 1, (
        "it was copied already"
    )
    _, [notice] = new.look_up(prompts[4])
    assert notice.revoked == seqs[2:3]
    scheduler.give_back(seqs[2], group=False)
    assert scheduler.asked_back() == [], "handed on while it was asked for"


def test_leases_that_would_free_no_bytes_are_not_asked_back(server, old, prompts):
    """Other leases in use cover the same chunks."""
    scheduler = Process(server, b"s", b"S", Role.SCHEDULER)
    Process(server, b"w", b"S", Role.WORKER)
    scheduler.say(wire.Identify, RequestIdentity())
    for chain in prompts[:4]:
        scheduler.give_back(scheduler.look_up(chain)[0].seq, group=False)
        assert old.look_up(chain)[0].n_chunks == CHUNKS
    reply, notices = old.look_up(prompts[4])
    assert (reply.n_chunks, notices) == (0, [])
    assert old.asked_back() == []


def test_a_lease_is_no_longer_asked_back_once_the_lookup_that_needed_it_has_ended(
    server, old, new, prompts, held
):
    new.look_up(prompts[4])
    assert server.status()["sessions"]["leases_revoked"] == 1
    server.gone(old.session)
    assert server.status()["sessions"]["leases_revoked"] == 0
    assert new.look_up(prompts[4])[0].n_chunks == CHUNKS


def test_leases_asked_back_are_counted_and_explained(server, old, new, prompts, held):
    new.look_up(prompts[4])
    status = server.status()
    assert status["counters"]["revoked_leases"] == status["sessions"]["leases_revoked"] == 1
    assert status["pool"]["leases_trimmed"] == 1
    [told] = server.parts.explainer.requests.recent(1)
    assert told.reason == MissReason.REFUSED
    assert "1 older leases have been revoked" in told.detail
    old.give_back(held[0])
    assert server.status()["sessions"]["leases_revoked"] == 0
    assert server.status()["counters"]["revoked_leases"] == 1


class Choice:
    """In place of a pool: says how many of the tickets have to end."""

    n_to_end = 0

    def leases_to_end(self, tickets: list[int], need_bytes: int) -> int:
        self.tickets = tickets
        return min(self.n_to_end, len(tickets))


def test_a_lookup_examines_a_bounded_number_of_leases_and_a_reply_names_a_bounded_number(old):
    [process] = old.server.parts.processes
    grants = Grants(choice := Choice(), old.server.parts.counters, 1)
    for seq in range(1, 2001):
        grants.leased(process, seq, seq, [process.row], old.server.line(old.session))
    assert grants.revoke(1) == 0
    assert choice.tickets == list(range(1, MAX_REVOKES + 1))
    choice.n_to_end = 5000
    assert grants.revoke(1) == MAX_REVOKES
    while grants.revoke(1):
        grants.validate()
    assert grants.n_revoked == 2000
    assert grants.revoked(old.session) == list(range(1, MAX_TOLD + 1))
    process.grants.clear()


# -- the client's side


def result(n_chunks: int = 3) -> LookupResult:
    return LookupResult(n_chunks, LeaseName(b"s" * 16, 7, 1), b"", 1, "")


class Waiting(CacheClient):
    """A client attached to `server`, without its thread and its socket."""

    def __init__(self, server: InstanceInProcess) -> None:
        super().__init__(
            ClientSettings(socket_dir="/nowhere", chunk_size=CHUNK_TOKENS),
            role=Role.SCHEDULER,
            layout=layout(),
            group=b"G" * 16,
            engine_slices=1,
        )
        self.server = server
        server.attach(self.session, b"G" * 16, Role.SCHEDULER)
        self._link._move(Step.ATTACHED)
        self._link.epoch = server.epoch
        self._link.silence.heard()

    def run(self) -> list[type[wire.AnyRequest]]:
        """Do what the thread would do now; returns the kinds of the messages sent, all of which were answered."""
        kinds = []
        self._link._drain()
        self._upkeep.link_pass(time.monotonic())
        for frame in self._link.table.to_send(time.monotonic()):
            kinds.append(type(wire.decode_request(frame)))
            for reply in self.server.feed(Said(self.session, frame)):
                self._link.table.reply(reply)
        return kinds


@pytest.mark.parametrize("when", ["missed", "released", "cancelled"])
def test_a_lookup_is_cancelled_at_the_server_only_if_it_may_still_hold_a_lease(server, old, prompts, when):
    Process(server, b"w", b"G", Role.WORKER)
    client = Waiting(server)
    identity = client.identity(RequestIdentity())
    client.run()
    chain = chain_of(identity.root, 1, 9000) if when == "missed" else prompts[0]
    call = client.lookup(identity, chain, request_id="r")
    assert client.run() == [wire.Lookup] and call.done
    if when == "released":
        client.release([call.result.lease], group=True)
        assert client.run() == [wire.Release]
    call.cancel()
    assert client.run() == ([wire.Cancel] if when == "cancelled" else [])
    assert leased_bytes(server) == 0
    call.cancel()
    assert client.run() == []
    client.close()
