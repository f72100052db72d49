"""Whether the instance serves requests."""

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
