"""The controller's metrics: those that are read from its state, and a list of the parts with counters of their own.

The values of all labels are fixed in the code, except names of instances, which MAX_INSTANCES bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.member import SHOWN_STATES, MemberState
from kvstrata.observability.logging import LogNumbers
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.process.keeper import Restarts
from kvstrata.process.lifecycle import ProcessNumbers
from kvstrata.rpc.control_port import ControlPort

if TYPE_CHECKING:
    from kvstrata.controller.snapshot import Snapshots

PREFIX = "controller"


class Surroundings(NamedTuple):
    """Facts and counts of one controller process."""

    port: ControlPort
    port_number: int
    http: Callable[[], Iterable[Numbers]]
    """The numbers of the HTTP port."""
    snapshots: Snapshots | None
    restarts: Restarts
    """Restarts of this process by its keeper."""


class ClusterNumbers(Numbers):
    """What the controller knows of its members, its directory and its election."""

    instances = gauge(
        "Instances by state: live, dead, restored.",
        lambda self: {state.value: self._count(state) for state in SHOWN_STATES},
        "state",
    )
    instance_up = gauge(
        "1 while an instance is live, else 0.",
        lambda self: {one.id: one.state is MemberState.LIVE for one in self._cluster.members},
        "instance",
    )
    instance_confirmed = gauge(
        "1 while the controller's knowledge of an instance's chunks is exact, else 0.",
        lambda self: {one.id: one.confirmed for one in self._cluster.members},
        "instance",
    )
    keys = gauge("Chunks (records) that the directory knows.", lambda self: self._keys(), "instance", "tier")
    used_bytes = gauge(
        "Bytes in use, as the instance reports them.",
        lambda self: {
            (one.id, tier): n_bytes
            for one in self._cluster.members
            for tier, n_bytes in one.condition.load.used_bytes.items()
        },
        "instance",
        "tier",
    )
    leads = gauge(
        "1 while this controller leads, else 0.", lambda self: self._cluster.leadership.token is not None
    )
    no_leader_seconds = gauge(
        "Time since this controller last knew of a leader; 0 while it knows of one.",
        lambda self: self._election.no_leader_s if self._election else 0.0,
    )
    election_failures = counter(
        "Failed steps of the election: etcd did not answer or refused.",
        read=lambda self: self._election.failures if self._election else 0,
    )
    directory_bytes = gauge(
        "Memory of the directory's placements.", lambda self: self._cluster.directory.usage().bytes
    )
    directory_placements = gauge(
        "Placements in the directory, including retired ones that are not yet swept.",
        lambda self: self._cluster.directory.usage().placements,
    )

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._election = cluster.leadership.election

    def _count(self, state: MemberState) -> int:
        return sum(one.state is state for one in self._cluster.members)

    def _keys(self) -> dict[tuple[str, str], int]:
        by_group = {one.group: one.id for one in self._cluster.members}
        return {
            (by_group[place.group], place.tier): count
            for place, count in self._cluster.lookups.keys().items()
            if place.group in by_group
        }


def sections(cluster: Cluster, around: Surroundings) -> Iterator[tuple[str, Numbers]]:
    """All parts of a controller that have numbers, each with its prefix."""
    of_cluster = (cluster.directory, cluster.ranking, cluster.gateways, cluster.copies)
    parts = (
        ClusterNumbers(cluster),
        *of_cluster,
        cluster,
        *around.port.numbers(),
        ProcessNumbers(around.restarts),
    )
    yield from ((PREFIX, part) for part in parts)
    if around.snapshots is not None:
        yield PREFIX, around.snapshots
    yield from ((f"{PREFIX}_http", part) for part in around.http())
    yield f"{PREFIX}_log", LogNumbers()
