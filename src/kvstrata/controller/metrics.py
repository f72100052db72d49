"""The controller's numbers as Prometheus metrics.

All values of labels are in the code, except names of instances, which MAX_INSTANCES bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.member import SHOWN_STATES, MemberState
from kvstrata.controller.surroundings import Surroundings
from kvstrata.observability.exposition import Values, metric_of
from kvstrata.observability.families import Family
from kvstrata.observability.logging import log_stats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTROLLER_FAMILIES: dict[str, Family] = {
    "kvstrata_controller_instances": Family("gauge", ("state",), "Instances by state: live, dead, restored."),
    "kvstrata_controller_instance_up": Family("gauge", ("instance",), "1 while an instance lives, else 0."),
    "kvstrata_controller_instance_confirmed": Family(
        "gauge", ("instance",), "1 while the controller's knowledge of an instance's chunks is exact, else 0."
    ),
    "kvstrata_controller_keys": Family(
        "gauge", ("instance", "tier"), "Chunks (records) that the directory knows."
    ),
    "kvstrata_controller_used_bytes": Family(
        "gauge", ("instance", "tier"), "Bytes in use, as the instance reports them."
    ),
    "kvstrata_controller_hit_chunks": Family(
        "counter",
        ("source",),
        "Chunks that lookups at instances asked for, by the source that had them; or miss.",
    ),
    "kvstrata_controller_admitted_keys": Family("counter", (), "Placements that events added."),
    "kvstrata_controller_evicted_keys": Family("counter", (), "Placements that events removed."),
    "kvstrata_controller_synced_keys": Family("counter", (), "Placements that full syncs added."),
    "kvstrata_controller_dropped_batches": Family(
        "counter", ("reason",), "Batches of events that were not applied."
    ),
    "kvstrata_controller_refused_requests": Family(
        "counter", ("code",), "Requests of instances that were refused."
    ),
    "kvstrata_controller_lookup_seconds": Family(
        "histogram", (), "Time from an instance's question to its answer."
    ),
    "kvstrata_controller_lookup_hits": Family("counter", (), "Such questions that found an owner."),
    "kvstrata_controller_gateways": Family("gauge", (), "Gateways that were heard in the last ten minutes."),
    "kvstrata_controller_holdings_seconds": Family(
        "histogram", (), "Time from a gateway's question about a prompt to its answer."
    ),
    "kvstrata_controller_received_frames": Family("counter", ("socket",), "Frames received."),
    "kvstrata_controller_bad_frames": Family("counter", ("socket",), "Invalid frames."),
    "kvstrata_controller_dropped_replies": Family(
        "counter", ("socket",), "Answers that could not be sent to their receiver."
    ),
    "kvstrata_controller_refused_handshakes": Family(
        "counter", ("socket",), "Connections that ended before they showed the right keys."
    ),
    "kvstrata_controller_leads": Family("gauge", (), "1 while this controller leads, else 0."),
    "kvstrata_controller_no_leader_seconds": Family(
        "gauge", (), "Time since this controller last knew of a leader; 0 while it knows of one."
    ),
    "kvstrata_controller_election_failures": Family(
        "counter", (), "Steps of the election that failed: etcd did not answer, or refused."
    ),
    "kvstrata_controller_restarts": Family(
        "counter", (), "Restarts of the controller by its keeper, after it died."
    ),
    "kvstrata_controller_log_lines_dropped": Family(
        "counter",
        (),
        "Log lines dropped because the reader of the log had stopped reading or was gone.",
    ),
    "kvstrata_controller_http_connections": Family("gauge", (), "Open connections of the HTTP port."),
    "kvstrata_controller_http_requests": Family("gauge", (), "Requests in progress on the HTTP port."),
    "kvstrata_controller_http_refused_requests": Family(
        "counter", (), "Requests answered with 503 because too many were under way."
    ),
    "kvstrata_controller_http_closed_connections": Family(
        "counter",
        ("reason",),
        "Connections closed by the HTTP port: idle (to make room for new ones, the longest idle first), late (a "
        "request took too long to arrive), stalled (the client did not read its answer), stranger (a process of "
        "another user, on a unix socket).",
    ),
    "kvstrata_controller_connections": Family("gauge", ("socket",), "Connections now."),
    "kvstrata_controller_cut_connections": Family(
        "counter",
        ("socket",),
        "Connections cut, because too many were open, or too many of their messages waited.",
    ),
    "kvstrata_controller_directory_bytes": Family("gauge", (), "Memory of the directory's placements."),
    "kvstrata_controller_directory_placements": Family(
        "gauge", (), "Placements in the directory, including retired ones that are not yet swept."
    ),
    "kvstrata_controller_waiting_bytes": Family("gauge", (), "Bytes of changes that wait for the directory."),
    "kvstrata_controller_snapshot_age_seconds": Family(
        "gauge", (), "Time since the last snapshot was written; absent before the first."
    ),
    "kvstrata_controller_snapshot_seconds": Family("histogram", (), "Time that writing a snapshot took."),
    "kvstrata_controller_snapshot_failures": Family("counter", (), "Snapshots that could not be written."),
    "kvstrata_controller_snapshots_ignored": Family(
        "counter", (), "Snapshots that could not be served after the start."
    ),
}
"""By name."""


class ControllerCollector:
    """A collector for a CollectorRegistry, which asks the cluster at each scrape."""

    def __init__(self, cluster: Cluster, around: Surroundings) -> None:
        self._cluster = cluster
        self._around = around

    def collect(self) -> Iterable[Metric]:
        """All metric families with their present values."""
        for name, values in self._values():
            yield metric_of(name, CONTROLLER_FAMILIES[name], values)

    def _values(self) -> Iterator[tuple[str, Values]]:
        cluster, directory, usage = self._cluster, self._cluster.directory, self._cluster.directory.usage()
        members = list(cluster.members)
        by_group = {member.group: member.id for member in members}
        states = [member.state for member in members]
        around = self._around
        sockets = around.sockets()
        prefix = "kvstrata_controller_"

        yield prefix + "instances", [([state.value], states.count(state)) for state in SHOWN_STATES]
        yield prefix + "instance_up", [([one.id], float(one.state is MemberState.LIVE)) for one in members]
        yield prefix + "instance_confirmed", [([one.id], float(one.confirmed)) for one in members]
        yield (
            prefix + "keys",
            [
                ([by_group[place.group], place.tier], count)
                for place, count in cluster.lookups.keys().items()
                if place.group in by_group
            ],
        )
        yield (
            prefix + "used_bytes",
            [([one.id, tier], n_bytes) for one in members for tier, n_bytes in one.load.used_bytes.items()],
        )
        yield prefix + "hit_chunks", _by_word(cluster.sampling.hits_total)
        yield prefix + "admitted_keys", [([], directory.admitted_keys)]
        yield prefix + "evicted_keys", [([], directory.evicted_keys)]
        yield prefix + "synced_keys", [([], directory.synced_keys)]
        yield prefix + "dropped_batches", _by_word(cluster.syncs.dropped)
        yield prefix + "refused_requests", _by_word(cluster.denied)
        yield prefix + "lookup_seconds", [([], cluster.ranking.seconds)]
        yield prefix + "lookup_hits", [([], cluster.ranking.hits)]
        yield prefix + "gateways", [([], float(len(list(cluster.gateways))))]
        yield prefix + "holdings_seconds", [([], cluster.gateways.seconds)]
        yield prefix + "received_frames", [([name], one["received"]) for name, one in sockets.items()]
        yield prefix + "bad_frames", [([name], one["bad_frames"]) for name, one in sockets.items()]
        yield prefix + "dropped_replies", [([name], one["dropped_replies"]) for name, one in sockets.items()]
        yield (
            prefix + "refused_handshakes",
            [([name], one["refused_handshakes"]) for name, one in sockets.items()],
        )
        election = cluster.leadership.election
        yield prefix + "leads", [([], float(cluster.leadership.token is not None))]
        yield prefix + "no_leader_seconds", [([], election.no_leader_s if election else 0.0)]
        yield prefix + "election_failures", [([], election.failures if election else 0)]
        http = around.http()
        yield prefix + "http_connections", [([], http.get("connections", 0))]
        yield prefix + "http_requests", [([], http.get("requests", 0))]
        yield prefix + "http_refused_requests", [([], http.get("refused", 0))]
        closed = {name: count for name, count in http.items() if name.startswith("closed_")}
        yield prefix + "http_closed_connections", _by_word(closed, "closed_")
        yield prefix + "restarts", [([], around.restarts.times)]
        yield prefix + "log_lines_dropped", [([], log_stats()["dropped_lines"])]
        yield prefix + "connections", [([name], one["connections"]) for name, one in sockets.items()]
        yield prefix + "cut_connections", [([name], one["cut_connections"]) for name, one in sockets.items()]
        yield prefix + "directory_bytes", [([], usage.bytes)]
        yield prefix + "directory_placements", [([], usage.placements)]
        yield prefix + "waiting_bytes", [([], directory.waiting_bytes)]
        snapshot = around.snapshot
        if snapshot.get("written_unix_ms"):
            age_s = (cluster.clock.unix_ms() - snapshot["written_unix_ms"]) / 1000
            yield prefix + "snapshot_age_seconds", [([], max(0.0, age_s))]
        if around.snapshot_times is not None:
            yield prefix + "snapshot_seconds", [([], around.snapshot_times)]
        yield prefix + "snapshot_failures", [([], snapshot.get("failed_writes", 0))]
        yield prefix + "snapshots_ignored", [([], snapshot.get("ignored", 0))]


def _by_word(counts: Mapping[str, int], prefix: str = "") -> Values:
    """A sample for each word, without the prefix."""
    return [([word.removeprefix(prefix)], count) for word, count in sorted(counts.items())]
