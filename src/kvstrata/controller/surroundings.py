"""The facts that the controller's process reports of itself in status, metrics and the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.controller.sockets import Sockets
from kvstrata.observability.numbers import Numbers
from kvstrata.process.keeper import Restarts

if TYPE_CHECKING:
    from kvstrata.controller.snapshot import Snapshots


class Surroundings(NamedTuple):
    """Facts and counts of one controller process."""

    sockets: Sockets
    http: Callable[[], Iterable[Numbers]]
    """The numbers of the HTTP port."""
    snapshots: Snapshots | None
    restarts: Restarts
    """Restarts of this process by its keeper."""
