"""The settings by which the server adds the tier that reads other instances; users do not write them as an entry."""

from __future__ import annotations

import msgspec

from kvstrata.p2p.owners import OwnerLimits


class PeerSettings(msgspec.Struct, frozen=True):
    """The settings of one tier."""

    controllers: tuple[str, ...]
    """Endpoints of the controllers' reply sockets."""
    engine: str
    """Name of the transfer engine."""
    curve_file: str = ""
    lookup_timeout_ms: int = 250
    load_timeout_ms: int = 5_000
    lease_ms: int = 10_000
    remember_ms: int = 500
    """How long the directory's answer with owners is used again."""
    remember_none_ms: int = 200
    """How long the directory's answer that nobody has a chunk is used again."""
    max_bytes_per_s: float = 0.0
    """0: no bound."""
    limits: OwnerLimits = OwnerLimits()
