"""The medium of the tier that reads other instances. Only the server adds this tier; an `l2_adapters` entry cannot."""

from __future__ import annotations

import functools
import os
from typing import Any

from kvstrata.p2p.settings import PeerSettings
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.config import CommonFields, Make, Medium, TierConfig
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.structs import Place

TYPE = "peer"
"""The tier's type in names, metrics and status, such as `peer-3`."""


def peer_tier(settings: PeerSettings, number: int) -> TierConfig:
    """The tier's configuration. Its `number` follows those of all `l2_adapters`. Nothing is opened."""
    name, place = f"{TYPE}-{number}", Place("p2p")
    return TierConfig(
        name=name,
        make=_prepare(settings, place, name),
        medium=f"{__name__}:MEDIUM",
        fields=settings,
        place=place,
        entry=_shown(settings),
        # The tier has its own, shorter deadlines; this one only guards against a mistake in the tier.
        common=CommonFields(
            type=TYPE, deadline_ms=2 * max(settings.lookup_timeout_ms, settings.load_timeout_ms) + 2_000
        ),
        # A read by NIXL may hang forever, and only the end of NIXL's process stops it.
        isolated=settings.engine == "nixl",
    )


def _shown(settings: PeerSettings) -> dict[str, Any]:
    """The tier's entry, for admins."""
    return {
        "type": TYPE,
        "controller": ",".join(settings.controllers),
        "engine": settings.engine,
        "isolation": "process" if settings.engine == "nixl" else "in_process",
        "lookup_timeout_ms": settings.lookup_timeout_ms,
        "load_timeout_ms": settings.load_timeout_ms,
        "seal": settings.seal,
        **({"curve_file": settings.curve_file} if settings.curve_file else {}),
    }


def _prepare(settings: PeerSettings, place: Place, name: str) -> Make:
    def make() -> StorageAdapter:
        from kvstrata.p2p.tier import PeerTier

        if settings.engine == "tcp":
            return PeerTier(settings, name=name)
        from kvstrata.p2p.nixl import NixlEngine, ucx_settings

        ucx = ucx_settings(os.environ, tcp=settings.tcp, this_host_only=settings.this_host_only)
        return PeerTier(settings, functools.partial(NixlEngine, ucx), name=name)

    return make


def _by_the_server() -> str:
    return "the server adds this tier itself if controller.url is set and p2p.engine is not off"


MEDIUM = Medium(PeerSettings, _prepare, refusal=_by_the_server)


class PeerReads:
    """The interface of the peer tier for the server's commands and heartbeats, which find the tier by its name."""

    def __init__(self, name: str, tiers: TierSet) -> None:
        """`name` of the tier, empty if peers are not read."""
        self._name = name
        self._tiers = tiers

    @property
    def name(self) -> str:
        """The tier's name; empty if peers are not read."""
        return self._name

    def loads(self) -> tuple[int, int]:
        """Numbers of records and bytes read from peers since the start."""
        tier = self._tiers.get(self._name)
        if tier is None:
            return 0, 0
        loads = tier.by_operation["load"]
        return loads.items["loaded"], loads.bytes

    def metadata(self) -> bytes:
        """The transfer engine's metadata, by which peers reach this L1; empty while none is up, and without one."""
        tier = self._tiers.get(self._name)
        return b"" if tier is None or tier.peers is None else tier.peers.advertisement()
