"""Lookups and stores in this process: what a clear hides, what chunks cost, and who pays for a full lane."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.errors import Refused
from kvstrata.keys.batch import split
from kvstrata.native.core import storage_keys
from kvstrata.rpc import wire
from kvstrata.server.housekeeping import CHANGES_PER_TURN, Housekeeping
from kvstrata.tiers.fetch import FetchOutcome
from kvstrata.types import KEY_BYTES, MissReason, RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, Said, said
from tests.harness.rpc_client import chain_of, layout, part

SESSION = b"s" * 16
KEPT = 262_144
"""Changes that the pool keeps."""


def keys_of(server: InstanceInProcess, identity: wire.IdentifyReply, n_chunks: int = 4) -> bytes:
    """Store a prompt; returns its storage keys."""
    chain = chain_of(identity.root, n_chunks)
    server.store(SESSION, 10, identity, chain)
    return storage_keys(identity.root, chain, part().digest())


def test_cleared_chunks_that_a_put_holds_are_invisible_at_once_and_free_once_the_put_has_ended(
    server: InstanceInProcess, identity: wire.IdentifyReply
) -> None:
    keys = keys_of(server, identity)
    put = server.pool.hold(keys[:KEY_BYTES])
    assert put is not None

    async def clear_and_wait() -> None:
        clearing, events = server.parts.clearing, server.parts.events
        at_once = await clearing.clear("l1", None)
        assert at_once.document() == {
            "cleared": {"l1": 4}, "pending": {"held": 1, "leased": 0}, "kept": {"claimed": 0},
        }  # fmt: skip
        assert server.pool.peek(keys, 1) == 0
        assert server.pool.stats()["used_bytes"] > 0
        waiting = asyncio.create_task(clearing.clear("l1", None, wait=True))
        await asyncio.sleep(0)
        events.drain()
        put.drop()
        while not waiting.done():
            events.drain()  # as the heartbeat does
            await asyncio.sleep(0)
        assert waiting.result().held == 0
        assert server.pool.stats()["used_bytes"] == 0

    server.loop.run_until_complete(clear_and_wait())


def test_changes_that_were_overwritten_unread_are_told_as_lost_and_later_ones_are_read(
    server, identity, monkeypatch
):
    keys, events, told = keys_of(server, identity), server.parts.events, server.parts.explainer
    doubts: list[bool] = []
    monkeypatch.setattr(events, "_records_lost", lambda: doubts.append(told._has_forgotten))

    async def drain() -> None:
        events.drain()
        while events._goes_on:  # noqa: ASYNC110 (as the loop has turns)
            await asyncio.sleep(0)

    def more(n_changes: int) -> None:
        server.pool.note_changes(1, 0, bytes(KEY_BYTES) * n_changes)

    more(2 * CHANGES_PER_TURN)
    server.loop.run_until_complete(drain())
    assert not (doubts or told._has_forgotten)
    more(KEPT + 1)
    server.loop.run_until_complete(drain())
    assert doubts == [True]
    more(2 * CHANGES_PER_TURN)
    assert server.pool.remove(keys) == 4
    server.loop.run_until_complete(drain())
    notes = [told.note_of(key) for key in split(keys)]
    assert [note.reason for note in notes if note] == [MissReason.EVICTED] * 4 and doubts == [True]


def test_claimed_chunks_survive_a_clear_and_are_counted(server, identity):
    keys = keys_of(server, identity)
    ticket, *_ = server.pool.lease(keys[: 2 * KEY_BYTES], 1, [0])
    done = server.loop.run_until_complete(server.parts.clearing.clear("l1", None))
    assert (done.n_chunks, done.held, done.leased, done.kept) == (2, 0, 0, 2)
    assert server.pool.peek(keys, 1) == 2
    server.pool.release(ticket)


@pytest.mark.parametrize(
    ("leaves", "by"),
    [
        (lambda pool, keys: pool.clear(), "clear"),
        (lambda pool, keys: pool.remove(keys), "an evict command of the controller"),
    ],
)
def test_explain_names_why_a_chunk_left(server, identity, leaves, by):
    keys = keys_of(server, identity)
    leaves(server.pool, keys)
    server.feed()  # hears of the pool's events
    for key in split(keys):
        known = server.parts.explainer.note_of(key)
        assert known is not None and known.reason == "evicted" and known.detail.startswith(by)


def test_a_chunk_costs_by_byte_what_its_engine_measured_and_is_told_when_that_changes(server):
    def group(model: str, tokens_s: float, limits: list[int], *, complete: bool = True) -> Any:
        return SimpleNamespace(
            layout=layout(model), prompt_tokens_s=tokens_s, record_limits=limits, complete=complete
        )

    groups = [group("small", 4_000, [1 << 20]), group("large", 500, [1 << 20, 1 << 20])]
    told: list[tuple[int, float]] = []
    parts = copy.copy(server.parts)
    number = parts.processes.model_number
    vars(parts).update(
        processes=SimpleNamespace(groups=groups, model_number=number),
        pool=SimpleNamespace(set_cost=lambda *cost: told.append(cost)),
    )
    housekeeping = Housekeeping(parts)
    for _ in range(2):
        housekeeping._tell_costs()
    small, large = number(layout("small")), number(layout("large"))
    assert dict(told) == {small: pytest.approx(0.4, rel=0.05), large: pytest.approx(1.6, rel=0.05)}
    assert len(told) == 2, "once"
    groups[1].prompt_tokens_s = 510.0  # no news
    groups += [group("unmeasured", 0.0, [1 << 20]), group("incomplete", 9.0, [1 << 20], complete=False)]
    housekeeping._tell_costs()
    assert len(told) == 2
    groups[1].prompt_tokens_s = 2_000.0
    housekeeping._tell_costs()
    assert dict(told) == {small: pytest.approx(1.0), large: pytest.approx(1.0)}


def test_layouts_have_numbers_of_their_own_as_far_as_these_go_and_their_identities_are_told(
    server: InstanceInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, pool = server.parts.processes, server.pool
    told = {}

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return told.__setitem__ if name == "set_model" else getattr(pool, name)

    monkeypatch.setattr(processes, "_pool", Recording())
    [reply] = server.feed(said(SESSION, wire.Identify(1, RequestIdentity(salt="new"))))
    assert isinstance(reply, wire.IdentifyReply)
    first = layout()  # that of the attached process
    numbers = [processes.model_number(layout(name)) for name in (first.model, "a", "b", "c", "a")]
    assert told == {reply.root: numbers[0]}
    assert sorted(numbers[:3]) == [1, 2, 3] and numbers[3:] == [0, numbers[1]]


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
    return said(SESSION, wire.Lookup(seq, 1000, identity.identity_id, "", chain))


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
