"""The MAC by which a reader knows that the bytes that it has read are the owner's (`p2p.mac`).

After each read the reader makes a key and sends it to the owner in PeerRelease, over CURVE.  While the lease keeps the
records, the owner computes a tag of each of them with that key and answers with the tags, while the reader computes the
tags of the bytes that it has.  Nobody else knows the key, and it is used for one read, so a tag of another read, or of
an older record in the same place, fits nothing.

A tag is that of AES-256-GCM over associated data alone (GMAC): the packed extent under which the record is leased, with
its length and generation, then the whole record, whose headers hold its key and identity.  The nonce is the record's
number in the read.

The package `cryptography` computes the tags.  It drops the GIL meanwhile, so several threads share a read (`parts_of`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from kvstrata.types import EXTENT

MAC_KEY_BYTES, TAG_BYTES = 32, 16
MODULE = "cryptography"
THREADS = min(4, os.cpu_count() or 1)
"""Threads that compute tags for the readers of an owner, and as many for one reader."""
_NONCE_BYTES = 12
_PIECE_BYTES = 1 << 30
"""Most bytes that one call of the package may get is 2 GiB - 1."""


def tag_of(key: bytes, number: int, extent: bytes, address: int) -> bytes:
    """The tag of one record of a read, at `address`, which the caller keeps in place; `extent` is packed.

    Takes 0.2 ms for 1 MiB that is in no cache, so it is not for the event loop.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    length = EXTENT.unpack(extent)[1]
    mac = Cipher(algorithms.AES(key), modes.GCM(number.to_bytes(_NONCE_BYTES, "little"))).encryptor()
    mac.authenticate_additional_data(extent)
    for at in range(0, length, _PIECE_BYTES):
        piece = (ctypes.c_ubyte * min(_PIECE_BYTES, length - at)).from_address(address + at)
        mac.authenticate_additional_data(memoryview(piece).cast("B"))
    mac.finalize()
    return bytes(mac.tag)


def tags_of(key: bytes, records: Sequence[tuple[bytes, int]], numbers: range) -> bytes:
    """The tags of the records (packed extent, address) of a read that have these numbers, one after the other."""
    return b"".join(tag_of(key, number, *records[number]) for number in numbers)


def parts_of(count: int) -> list[range]:
    """The numbers of `count` records, which are at least one, in a part for each thread."""
    size = -(-count // THREADS)
    return [range(at, min(at + size, count)) for at in range(0, count, size)]
