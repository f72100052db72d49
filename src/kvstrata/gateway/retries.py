"""The budget of retries: what they may add to the load of engines that already fail."""

from __future__ import annotations

AT_ONCE = 10.0
"""Retries that a gateway may make at once however few requests it has had."""


class RetryBudget:
    """Each request adds `share` of a retry, up to AT_ONCE; each retry takes one."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._left = AT_ONCE

    @property
    def left(self) -> float:
        """Retries that may be made now."""
        return self._left

    def request(self) -> None:
        """A request has come."""
        self._left = min(AT_ONCE, self._left + self.share)

    def take(self) -> bool:
        """Take one retry; False if none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
