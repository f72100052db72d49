"""The tier that reads other instances, as the server's commands and heartbeats use it."""

from __future__ import annotations

from kvstrata.tiers.set import TierSet


class PeerReads:
    """Finds the tier by its name. If peers are not read, `metadata` is empty."""

    def __init__(self, name: str, tiers: TierSet) -> None:
        """`name` of the tier, empty where peers are not read."""
        self._name = name
        self._tiers = tiers

    @property
    def name(self) -> str:
        """The tier's name; empty where peers are not read."""
        return self._name

    def loads(self) -> tuple[int, int]:
        """Records and bytes that were read from peers since the start."""
        tier = self._tiers.get(self._name)
        if tier is None:
            return 0, 0
        loads = tier.by_operation["load"]
        return loads.items["loaded"], loads.bytes

    def metadata(self) -> bytes:
        """The transfer engine's metadata, by which peers reach this L1; empty while no transfer engine is up."""
        tier = self._tiers.get(self._name)
        return b"" if tier is None or tier.peers is None else tier.peers.advertisement()
