"""Batches on the channel of an adapter host, in plain Python: the twin of `batches.pyx`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

ROW = struct.Struct("<BIB")


def pack_found(outcomes: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Pack a row for each (presence, record bytes, reason)."""
    return b"".join(ROW.pack(presence, size, len(word)) + word for presence, size, word in outcomes)


def read_found(rows: bytes, count: int, max_reason_bytes: int) -> list[tuple[int, int, str]]:
    """Read `count` rows. Raises ValueError or struct.error for anything else."""
    outcomes, at = [], 0
    for _ in range(count):
        presence, record_bytes, length = ROW.unpack_from(rows, at)
        word = rows[at + ROW.size : at + ROW.size + length]
        at += ROW.size + length
        if presence > 2 or length > max_reason_bytes or len(word) < length:
            raise ValueError
        outcomes.append((presence, record_bytes, word.decode()))
    if at != len(rows):
        raise ValueError
    return outcomes
