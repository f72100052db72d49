"""A hold with two sides, the medium's and the codec's, each of which ends by itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.native.core import Hold


class SideHold:
    """A hold that is dropped when both the medium and the codec have finished with the bytes."""

    def __init__(self, hold: Hold) -> None:
        self.key, self.length, self.address = hold.key, hold.length, hold.address
        self.offset, self.generation = hold.offset, hold.generation
        self._hold: Hold | None = hold
        self._sides = {"medium", "codec"}
        self._lock = threading.Lock()

    def view(self) -> memoryview:
        """The bytes."""
        hold = self._hold
        if hold is None:
            raise ValueError("the hold was dropped")
        return hold.view()

    def drop(self) -> None:
        """End the medium's side. Idempotent; thread-safe."""
        self.end("medium")

    def end(self, side: str) -> None:
        """End one side; the end of the last side drops the hold."""
        with self._lock:
            self._sides.discard(side)
            hold = None if self._sides else self._hold
            if hold is not None:
                self._hold = None
        if hold is not None:
            hold.drop()
