"""Reads from the pool's index in shared memory which chunks L1 holds now, without a message or a lock.

A chunk that is found may be evicted a moment later; only a lookup's lease keeps it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvstrata.client.copies import CopyLedger, Mapping, Pages
from kvstrata.client.identities import Identity, IdentityTable
from kvstrata.client.link import Link
from kvstrata.keys import ChunkHasher, spans
from kvstrata.keys.batch import count, part
from kvstrata.native.core import IndexReader, storage_keys
from kvstrata.patience import patience
from kvstrata.session.attach import Attachment
from kvstrata.types import KEY_BYTES

KEPT_CHAINS = 64
PEEK_HEARTBEAT_S = 0.9
"""Maximum age of the server's heartbeat for `present` to answer."""


class PoolView(msgspec.Struct, eq=False):
    """Reads the index of the attached pool. Any thread; `attached` is for the I/O thread only."""

    _link: Link
    _ledger: CopyLedger
    _identities: IdentityTable
    _pages: Pages | None
    """Prepares the pool's pages for copies; None in a process that copies nothing."""
    l1_bytes: int = 0
    """Size of the pool that was attached last."""
    _prepared_pool: bytes = b""
    _index: IndexReader | None = None
    _chains: OrderedDict[bytes, bytes] = msgspec.field(default_factory=OrderedDict)
    _chains_lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

    @property
    def has_l2(self) -> bool:
        """Whether the server has an L2, where a chunk that L1 lacks may be found."""
        index = self._index
        return index is not None and index.has_l2

    @property
    def has_promises(self) -> bool:
        """Whether any engine of the server promises chunks now, which a lookup may wait for."""
        index = self._index
        return index is not None and index.has_promises

    def peek(self, identity: Identity, chain: bytes | ChunkHasher) -> int:
        """See `CacheClient.peek`."""
        index, root = self._index, identity.root
        whole, windows = self._by_span()
        chain_keys = chain.chain if isinstance(chain, ChunkHasher) else chain
        if index is None or not (whole or windows) or not chain_keys:
            return 0
        n_chunks = self._leading(index, root, chain, whole) if whole else count(chain_keys)
        if not windows or not n_chunks:
            return n_chunks
        digests = b"".join(windows)
        return spans.peek_end(
            index,
            n_chunks,
            list(windows.values()),
            lambda first, end: storage_keys(root, part(chain_keys, first, end), digests),
        )

    def peek_whole(self, identity: Identity, chain: bytes | ChunkHasher) -> int:
        """Like `peek`, without the slices that a hit needs only at its end; 0 if all slices are such."""
        index, (whole, _) = self._index, self._by_span()
        return self._leading(index, identity.root, chain, whole) if index is not None and whole else 0

    def present(self, chunks: Sequence[tuple[bytes, bytes]]) -> list[bool] | None:
        """For each (identity root, chain key), whether L1 has the chunk now, in all slices; None while that is unknown.

        It is unknown while no server answers, and while the engine's slices are unknown.  Slices with a span
        (keys/spans.py) are ignored, unless all have one.
        """
        index = self._index
        whole, windows = self._by_span()
        slices = whole or tuple(windows)
        if (
            index is None
            or not slices
            or not self._link.usable
            or index.heartbeat_age_s > patience(PEEK_HEARTBEAT_S)
        ):
            return None
        digests = b"".join(slices)
        there = [index.peek(storage_keys(root, key, digests), len(slices)) == 1 for root, key in chunks]
        # `index.peek` returns 0 once the heartbeat is older than a second, so its age is checked again.
        return there if index.heartbeat_age_s <= patience(PEEK_HEARTBEAT_S) else None

    def attached(self, attachment: Attachment) -> None:
        """Map the pool of this attachment and open its epoch for copies. Raises SegmentError or OSError."""
        seen = attachment
        mapping = self._ledger.attached(
            seen.epoch,
            seen.pool_id,
            lambda: Mapping(
                seen.pool_id,
                seen.index_fd,
                seen.extents_fd,
                seen.extents_bytes,
                writable=self._pages is not None,
            ),
        )
        if self._link.closing:
            return
        self._index, self.l1_bytes = mapping.index, seen.extents_bytes
        if self._pages is not None and self._prepared_pool != seen.pool_id:
            self._prepared_pool = seen.pool_id
            self._pages.warm(mapping)

    def forget(self) -> None:
        """Answer as if no pool were attached. Any thread."""
        self._index = None

    def _by_span(self) -> tuple[tuple[bytes, ...], dict[bytes, int]]:
        """The slices that every chunk of a hit needs, and the spans of the others."""
        slices, each = self._identities.slices, self._identities.spans
        if not each:
            return slices, {}
        windows = {digest: span for digest, span in zip(slices, each, strict=True) if span}
        return tuple(digest for digest in slices if digest not in windows), windows

    def _leading(
        self, index: IndexReader, root: bytes, chain: bytes | ChunkHasher, slices: tuple[bytes, ...]
    ) -> int:
        """Number of leading chunks that are present in all of these slices."""
        if isinstance(chain, ChunkHasher):
            keys = chain.storage_keys(slices)
        else:
            keys = self._derived(root, chain, slices)
        return index.peek(keys, len(slices)) if keys else 0

    def _derived(self, root: bytes, chain: bytes, slices: tuple[bytes, ...]) -> bytes:
        """Storage keys of a chain, remembered by the chain's last key and length, which determine all of its keys."""
        name = chain[-KEY_BYTES:] + len(chain).to_bytes(8, "little")
        with self._chains_lock:
            keys = self._chains.get(name)
            if keys is None:
                keys = self._chains[name] = storage_keys(root, chain, b"".join(slices))
                if len(self._chains) > KEPT_CHAINS:
                    self._chains.popitem(last=False)
        return keys
