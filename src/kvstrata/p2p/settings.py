"""The settings of the tier that reads other instances. The server makes them; no `l2_adapters` entry can hold them."""

from __future__ import annotations

import msgspec


class OwnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The time for which a failed owner is skipped."""

    open_s: float = 1.0
    max_open_s: float = 30.0
    max_owners: int = 1024
    """Maximum number of remembered owners."""


class PeerSettings(msgspec.Struct, frozen=True):
    """The settings of one tier."""

    controllers: tuple[str, ...]
    """Endpoints of the controllers' reply sockets."""
    engine: str
    """The engine that moves the bytes: `tcp` (owners send them), or the name of a transfer engine."""
    why: str = ""
    """The engine and the reason for its choice, for operators."""
    tcp: bool = False
    """Whether UCX may open tcp ports; see nixl.py for the risk."""
    this_host_only: bool = False
    """Whether peers reach this instance from its own host only, so that UCX needs no port open to other hosts."""
    curve_file: str = ""
    seal: bool = False
    """Whether the bytes that owners send are encrypted and authenticated."""
    lookup_timeout_ms: int = 250
    load_timeout_ms: int = 5_000
    remember_ms: int = 500
    """Time for which the directory's answer is reused if it names owners."""
    remember_none_ms: int = 200
    """Time for which the directory's answer is reused if it names no owner."""
    limits: OwnerLimits = OwnerLimits()
