"""Events for one controller: in order, numbered without gaps, and without those that a full sync will carry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstrata.rpc.cluster_fields import TAG_BYTES
from kvstrata.rpc.cluster_wire import Change, Events
from kvstrata.server.cluster.events import SyncEvent, SyncState, TierNews
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
