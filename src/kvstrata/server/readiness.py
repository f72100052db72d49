"""Whether the instance serves requests, and whether it takes new chunks."""

from __future__ import annotations


class Readiness:
    """Whether the instance is ready: first `starting`, then ready, then `stopping`."""

    def __init__(self) -> None:
        self._why_not = "starting"

    def set(self, why_not: str = "") -> None:
        """Set the reason why the instance is not ready; empty: it is."""
        self._why_not = why_not

    def __call__(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        return not self._why_not, self._why_not

    @property
    def ready(self) -> bool:
        return not self._why_not

    @property
    def stopping(self) -> bool:
        """Whether the instance is about to end: it takes no new processes."""
        return self._why_not == "stopping"


class StoreFreeze:
    """Refuses every reserve as FROZEN while a controller's full sync needs L1 to stand still.

    server/cluster/sync.py freezes and thaws, and bounds the time of a freeze.
    """

    def __init__(self) -> None:
        self._by: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._by)

    def freeze(self, controller: str) -> None:
        """Refuse reserves until `thaw`. Idempotent."""
        self._by.add(controller)

    def thaw(self, controller: str) -> None:
        """End this controller's freeze. Idempotent."""
        self._by.discard(controller)
