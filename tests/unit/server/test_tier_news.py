"""Events for one controller: in order, numbered without gaps, and without those that a full sync will carry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstrata.rpc.cluster_fields import TAG_BYTES
from kvstrata.rpc.cluster_wire import Change, Events
from kvstrata.server.cluster.events import MAX_QUEUED_TAGS, SyncEvent, SyncState, TierNews
from kvstrata.types import KEY_BYTES, PoolEvent


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


def test_nothing_is_queued_before_a_full_sync_begins_and_after_it_has_failed(news: TierNews) -> None:
    def happens() -> None:
        news.pool_events([(PoolEvent.INSERTED, key(1), 0)])
        news.tier_got("disk-0", key(2))
        news.tier_lost("disk-0", [key(2)])
        news.tier_emptied("disk-0")

    happens()
    assert news.next_frame("ours", 7) is None
    news.begin_telling()
    happens()
    assert news.queued_tags == 3
    news.stop_telling()
    news.begin_telling()
    assert news.next_frame("ours", 7) is None and news.queued_tags == 0


def test_a_batch_that_the_socket_did_not_take_is_sent_again_under_its_number(news: TierNews) -> None:
    news.begin_telling()
    news.pool_events([(PoolEvent.INSERTED, key(1), 0), (PoolEvent.EVICTED, key(2), 0)])
    first = told(news)
    assert [(run.change, run.tags) for run in first.runs] == [
        (Change.ADMIT, key(1)[:TAG_BYTES]),
        (Change.EVICT, key(2)[:TAG_BYTES]),
    ]
    news.pool_events([(PoolEvent.VERIFIED, key(3), 0)])
    assert told(news) == first and (first.seq, news.seq) == (1, 0)
    news.sent()
    second = told(news)
    assert (second.seq, [run.tags for run in second.runs]) == (2, [key(3)[:TAG_BYTES]])
    assert news.n_events == 3


def test_tags_are_remembered_only_of_known_tiers_that_do_not_list_what_they_have(news: TierNews) -> None:
    for tier in ("disk-0", "resp-1", "unknown-2"):
        news.tier_got(tier, key(1))
    assert [news.tags.count(tier) for tier in ("disk-0", "resp-1", "unknown-2")] == [0, 1, 0]


def test_a_changed_set_of_tiers_needs_a_full_sync(news: TierNews) -> None:
    news.begin_telling()
    news.set_tiers(["l1", "disk-0", "resp-1"])
    assert news.telling
    news.set_tiers(["l1", "disk-0"])
    assert not news.telling


def test_lost_events_call_for_a_full_sync_only_while_events_are_told(news: TierNews) -> None:
    news.pool_events_lost()
    assert news.sync is SyncState.IDLE and not news.wake.is_set()
    news.begin_telling()
    news.pool_events_lost()
    assert news.sync_wanted and news.wake.is_set()


def test_a_full_sync_requested_during_another_follows_it(news: TierNews) -> None:
    news.want_sync("registered")
    news.step(SyncEvent.BEGUN)
    assert not news.sync_wanted
    news.want_sync("events_lost")
    news.step(SyncEvent.ENDED)
    assert news.sync is SyncState.WANTED
    news.step(SyncEvent.BEGUN)
    news.step(SyncEvent.ENDED)
    assert news.sync is SyncState.IDLE


def test_too_many_queued_events_are_an_overflow_until_the_next_full_sync(news: TierNews) -> None:
    news.begin_telling()
    news.tier_lost("disk-0", [key(1)] * (MAX_QUEUED_TAGS + 1))
    assert news.overflowed and news.queued_tags == 0
    news.begin_telling()
    assert not news.overflowed
