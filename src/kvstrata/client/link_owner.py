"""What a link to the server (link.py) asks of the client that it belongs to."""

from __future__ import annotations

from typing import Protocol

from kvstrata.memory.attach.client import Attachment
from kvstrata.rpc import attach_wire, wire
from kvstrata.rpc.ping_wire import DeviceCopies, LoadRate


class LinkOwner(Protocol):
    """The methods that the link calls, in the I/O thread unless a method says otherwise."""

    def attach_request(self, old_epoch: int) -> attach_wire.AttachRequest:
        """The request to attach with. Called in the attaching thread. Raises ConfigError for a bad token file."""

    def link_attached(self, attachment: Attachment, old_epoch: int) -> None:
        """Map the pool, before any message. May raise KvstrataError or OSError, which ends this attachment.

        If the epoch is not `old_epoch`, requests under way to the old server fail right afterwards.
        """

    def link_ready(self, attachment: Attachment, old_epoch: int) -> None:
        """Requests may go out from now on. If the epoch is `old_epoch`, the server knows this process from before."""

    def link_silent(self) -> None:
        """The server is silent or lost, and nothing may wait for it. ASK requests have failed already."""

    def link_orphaned(self, leases: list[tuple[bytes, int]]) -> None:
        """The process whose lookups these leases come from has ended: end this process's shares of them."""

    def link_revoked(self, lookups: list[int]) -> None:
        """The server wants back the leases of these lookups of ours."""

    def device_copies(self) -> DeviceCopies | None:
        """What to tell the server about copies to and from a device; None where blocks are in host memory."""

    def load_rate(self) -> LoadRate | None:
        """How fast this process loads; None until that is known."""

    def untold_misses(self) -> list[wire.Miss]:
        """What the next ping tells of misses that were answered without the server, at most `wire.MAX_MISSES`."""

    def misses_told(self, count: int) -> None:
        """The first `count` of these were sent."""

    def link_due_s(self) -> float:
        """When `link_pass` has something to do, even if nothing is received."""

    def link_pass(self, now_s: float) -> None:
        """Called once per pass of the loop, after all received messages were handled."""

    def link_died(self) -> None:
        """The I/O thread ends because of a bug: finish every call that a caller waits for."""
