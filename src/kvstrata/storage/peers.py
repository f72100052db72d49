"""Calls beyond the storage contract (base.py), which a medium offers if it reads other instances.

The layers between that medium and the server pass these bytes on without understanding them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class ReadsPeers(ABC):
    """A medium that reads other instances, or an adapter that passes calls on to such a medium. No call blocks."""

    @abstractmethod
    def advertisement(self) -> bytes:
        """Metadata by which other instances reach the memory that the medium has registered; empty if they cannot.

        Valid once `open` has returned; may change later.
        """

    @abstractmethod
    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """Read these keys from `source` first, until a call with the same keys and an empty source.

        Only the medium understands `source`.
        """

    @abstractmethod
    def scatter(self, keys: Sequence[bytes]) -> None:
        """Answer for each of these keys by itself, since a hit may need it without those before it.

        Called before `exists` of such keys.  Of other keys only a leading part is useful.
        """
