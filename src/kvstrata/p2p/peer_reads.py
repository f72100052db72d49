"""The tier that reads other instances, as the server's commands and heartbeats use it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstrata.rpc.cluster_wire import Owner
from kvstrata.storage.peers import ReadsPeers
from kvstrata.tiers.set import TierSet


class PeerReads:
    """Finds the tier by its name.

    If peers are not read, or an admin has removed the tier, `prefer` does nothing and `metadata` is empty.
    """

    def __init__(self, name: str, tiers: TierSet) -> None:
        """`name` of the tier, empty where peers are not read."""
        self._name = name
        self._tiers = tiers

    @property
    def name(self) -> str:
        """The tier's name; empty where peers are not read."""
        return self._name

    def prefer(self, keys: Sequence[bytes], owner: Owner | None) -> None:
        """Ask this peer first for these chunks; None: ask the owners that the directory names, as before."""
        if (peers := self._peers()) is not None:
            peers.prefer(keys, b"" if owner is None else msgspec.msgpack.encode(owner))

    def scatter(self, tier: str, keys: Sequence[bytes]) -> None:
        """A lookup is about to ask this tier for these keys, of which each may be needed by itself."""
        if tier == self._name and (peers := self._peers()) is not None:
            peers.scatter(keys)

    def loads(self) -> tuple[int, int]:
        """Records and bytes that were read from peers since the start."""
        tier = self._tiers.get(self._name)
        if tier is None:
            return 0, 0
        loads = tier.by_operation["load"]
        return loads.items["loaded"], loads.bytes

    def metadata(self) -> bytes:
        """The transfer engine's metadata, by which peers reach this L1; empty while no transfer engine is up."""
        peers = self._peers()
        return b"" if peers is None else peers.advertisement()

    def _peers(self) -> ReadsPeers | None:
        tier = self._tiers.get(self._name)
        return None if tier is None else tier.peers
