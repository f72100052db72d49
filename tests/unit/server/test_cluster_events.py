"""What controllers are told of chunks, tiers and engines: in order, once, and within bounds."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstrata.observability.explain import ServerNumbers
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    MAX_RUNS,
    TAG_BYTES,
    Change,
    Done,
    Events,
    SyncBegin,
    SyncEnd,
    SyncPart,
    tags_of,
)
from kvstrata.server.cluster.events import (
    BATCH_TAGS,
    L1_TIER,
    MAX_L2_TAGS,
    MAX_QUEUED_RUNS,
    MAX_QUEUED_TAGS,
    EventQueue,
    TierNews,
    TierTags,
)
from kvstrata.server.cluster.sync import FullSync
from kvstrata.server.cluster.told_tiers import MAX_NAME_CHARS, tier_name
from kvstrata.types import KEY_BYTES


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_BYTES, "little")


def test_a_message_of_events_is_bounded_and_the_rest_follows() -> None:
    queue = EventQueue()
    for number in range(3 * BATCH_TAGS):
        queue.add(Change.ADMIT, L1_TIER, tag(number))
    taken = []
    while runs := queue.take():
        assert sum(len(run.tags) for run in runs) <= 2 * BATCH_TAGS * TAG_BYTES
        taken += [run.tags for run in runs]
    assert b"".join(taken) == b"".join(tag(number) for number in range(3 * BATCH_TAGS))
    for number in range(2 * MAX_RUNS):
        queue.add(Change(number % 2), L1_TIER, tag(number))
    assert len(queue.take()) == MAX_RUNS


def test_an_overflow_drops_all_events_and_is_reported_until_it_is_cleared() -> None:
    queue = EventQueue()
    for _ in range(MAX_QUEUED_TAGS // 1_024):
        queue.add(Change.ADMIT, L1_TIER, bytes(1_024 * TAG_BYTES))
    assert not queue.overflowed
    queue.add(Change.ADMIT, L1_TIER, tag(1))
    assert queue.overflowed
    assert (len(queue), queue.n_tags) == (0, 0)
    queue.add(Change.ADMIT, L1_TIER, tag(1))
    assert len(queue) == 0
    queue.clear()
    queue.add(Change.ADMIT, L1_TIER, tag(1))
    assert len(queue) == 1


def test_the_memory_of_a_tiers_chunks_is_bounded() -> None:
    tiers = TierTags()
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(3)]
    tiers.admit("fs-0", keys)
    tiers.evict("fs-0", keys[1:2])
    tiers.evict("other", keys)
    assert tiers.of("fs-0") == tags_of(keys[0] + keys[2])
    tiers.clear("fs-0")
    assert tiers.of("fs-0") == b""
    tiers.admit("fs-0", (tag(number) for number in range(MAX_L2_TAGS + 5)))
    assert tiers.count("fs-0") == MAX_L2_TAGS
    assert tiers.of("fs-0")[:TAG_BYTES] == tag(5)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")[::-1]


@pytest.fixture
def news() -> TierNews:
    own = SimpleNamespace(lists=lambda tier: tier == "disk-0")
    news = TierNews(cast(Any, own))
    news.set_tiers(["l1", "disk-0", "resp-1"])
    return news


def told(news: TierNews) -> Events:
    frame = news.next_frame("ours", 7)
    assert frame is not None
    return msgspec.msgpack.decode(frame, type=Events)


LONG = "a_plugin_with_a_really_long_name_for_its_type"


def test_long_names_are_cut_and_stay_apart() -> None:
    assert tier_name("disk-0") == "disk-0"
    cut = {tier_name(f"{LONG}-{number}") for number in range(20)}
    assert len(cut) == 20
    assert {len(name) for name in cut} == {MAX_NAME_CHARS}


def test_events_of_a_tier_carry_the_name_that_controllers_know() -> None:
    name = f"{LONG}-1"
    own = SimpleNamespace(lists=lambda tier: False)
    news = TierNews(own)  # type: ignore[arg-type]
    news.set_tiers(["l1", tier_name(name)])
    news.begin_telling()
    news.tier_got(name, [bytes(32)])
    assert news.tags.count(tier_name(name)) == 1
    news.tier_lost(name, [bytes(32)])
    news.tier_emptied(name)
    frame = news.next_frame("ours", 1)
    assert frame is not None
    told = msgspec.msgpack.decode(frame, type=Events)
    assert [run.tier for run in told.runs] == [tier_name(name)] * 3
    assert news.tags.count(tier_name(name)) == 0


class NoChunks:
    def ready_tags(self, entry: int, count: int) -> tuple[bytes, int]:
        return b"", 0


@pytest.mark.parametrize("tiers", [["l1", "near-1", "disk-0"], ["l1"]], ids=["added", "removed"])
async def test_a_tier_that_comes_or_goes_during_a_sync_does_not_end_the_server(tiers: list[str]) -> None:
    supervisor = Supervisor(asyncio.get_running_loop())
    news = TierNews(cast(Any, SimpleNamespace(lists=lambda tier: False)))
    news.set_tiers(["l1", "disk-0"])
    news.tier_got("disk-0", [bytes(KEY_BYTES)])
    asked: list[object] = []

    async def ask(request: Any, kind: type[Done], timeout_s: float) -> Done:
        asked.append(request)
        if isinstance(request, SyncBegin):  # what a registration does when the tiers have changed
            news.set_tiers(tiers)
            news.tier_got("near-1", [b"\1" * KEY_BYTES])
        return Done(request.seq, 1)

    parts = SimpleNamespace(
        facts=SimpleNamespace(instance_id="ours", epoch=7), pool=NoChunks(), frozen_by=set(),
        supervisor=supervisor, counters=ServerNumbers(),
    )  # fmt: skip
    sync = FullSync(cast(Any, SimpleNamespace(ask=ask)), "tcp://x", cast(Any, parts), news, news._told)
    news.want_sync("registered")
    sync.begin_if_wanted()
    await supervisor.idle()
    assert not supervisor.failure.done()
    begun, *sent, end = asked
    assert isinstance(begun, SyncBegin) and isinstance(end, SyncEnd)
    assert all(isinstance(part, SyncPart) and part.tier == "disk-0" for part in sent)
    assert set(end.tags) == {"l1", "disk-0"}
    assert not news.telling, "the registration then wants another sync"


def test_many_short_runs_of_events_overflow_too() -> None:
    queue = EventQueue()
    for number in range(MAX_QUEUED_RUNS + 1):
        queue.add(Change(number % 2), L1_TIER, tag(number))
    assert queue.overflowed


def test_lost_events_call_for_a_full_sync_only_while_events_are_told(news: TierNews) -> None:
    news.pool_events_lost()
    assert not news.sync_wanted and not news.wake.is_set()
    news.begin_telling()
    news.pool_events_lost()
    assert news.sync_wanted and news.wake.is_set()


def test_a_full_sync_requested_during_another_follows_it(news: TierNews) -> None:
    news.want_sync("registered")
    news.begin_telling()
    assert not news.sync_wanted
    news.want_sync("events_lost")
    assert news.sync_wanted
