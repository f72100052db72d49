"""What a worker has for one KV cache group: a client of its own, a mover of the group's blocks, and its slice."""

from __future__ import annotations

from kvstrata.client import CacheClient, Identity
from kvstrata.connectors.mover import Mover
from kvstrata.types import RequestIdentity

IDENTITIES_REMEMBERED = 1024


class GroupSide:
    """One group of a worker. The caller starts `client`; the worker's side closes it."""

    def __init__(self, client: CacheClient, mover: Mover, *, slice_digest: bytes, record_blocks: int) -> None:
        """`slice_digest` names the slice that this worker holds; a chunk's record holds `record_blocks` blocks."""
        self.client = client
        self.mover = mover
        self.slice_digest = slice_digest
        self.record_blocks = record_blocks
        self._identities: dict[RequestIdentity, Identity] = {}

    def identity(self, request: RequestIdentity) -> Identity:
        """The client's identity of such requests; the last IDENTITIES_REMEMBERED are kept."""
        identity = self._identities.get(request)
        if identity is None:
            while len(self._identities) >= IDENTITIES_REMEMBERED:
                del self._identities[next(iter(self._identities))]
            identity = self._identities[request] = self.client.identity(request)
        return identity
