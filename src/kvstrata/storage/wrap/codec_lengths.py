"""Reads the lengths that stored records have in L1 from their headers (docs/formats.md), and remembers them."""

from __future__ import annotations

import logging
import struct
from typing import NamedTuple

from kvstrata.native.core import crc32c
from kvstrata.policy.reasons import MISMATCH
from kvstrata.storage.base import HEAD_BYTES

log = logging.getLogger(__name__)

KNOWN_LENGTHS = 1 << 17
"""Keys whose lengths are remembered (about 200 bytes each)."""
LARGEST_RECORD_BYTES = 1 << 32
_OUTER = struct.Struct("<8sHHI32s32s8sQII")
_OUTER_CRC = struct.Struct("<I")
_OUTER_CRC_AT = 252
_PAYLOAD_BYTES = struct.Struct("<Q")
_PAYLOAD_BYTES_AT = 280
_INNER_MAGIC = slice(256, 264)
CODECS = slice(80, 88)
"""The field of a record's header with the numbers of the codecs that encoded its payload, padded with zeros."""


class Lengths(NamedTuple):
    """The lengths and codecs of a stored record."""

    stored_bytes: int
    decoded_bytes: int
    codecs: bytes
    cannot: str = ""
    """The short reason why the record cannot be decoded here; empty if it can."""


class KnownLengths:
    """Lengths by key: at most KNOWN_LENGTHS, the oldest are forgotten first."""

    def __init__(self) -> None:
        self._known: dict[bytes, Lengths] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes) -> Lengths | None:
        """What is known of a record; None: nothing."""
        return self._known.get(key)

    def note(self, key: bytes, lengths: Lengths) -> None:
        """Remember the lengths of a record."""
        self._known.pop(key, None)
        self._known[key] = lengths
        while len(self._known) > KNOWN_LENGTHS:
            self._known.pop(next(iter(self._known)), None)

    def forget(self, key: bytes) -> None:
        """Forget a record that may have changed, or is gone. Thread-safe."""
        self._known.pop(key, None)

    def clear(self) -> None:
        """Forget all records."""
        self._known.clear()


class Undecodable:
    """Logs that records cannot be decoded, once per reason.

    If servers share a storage but have different codecs, all records of the other servers are noted here.
    """

    def __init__(self, name: str) -> None:
        """`name` of the adapter."""
        self._name = name
        self._told: set[str] = set()

    def note(self, reason: str, key: bytes, error: object) -> None:
        """Log that this record cannot be decoded, if it is the first one with this reason. Thread-safe."""
        if reason not in self._told:
            self._told.add(reason)
            what = "%s: record %s: %s; more such records are only counted (%s). Give all its servers the same codec"
            log.warning(what, self._name, key.hex()[:16], error, reason)


def read_head(key: bytes, head: bytes, stored_bytes: int) -> Lengths | None:
    """The lengths and codecs in a record's headers; None: the headers are unsound, or do not fit the stored length."""
    if len(head) < HEAD_BYTES:
        return None
    magic, version, flags, header_bytes, of, _, codecs, body_bytes, _, _ = _OUTER.unpack_from(head, 0)
    if magic != b"KVSTRATA" or of != key:
        return None
    if version != 1:
        return Lengths(stored_bytes, 0, b"", MISMATCH)
    (payload_bytes,) = _PAYLOAD_BYTES.unpack_from(head, _PAYLOAD_BYTES_AT)
    if (
        crc32c(head[:_OUTER_CRC_AT]) != _OUTER_CRC.unpack_from(head, _OUTER_CRC_AT)[0]
        or head[_INNER_MAGIC] != b"KVCHUNK1"
        or header_bytes + body_bytes != stored_bytes
        or header_bytes + payload_bytes >= LARGEST_RECORD_BYTES
    ):
        return None
    decoded_bytes = header_bytes + payload_bytes
    return Lengths(stored_bytes, decoded_bytes, codecs.rstrip(b"\0"), MISMATCH if flags else "")
