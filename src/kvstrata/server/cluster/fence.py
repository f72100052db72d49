"""Which controller leads, as far as this instance knows."""

from __future__ import annotations


class Fence:
    """The latest leadership that any controller has shown. All links of an instance share one fence."""

    def __init__(self) -> None:
        self.seen = (0, 0)
        """(cluster id, token); the greatest is the latest."""

    def admits(self, cluster_id: int, token: int) -> bool:
        """Whether a command with this cluster id and token comes from the latest known leader; notes a later one."""
        self.seen = max(self.seen, (cluster_id, token))
        return (cluster_id, token) == self.seen
