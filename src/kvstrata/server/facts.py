"""What an instance tells clients, controllers and admins about itself. It does not change while the instance runs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MAX_SESSION_SHARE = 8
"""A session may have 1/8 of its pool reserved or quarantined."""


class InstanceFacts(NamedTuple):
    """Name, ports and age of one instance."""

    instance_id: str
    epoch: int
    """A number that changes with every start; every reply carries it."""
    port: int
    """The number after which sockets and pool are named; no tcp port."""
    http_port: int
    """0: no HTTP, or HTTP on a unix socket."""
    socket_dir: Path
    chunk_tokens: int
    max_reserved_bytes: int
    """Bytes of L1 that one session may have reserved at a time."""
    started_s: float
    """Time of the start, by the instance's clock."""
