"""What a medium offers beyond the storage contract (base.py) if it reads other instances."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ReadsPeers(ABC):
    """A medium that reads other instances, or an adapter around such a medium. No call blocks."""

    @abstractmethod
    def advertisement(self) -> bytes:
        """Metadata by which other instances reach the memory that the medium has registered; empty if they cannot.

        Valid once `open` has returned; may change later.
        """
