"""Numbers of the whole cluster: the hits that instances report, and a point of the series every SAMPLE_S."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstrata.clock import Clock
from kvstrata.cluster.directory import Directory
from kvstrata.cluster.lookups import Lookups
from kvstrata.controller.history import SAMPLE_S, Point, Series
from kvstrata.controller.member import Member, MemberState, total_keys
from kvstrata.controller.members import Members
from kvstrata.controller.ranking import Ranking
from kvstrata.observability.numbers import Numbers, counter

SOURCES = frozenset({"l1", "l2", "peer", "miss"})
"""Words for what had a chunk. They become labels of metrics, so any other word of a member counts as OTHER."""
OTHER = "other"


class _Sampled(NamedTuple):
    """Totals at the previous point."""

    at_s: float
    hits: dict[str, int]
    event_keys: int
    listed_keys: int
    lookups: int


class Sampling(Numbers):
    """Counts hits and adds points to the series. Belongs to the event loop."""

    hits_total = counter(
        "Chunks that lookups at instances asked for, by the source that had them; or miss.",
        "source",
        name="hit_chunks",
    )

    def __init__(
        self, clock: Clock, members: Members, directory: Directory, lookups: Lookups, ranking: Ranking
    ) -> None:
        self._clock = clock
        self._members = members
        self._directory = directory
        self._lookups = lookups
        self._ranking = ranking
        self._hits: dict[int, dict[str, int]] = {}
        """Hits that members reported last, by group; a restarted process counts from 0 again."""
        self._last = _Sampled(clock.monotonic_s(), {}, 0, 0, 0)
        self.series = Series()

    def count_hits(self, member: Member) -> None:
        """Add the hits that the member's condition reports beyond its last one."""
        before, reported = self._hits.get(member.group, {}), _by_source(member.load.hits_total)
        for source, count in reported.items():
            gained = max(0, count - before[source]) if source in before else 0
            self.hits_total[source] += gained
        self._hits[member.group] = reported

    def forget(self, member: Member) -> None:
        """Drop the last report of a former member's hits."""
        self._hits.pop(member.group, None)

    def sample(self, now_s: float) -> None:
        """Add a point to the series, if one is due."""
        if now_s - self._last.at_s < SAMPLE_S:
            return
        before, directory = self._last, self._directory
        seconds = max(now_s - before.at_s, 0.001)
        known: dict[int, dict[str, int]] = {}
        for place, count in self._lookups.keys().items():
            known.setdefault(place.group, {})[place.tier] = count
        keys = total_keys((one for one in self._members if one.state is not MemberState.DEAD), known)
        used: dict[str, int] = {}
        for member in self._members:
            if member.state is MemberState.LIVE:
                for tier, n_bytes in member.load.used_bytes.items():
                    used[tier] = used.get(tier, 0) + n_bytes
        states = [member.state for member in self._members]
        self._last = now = _Sampled(
            now_s,
            dict(self.hits_total),
            directory.admitted_keys + directory.evicted_keys,
            directory.listed_keys,
            sum(self._ranking.seconds.counts),
        )
        self.series.add(
            Point(
                unix_ms=self._clock.unix_ms(),
                live=states.count(MemberState.LIVE),
                dead=states.count(MemberState.DEAD),
                keys=keys,
                used_bytes=used,
                hits_per_s={
                    source: (count - before.hits.get(source, 0)) / seconds
                    for source, count in now.hits.items()
                },
                event_keys_per_s=(now.event_keys - before.event_keys) / seconds,
                listed_keys_per_s=(now.listed_keys - before.listed_keys) / seconds,
                lookups_per_s=(now.lookups - before.lookups) / seconds,
                directory_bytes=directory.usage().bytes,
            )
        )


def _by_source(reported: Mapping[str, int]) -> dict[str, int]:
    """The counts by the words of SOURCES, and those by all other words together."""
    counts: dict[str, int] = {}
    for word, count in reported.items():
        source = word if word in SOURCES else OTHER
        counts[source] = counts.get(source, 0) + count
    return counts
