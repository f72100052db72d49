"""The settings of the tier that reads other instances. The server makes them; no `l2_adapters` entry can hold them."""

from __future__ import annotations

import msgspec


class OwnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long an owner that failed is skipped."""

    open_s: float = 1.0
    max_open_s: float = 30.0
    max_owners: int = 1024
    """Maximum number of owners that are remembered."""


class PeerSettings(msgspec.Struct, frozen=True):
    """The settings of one tier."""

    controllers: tuple[str, ...]
    """Endpoints of the controllers' reply sockets."""
    engine: str
    """What moves the bytes: `tcp` (owners send them), or the name of a transfer engine."""
    why: str = ""
    """The engine and why it is this one, for operators."""
    tcp: bool = False
    """UCX may open tcp ports; see nixl.py for what that allows to others."""
    this_host_only: bool = False
    """Peers reach this instance from its own host only, so UCX needs no port that other hosts reach."""
    curve_file: str = ""
    seal: bool = False
    """What owners send is encrypted and authenticated."""
    lookup_timeout_ms: int = 250
    load_timeout_ms: int = 5_000
    remember_ms: int = 500
    """How long the directory's answer is reused if it names owners."""
    remember_none_ms: int = 200
    """How long the directory's answer is reused if it says that nobody has the chunk."""
    limits: OwnerLimits = OwnerLimits()
