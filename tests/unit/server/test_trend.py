"""The windows of the section `trend` are differences of real totals, of a known length."""

from __future__ import annotations

from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.savings import Savings
from kvstrata.server.admin.trend import EVERY, SAMPLE_S, Trend


class Clock:
    now_s = 1_000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return int(1_000 * self.now_s)


class Scene:
    def __init__(self) -> None:
        self.clock, self.counters, self.savings = Clock(), ServerCounters(), Savings()
        self.trend = Trend(self.counters, self.savings, self.clock)

    def lookup(self, chunks: int, l1: int, l2: int, reason: str = "") -> None:
        counters = self.counters
        counters.lookup.add(0.001)
        counters.lookup_chunks += chunks
        counters.l1_hit_chunks += l1
        counters.l2_hit_chunks += l2
        self.savings.avoided_s += 0.5 * (l1 + l2)
        if reason:
            counters.misses[reason] = counters.misses.get(reason, 0) + 1

    def passes(self, samples: int) -> None:
        for _ in range(samples):
            self.clock.now_s += SAMPLE_S
            self.trend.sample()


def test_a_window_that_is_older_than_the_server_reaches_back_to_its_start():
    scene = Scene()
    scene.lookup(10, 4, 2, "evicted")
    scene.clock.now_s += 2.0
    section = scene.trend.section()
    for name in ("minute", "hour", "start"):
        assert section[name] == {
            "seconds": 2.0, "lookups": 1, "lookup_chunks": 10, "l1_hit_chunks": 4, "l2_hit_chunks": 2,
            "lookup_s": 0.001, "avoided_s": 3.0, "first_misses": {"evicted": 1},
        }  # fmt: skip


def test_what_is_older_than_a_window_is_not_in_it():
    scene = Scene()
    scene.lookup(10, 10, 0, "evicted")
    scene.passes(2 * EVERY)
    scene.lookup(5, 0, 0, "never_stored")
    section = scene.trend.section()
    assert section["minute"]["lookup_chunks"] == 5 and section["minute"]["first_misses"] == {
        "never_stored": 1
    }
    assert section["hour"]["lookup_chunks"] == section["start"]["lookup_chunks"] == 15
    assert 60 <= section["minute"]["seconds"] < 60 + SAMPLE_S
    scene.passes(62 * EVERY)
    section = scene.trend.section()
    assert (
        section["minute"]["lookups"] == section["hour"]["lookups"] == 0 and section["start"]["lookups"] == 2
    )
    assert 3_600 <= section["hour"]["seconds"] < 3_600 + EVERY * SAMPLE_S
