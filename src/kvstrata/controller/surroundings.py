"""The facts that the controller's process reports of itself in status, metrics and the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvstrata.observability.metrics import Histogram
from kvstrata.process.keeper import Restarts


class Surroundings(NamedTuple):
    """Facts and counts of one controller process."""

    ports: Mapping[str, int]
    """Ports of the sockets for instances, by name."""
    sockets: Callable[[], dict[str, dict[str, int]]]
    """Counts of these sockets."""
    http: Callable[[], dict[str, int]]
    """Counts of the HTTP port."""
    snapshot: Mapping[str, Any]
    """State of the snapshot; empty without one."""
    snapshot_times: Histogram | None
    """Durations of its writes; None without one."""
    restarts: Restarts
    """Restarts of this process by its keeper."""
