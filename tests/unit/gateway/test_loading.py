"""Loads that go on, by the engine that gets the KV and by the peer that sends it."""

from __future__ import annotations

from kvstrata.gateway.loading import Loading


def test_loads_count_by_engine_and_by_peer_until_they_end() -> None:
    now_s = 10.0
    loading = Loading(lambda: now_s)
    loading.began(1, "a", "peer", "one", 1_000, 2.0)
    loading.began(2, "b", "peer", "other", 500, 1.0)
    loading.began(3, "a", "l2", "disk", 300, 1.0)
    assert loading.queued() == {("a", "peer"): 1_000, ("b", "peer"): 500, ("a", "l2"): 300}
    assert loading.queued({"one"}) == {("", "peer"): 1_000, ("b", "peer"): 500, ("a", "l2"): 300}
    assert loading.queued({"disk"}) == loading.queued(), "only peers are shared by engines"
    now_s = 10.5
    assert loading.queued() == {("a", "peer"): 750, ("b", "peer"): 250, ("a", "l2"): 150}
    now_s = 13.0
    assert not +loading.queued(), "what is late counts as ended"
    for number in (1, 2, 3, 3, 4):
        loading.ended(number)
    assert not len(loading)
