"""The controller's numbers as Prometheus metrics.

The one label whose values are not in the code is the instance; these are bounded by `max_instances`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.members import MemberState
from kvstrata.observability.metrics import Family, metric_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTROLLER_FAMILIES: dict[str, Family] = {
    "kvstrata_controller_instances": Family("gauge", ("state",), "Instances by state: live, dead, restored."),
    "kvstrata_controller_instance_up": Family("gauge", ("instance",), "1 while an instance lives, else 0."),
    "kvstrata_controller_instance_confirmed": Family(
        "gauge", ("instance",), "1 while what is known of an instance's chunks is exact, else 0."
    ),
    "kvstrata_controller_keys": Family(
        "gauge", ("instance", "tier"), "Chunks (records) that the directory knows."
    ),
    "kvstrata_controller_used_bytes": Family(
        "gauge", ("instance", "tier"), "Bytes in use, as the instance told."
    ),
    "kvstrata_controller_hit_chunks": Family(
        "counter", ("source",), "Chunks that lookups of instances found, by source; and miss."
    ),
    "kvstrata_controller_admitted_keys": Family("counter", (), "Placements that events added."),
    "kvstrata_controller_evicted_keys": Family("counter", (), "Placements that events removed."),
    "kvstrata_controller_synced_keys": Family("counter", (), "Placements that full syncs told."),
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
    "kvstrata_controller_received_frames": Family("counter", ("socket",), "Frames received."),
    "kvstrata_controller_bad_frames": Family(
        "counter", ("socket",), "Frames that were no message of their socket."
    ),
    "kvstrata_controller_dropped_replies": Family("counter", ("socket",), "Answers that found no receiver."),
    "kvstrata_controller_refused_handshakes": Family(
        "counter", ("socket",), "Connections that broke off before they had shown the right keys."
    ),
    "kvstrata_controller_leads": Family("gauge", (), "1 while this controller leads, else 0."),
    "kvstrata_controller_no_leader_seconds": Family(
        "gauge", (), "For how long this controller has known of no leader; 0 while it knows of one."
    ),
    "kvstrata_controller_election_failures": Family(
        "counter", (), "Steps of the election that failed: etcd did not answer, or refused."
    ),
    "kvstrata_controller_restarts": Family(
        "gauge", (), "Times that its keeper has started the controller again because it died."
    ),
    "kvstrata_controller_http_port": Family(
        "gauge",
        ("count",),
        "Of the HTTP port: connections and requests now; since the start requests refused because too many were under "
        "way, and connections closed as idle, late (a request took too long to arrive) and stalled (the client did not "
        "read its answer).",
    ),
    "kvstrata_controller_connections": Family("gauge", ("socket",), "Connections now."),
    "kvstrata_controller_cut_connections": Family(
        "counter", ("socket",), "Connections cut: one too many, or more sent than may wait."
    ),
    "kvstrata_controller_directory_bytes": Family("gauge", (), "Memory of the directory's placements."),
    "kvstrata_controller_directory_placements": Family(
        "gauge", (), "Placements in it, those not yet swept included."
    ),
    "kvstrata_controller_waiting_bytes": Family("gauge", (), "Changes of the directory that wait."),
    "kvstrata_controller_snapshot_age_seconds": Family(
        "gauge", (), "Since the last snapshot was written; absent before the first."
    ),
    "kvstrata_controller_snapshot_failures": Family("counter", (), "Snapshots that could not be written."),
    "kvstrata_controller_snapshots_ignored": Family(
        "counter", (), "Snapshots that were not served after the start."
    ),
}
"""By name."""


class ControllerCollector:
    """Registered with a CollectorRegistry; asks the cluster at each scrape."""

    def __init__(self, cluster: Cluster, sockets: Callable[[], dict[str, dict[str, int]]]) -> None:
        self._cluster = cluster
        self._sockets = sockets

    def collect(self) -> Iterable[Metric]:
        """All metric families now."""
        for name, values in self._values():
            yield metric_of(name, CONTROLLER_FAMILIES[name], values)

    def _values(self) -> Iterator[tuple[str, list[tuple[list[str], Any]]]]:
        cluster, directory, usage = self._cluster, self._cluster.directory, self._cluster.directory.usage()
        members = list(cluster.members)
        by_group = {member.group: member.id for member in members}
        states = [member.state for member in members]
        sockets = self._sockets()
        prefix = "kvstrata_controller_"

        def words(counts: dict[str, int]) -> list[tuple[list[str], Any]]:
            return [([word], count) for word, count in sorted(counts.items())]

        yield prefix + "instances", [([state.value], states.count(state)) for state in MemberState]
        yield prefix + "instance_up", [([one.id], float(one.state is MemberState.LIVE)) for one in members]
        yield prefix + "instance_confirmed", [([one.id], float(one.confirmed)) for one in members]
        yield (
            prefix + "keys",
            [
                ([by_group[place.group], place.tier], count)
                for place, count in directory.keys().items()
                if place.group in by_group
            ],
        )
        yield (
            prefix + "used_bytes",
            [([one.id, tier], n_bytes) for one in members for tier, n_bytes in one.load.used_bytes.items()],
        )
        yield prefix + "hit_chunks", words(cluster.hits_total)
        yield prefix + "admitted_keys", [([], directory.admitted_keys)]
        yield prefix + "evicted_keys", [([], directory.evicted_keys)]
        yield prefix + "synced_keys", [([], cluster.sync_keys)]
        yield prefix + "dropped_batches", words(cluster.members.dropped)
        yield prefix + "refused_requests", words(cluster.denied)
        yield prefix + "lookup_seconds", [([], cluster.lookup)]
        yield prefix + "lookup_hits", [([], cluster.lookup_hits)]
        yield prefix + "received_frames", [([name], one["received"]) for name, one in sockets.items()]
        yield prefix + "bad_frames", [([name], one["bad_frames"]) for name, one in sockets.items()]
        yield prefix + "dropped_replies", [([name], one["dropped_replies"]) for name, one in sockets.items()]
        yield (
            prefix + "refused_handshakes",
            [([name], one["refused_handshakes"]) for name, one in sockets.items()],
        )
        election = cluster.election
        yield prefix + "leads", [([], float(cluster.token is not None))]
        yield prefix + "no_leader_seconds", [([], election.no_leader_s if election else 0.0)]
        yield prefix + "election_failures", [([], election.failures if election else 0)]
        yield prefix + "http_port", words(cluster.http_stats())
        yield prefix + "restarts", [([], cluster.restarts.times)]
        yield prefix + "connections", [([name], one["connections"]) for name, one in sockets.items()]
        yield prefix + "cut_connections", [([name], one["cut_connections"]) for name, one in sockets.items()]
        yield prefix + "directory_bytes", [([], usage.bytes)]
        yield prefix + "directory_placements", [([], usage.placements)]
        yield prefix + "waiting_bytes", [([], directory.waiting_bytes)]
        snapshot = cluster.snapshot
        if snapshot.get("written_unix_ms"):
            age_s = (cluster.clock.unix_ms() - snapshot["written_unix_ms"]) / 1000
            yield prefix + "snapshot_age_seconds", [([], max(0.0, age_s))]
        yield prefix + "snapshot_failures", [([], snapshot.get("failed_writes", 0))]
        yield prefix + "snapshots_ignored", [([], snapshot.get("ignored", 0))]
