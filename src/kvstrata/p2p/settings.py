"""The settings of the tier that reads other instances. The server makes them; no `l2_adapters` entry can hold them."""

from __future__ import annotations

import msgspec

from kvstrata.p2p.owners import OwnerLimits

LEASE_MS = 10_000


class PeerSettings(msgspec.Struct, frozen=True):
    """The settings of one tier."""

    controllers: tuple[str, ...]
    """Endpoints of the controllers' reply sockets."""
    engine: str
    """Name of the transfer engine."""
    tcp: bool = False
    """UCX may open tcp ports; see engines/ucx.py for what that allows to others."""
    this_host_only: bool = False
    """Peers reach this instance from its own host only, so UCX needs no port that other hosts reach."""
    curve_file: str = ""
    mac: bool = False
    """Only records with the owner's MAC are served (mac.py)."""
    lookup_timeout_ms: int = 250
    load_timeout_ms: int = 5_000
    lease_ms: int = LEASE_MS
    remember_ms: int = 500
    """How long the directory's answer is reused if it names owners."""
    remember_none_ms: int = 200
    """How long the directory's answer is reused if it says that nobody has the chunk."""
    """0: no bound."""
    limits: OwnerLimits = OwnerLimits()
