"""Answers to lookups: what a client takes from them, and which it does not believe; the test gives the answers."""

from __future__ import annotations

import pytest

from kvstrata.client.handles import LookupCall
from kvstrata.client.identities import IdentityTable
from kvstrata.client.lookups import Lookups
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, KEY_BYTES, LayoutIdentity, LeaseName, MissReason, RequestIdentity
from tests.unit.client.link_double import EPOCH, SESSION, Link

N_CHUNKS = 4


class Server:
    """Answers the identity and then the lookup of one client."""

    def __init__(self) -> None:
        self.link = Link(runs_posted=True)
        self.identities = IdentityTable(
            self.link, LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16), (bytes(32),)
        )
        self.identity = self.identities.identity(RequestIdentity())
        self.lookups = Lookups(self.link, self.identities, 60_000)

    def answers(self, n_chunks: int, extents: bytes, reason: str) -> LookupCall:
        """A lookup of N_CHUNKS chunks that gets this answer."""
        call = self.lookups.begin(self.identity, bytes(N_CHUNKS * KEY_BYTES), "request", b"", None)
        (asked,) = self.link.said()
        if isinstance(asked, wire.Identify):
            self.link.table.reply(
                wire.IdentifyReply(asked.seq, EPOCH, 5, self.identity.root, [bytes(32)], True)
            )
            (asked,) = self.link.said()
        assert isinstance(asked, wire.Lookup)
        self.link.table.reply(wire.LookupReply(asked.seq, EPOCH, n_chunks, extents, n_chunks, 0, reason))
        return call


@pytest.fixture
def server() -> Server:
    return Server()


def extents(n: int) -> bytes:
    return bytes(n * EXTENT.size)


def test_hits_are_kept_whatever_word_the_server_has_for_the_rest(server, caplog):
    found = [server.answers(3, extents(3), word) for word in ("of a newer server", "x" * 10_000)]
    for call in found:
        lease = LeaseName(SESSION, call.seq, EPOCH)
        assert call.result[:5] == (3, lease, extents(3), 1, MissReason.FORGOTTEN)
        assert server.lookups.live.get(call.seq) is call
    assert server.link.settled == [], "the leases stand"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"
    assert "'of a newer server'" in caplog.text


def test_a_reason_of_the_list_arrives_as_it_was_given_and_one_of_a_newer_server_as_forgotten(server):
    for n_chunks in (0, 2):
        call = server.answers(n_chunks, extents(n_chunks), MissReason.EVICTED)
        assert call.result.reason is MissReason.EVICTED
    call = server.answers(0, b"", "of a newer server")
    assert (call.result.n_chunks, call.result.reason) == (0, MissReason.FORGOTTEN)
    assert server.link.settled == []


@pytest.mark.parametrize(
    ("n_chunks", "n_bytes", "reason"),
    [
        (0, 0, ""),  # nothing found, and no reason
        (N_CHUNKS + 1, (N_CHUNKS + 1) * EXTENT.size, ""),  # more than was asked for
        (-1, 0, "evicted"),
        (2, 0, "evicted"),  # hits without extents
        (2, 2 * EXTENT.size - 1, "of a newer server"),
        (2, 3 * EXTENT.size, "evicted"),  # extents of one and a half slices
    ],
)
def test_an_answer_that_cannot_be_true_is_a_miss_and_its_lease_is_given_back(
    server, n_chunks, n_bytes, reason, caplog
):
    call = server.answers(n_chunks, bytes(n_bytes), reason)
    assert (call.result.n_chunks, call.result.lease, call.result.reason) == (0, None, MissReason.REFUSED)
    assert server.lookups.live == {} and [cancel.target for cancel in server.link.settled] == [call.seq]
    assert "invalid reply to a lookup" in caplog.text
