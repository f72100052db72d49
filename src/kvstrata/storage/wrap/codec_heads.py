"""Reads the headers of stored records: the records' lengths in L1, and whether they can be decoded here.

The medium is asked for a record's headers once; the answer is remembered together with the record's stored length.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from kvstrata.policy.reasons import CORRUPT, NO_HEAD, UNAUTHENTICATED
from kvstrata.storage.base import Found, Presence, StorageAdapter
from kvstrata.storage.wrap.codec_chain import Chain
from kvstrata.storage.wrap.codec_lengths import KnownLengths, Lengths, Undecodable, read_head

MOST_PLAIN_LENGTHS = 1024
"""Most lengths of plain records that are remembered; beyond them, the headers of each record are read."""
_STORED_BYTES = operator.itemgetter(Found._fields.index("record_bytes"))
NO_PROOF = "written without a key, so anybody who can write to this storage may have made it"


class Heads:
    """Reads the headers of one adapter's records. Belongs to the event loop."""

    def __init__(
        self, inner: StorageAdapter, chain: Chain, lengths: KnownLengths, undecodable: Undecodable
    ) -> None:
        """Shares `lengths` and `undecodable` with the wrapper."""
        self._inner = inner
        self._chain = chain
        self._lengths = lengths
        self._undecodable = undecodable
        self._plain_lengths: set[int] = set()
        """Stored lengths for which one record was seen to be plain, that is, stored as it is in L1."""

    async def shows_codecs(self, keys: Sequence[bytes], found: Sequence[Found]) -> bool:
        """Whether some of the records may be encoded, so that all their headers must be read.

        One record of each new length shows whether records of that length are encoded.
        """
        others = {*map(_STORED_BYTES, found)} - self._plain_lengths - {0}  # 0: not present
        if not others or not self._inner.capabilities.has_heads:
            return False
        new: dict[int, bytes] = {}
        for key, (_, stored_bytes, _) in zip(keys, found, strict=True):
            if stored_bytes in others:
                new.setdefault(stored_bytes, key)
        if len(self._plain_lengths) + len(new) > MOST_PLAIN_LENGTHS:
            return True
        heads = await self._inner.heads(list(new.values()))
        for (stored_bytes, key), head in zip(new.items(), heads, strict=True):
            known = read_head(key, bytes(head), stored_bytes)
            if known is not None and known.codecs:
                return True
            if known is not None:
                self._plain_lengths.add(stored_bytes)
        return False

    async def look_up(
        self, keys: Sequence[bytes], found: Sequence[Found], *, ask: bool
    ) -> list[Lengths | None]:
        """The lengths of the found records. None for a record that is absent, or whose headers are not asked for.

        `cannot` is CORRUPT for a value that is no record of its key, and NO_HEAD where the headers could not be read.
        Neither is remembered: somebody may replace the value by a record of the same length.
        """
        lengths: list[Lengths | None] = [None] * len(keys)
        unknown: list[int] = []
        for i, (key, (presence, stored_bytes, _)) in enumerate(zip(keys, found, strict=True)):
            if presence is Presence.PRESENT:
                known = self._lengths.get(key)
                if known is not None and known.stored_bytes == stored_bytes:
                    lengths[i] = known
                elif ask:
                    unknown.append(i)
        if unknown and self._inner.capabilities.has_heads:
            heads = await self._inner.heads([keys[i] for i in unknown])
            for i, head in zip(unknown, heads, strict=True):
                known = lengths[i] = self._read(keys[i], bytes(head), found[i].record_bytes)
                if known.cannot in (CORRUPT, NO_HEAD):
                    self._lengths.forget(keys[i])
                else:
                    self._lengths.note(keys[i], known)
        return lengths

    def _read(self, key: bytes, head: bytes, stored_bytes: int) -> Lengths:
        """The lengths that a record's headers name, and whether it can be decoded here."""
        if not head:
            return Lengths(stored_bytes, 0, b"", NO_HEAD)
        known = read_head(key, head, stored_bytes)
        if known is not None and known.cannot:
            return known
        if known is None or stored_bytes > self._chain.longest_stored_bytes(
            known.codecs, known.decoded_bytes
        ):  # the headers are unsound, or no codec makes a record this long
            return Lengths(stored_bytes, 0, b"", CORRUPT)
        cannot = self._chain.cannot_decode(known.codecs)
        if cannot:
            why = f"written with codecs {list(known.codecs)}, which this server cannot decode"
            self._undecodable.note(cannot, key, NO_PROOF if cannot == UNAUTHENTICATED else why)
        return known._replace(cannot=cannot)
