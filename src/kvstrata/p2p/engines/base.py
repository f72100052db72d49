"""The contract of transfer engines: one-sided reads out of another instance's registered memory.

Invariants
1. `ended` of a read is called exactly once, on the event loop, when no byte of its destinations can be written any
   more: after its completion, its error completion, or the forced end of its connection.  A deadline or a cancelled
   await ends only the wait.  `ended` is also called for a read that was refused before anything was posted.
2. A read answers at its deadline at the latest, whatever the peer and the network do.
3. Nothing outside the memory of either side is read or written: all items are checked before the first is posted.
4. Where `quiesce` is "drain", `disconnect` and `close` force the reads that they concern to their end.  Where it is
   "never", a read from a hanging peer may never end, and only the end of this process frees its destinations.
5. Metadata from another instance are checked before any part of them reaches native code.

A read delivers the bytes that lie at the peer's offsets.  The caller checks by generation, identity and checksum that
they are the wanted record.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kvstrata.errors import TransferError

MAX_ITEMS = 4096
"""Maximum number of items of one read."""
MAX_METADATA_BYTES = (1 << 20) - 1024
"""A PeerWelcome must have room for it (rpc/cluster_wire.py)."""
MAX_PEER_NAME_BYTES = 256

DEADLINE, CANCELLED, PEER_GONE = "deadline", "cancelled", "peer_gone"
NOT_CONNECTED, OUT_OF_RANGE, BUSY, CLOSED, FAILED = (
    "not_connected",
    "out_of_range",
    "busy",
    "closed",
    "failed",
)
REASONS = (DEADLINE, CANCELLED, PEER_GONE, NOT_CONNECTED, OUT_OF_RANGE, BUSY, CLOSED, FAILED)
"""The answers of `read` besides "", in this order: the time is up; the peer was disconnected meanwhile; the peer's
process or the way to it is gone; the peer is not connected; an item leaves its region, or the number of items is 0 or
too large; too much is under way already; the engine is closed; the transport failed in another way (the log says how).
"""


class Region(NamedTuple):
    """Memory of this process, which peers may read and our reads may fill. It must live until `close` has returned."""

    address: int
    length: int


class ReadItem(NamedTuple):
    """Read `length` bytes at an offset in the peer's memory into the memory of this process."""

    remote_offset: int
    local_offset: int
    length: int


class TransferEngine(ABC):
    """Registered memory, connections by the peer's name, and reads.  Called on one event loop; never blocks it."""

    name: str
    quiesce: Literal["drain", "never"]
    """Whether `disconnect` ends a read in flight ("drain"), or only killing this process does ("never")."""

    @abstractmethod
    async def open(self, region: Region) -> bytes:
        """Register memory and serve it to peers; returns metadata for their `connect`, below MAX_METADATA_BYTES.

        Raises a TransferError that says what to install or change; its field is `network` if no device can be used.
        """

    @abstractmethod
    async def connect(self, peer: str, metadata: bytes) -> None:
        """Connect to a peer by its metadata.

        The same metadata again changes nothing while the connection holds.  Other metadata mean that the peer has
        restarted: reads from its old process are forced to their end.

        Raises a TransferError that says what is wrong with the metadata; its field is `network` if no device of one
        side reaches a device of the other.  After an error, an older connection to that peer stays.
        """

    @abstractmethod
    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        """Fill the items' destinations; returns "" when all bytes have arrived, else a word of REASONS; does not raise.

        `deadline_s` counts seconds from now. `ended`: see the invariants; it must not raise.
        """

    @abstractmethod
    async def disconnect(self, peer: str) -> None:
        """Forget a peer; its reads are answered "cancelled". Does nothing for an unknown peer."""

    @abstractmethod
    async def close(self) -> None:
        """End all reads and connections, and unregister the memory. Idempotent. No `ended` is called after it."""


# --- metadata ----------------------------------------------------------------------------------------------
#
# Magic, format version, length of the memory, length of the transfer engine's name, length of its part, and the CRC-32
# of all bytes that follow.  These are the name and the part.

_MAGIC = b"KVXF"
_VERSION = 3
_HEAD = struct.Struct("<4sHQBII")


class PeerMetadata(NamedTuple):
    """The metadata that another instance's `open` returned."""

    region_bytes: int
    part: bytes
    """The part that only transfer engines of the same kind understand."""


def pack_metadata(engine: str, region: Region, part: bytes) -> bytes:
    """Pack metadata for peers. Raises TransferError if they would be too long."""
    rest = engine.encode() + part
    packed = _HEAD.pack(_MAGIC, _VERSION, region.length, len(engine), len(part), zlib.crc32(rest)) + rest
    if len(packed) > MAX_METADATA_BYTES:
        what = f"{len(packed)} bytes exceed {MAX_METADATA_BYTES}; use fewer network devices"
        raise TransferError(f"{engine}: the metadata for peers: {what}", field="metadata")
    return packed


def unpack_metadata(engine: str, peer: str, metadata: bytes) -> PeerMetadata:
    """Check and unpack metadata that another instance packed. Raises TransferError that says what is wrong."""

    def wrong(what: str) -> TransferError:
        return TransferError(f"{engine}: metadata of peer {peer!r:.80}: {what}", field="metadata")

    if not 0 < len(peer.encode()) <= MAX_PEER_NAME_BYTES:
        raise TransferError(f"{engine}: peer: must have 1 to {MAX_PEER_NAME_BYTES} bytes", field="peer")
    if len(metadata) > MAX_METADATA_BYTES:
        raise wrong(f"has {len(metadata)} bytes; at most {MAX_METADATA_BYTES} are allowed")
    if len(metadata) < _HEAD.size or metadata[:4] != _MAGIC:
        raise wrong("was not packed by a transfer engine of kvstrata")
    _, version, region_bytes, name_bytes, part_bytes, checksum = _HEAD.unpack_from(metadata)
    if version != _VERSION:
        raise wrong(f"has format version {version}, but this instance uses {_VERSION}; upgrade the older one")
    rest = metadata[_HEAD.size :]
    if len(rest) != name_bytes + part_bytes:
        raise wrong(f"has {len(rest)} bytes after its head, but the head names another length")
    if zlib.crc32(rest) != checksum:
        raise wrong("is damaged: its checksum is wrong")
    name = rest[:name_bytes]
    if name != engine.encode():
        raise wrong(
            f"comes from the engine {name.decode(errors='replace')!r}; set the same p2p.engine on both sides"
        )
    return PeerMetadata(region_bytes, rest[name_bytes:])


def check_region(engine: str, region: Region) -> None:
    """Raise TransferError for memory that cannot be registered."""
    if region.address <= 0 or region.length <= 0 or region.address + region.length >= 1 << 63:
        what = f"{region.length} bytes at {region.address:#x} are not a range of memory"
        raise TransferError(f"{engine}: region: {what}", field="region")


def in_range(items: Sequence[ReadItem], local_bytes: int, remote_bytes: int) -> bool:
    """Whether the number of items is 1 to MAX_ITEMS, and every item lies within the memory of both sides."""
    return 0 < len(items) <= MAX_ITEMS and all(
        item.length > 0
        and 0 <= item.remote_offset <= remote_bytes - item.length
        and 0 <= item.local_offset <= local_bytes - item.length
        for item in items
    )
