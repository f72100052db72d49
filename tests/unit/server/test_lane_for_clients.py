"""Clients that fill their lane cost other clients the end of a long hit, and the server's own work nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from kvstrata.errors import Refused
from kvstrata.rpc import wire
from kvstrata.server.housekeeping import Housekeeping
from kvstrata.tiers.fetch import FetchOutcome
from tests.harness.instance_in_process import InstanceInProcess, Said, said
from tests.harness.rpc_client import chain_of

SESSION = b"s" * 16
LONG = 1_100
"""Chunks of a prompt so long that its lookup runs on the lane."""


@pytest.fixture
def fill(server: InstanceInProcess) -> Iterator[Callable[[], None]]:
    """A call that fills the lane for clients until the end of the test."""
    gate = threading.Event()

    def take_all() -> None:
        with pytest.raises(Refused):
            while True:
                server.lane.run(gate.wait, 60)

    yield take_all
    gate.set()


def lookup(seq: int, identity: wire.IdentifyReply, chain: bytes) -> Said:
    groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
    return said(SESSION, wire.Lookup(seq, 1000, identity.identity_id, "", groups))


def test_in_a_burst_of_long_lookups_each_gets_the_beginning_of_its_hit_and_the_server_goes_on(
    server: InstanceInProcess, identity: wire.IdentifyReply, fill: Callable[[], None]
) -> None:
    server.store(SESSION, 2, identity, chain_of(identity.root, 4))
    housekeeping = Housekeeping(server.parts)

    async def meanwhile() -> None:
        fill()
        await housekeeping.round()
        assert (await server.parts.clearing.clear("l1", None)).tiers == {"l1": 4}

    server.loop.run_until_complete(meanwhile())
    server.store(SESSION, 4, identity, chain_of(identity.root, 3))
    [found] = server.feed(lookup(10, identity, chain_of(identity.root, LONG)))
    assert isinstance(found, wire.LookupReply) and (found.n_chunks, found.reason) == (3, "refused")
    server.check()


def test_a_lookup_that_finds_the_lane_full_at_its_end_answers_with_the_chunks_that_it_has(
    server: InstanceInProcess, identity: wire.IdentifyReply, fill: Callable[[], None]
) -> None:
    chain = chain_of(identity.root, LONG)
    server.store(SESSION, 2, identity, chain[: 4 * 32])

    class PrefetchThatFills:
        async def fetch(self, keys: bytes, n_slices: int, **more: object) -> FetchOutcome:
            fill()
            return FetchOutcome(1, 1, "deadline")

    server.answer_with(prefetch=PrefetchThatFills(), tiers=SimpleNamespace(take_loads=True))
    [reply] = server.feed(lookup(10, identity, chain))
    assert isinstance(reply, wire.LookupReply) and (reply.n_chunks, reply.reason) == (4, "deadline")
