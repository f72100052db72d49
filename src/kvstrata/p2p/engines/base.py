"""The contract of transfer engines: one-sided reads out of another instance's registered memory.

Invariants
1. `ended` of a read is called exactly once, on the event loop, when no byte of any of its destinations can be written
   any more: after its completion, its error completion, or the forced end of its connection.  A deadline or a
   cancelled await ends the wait only.  A read that was refused before anything was posted has ended too.
2. A read answers at its deadline at the latest, whatever the peer and the network do.
3. Nothing outside the regions of either side is ever read or written: items are checked before one is posted.
4. `disconnect` and `close` force the reads that they concern to their end where `quiesce` is "drain"; where it is
   "never", a read of a peer that hangs may have none, and only the end of this process frees its destinations.
5. What another instance sent as metadata is checked before any of it reaches native code.

The bytes that were read are whatever lay there: that they are what was wanted is checked by the reader, by generation,
identity and checksum.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kvstrata.errors import TransferError

MAX_REGIONS = 16
MAX_ITEMS = 4096
"""Of one read."""
MAX_METADATA_BYTES = 64 << 10
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
"""What `read` answers besides "": the time is up; disconnected or closed meanwhile; the peer's process or the way to it
is gone; no such peer; an item leaves its region, or there are too many or none; too much is under way already; the
engine is closed; the transport failed in another way (the log says how)."""


class Region(NamedTuple):
    """Memory of this process that peers may read and reads may fill; must live until `close` returned."""

    address: int
    length: int


class ReadItem(NamedTuple):
    """`length` bytes at an offset of the peer's region into an offset of an own one; regions by their index."""

    remote_region: int
    remote_offset: int
    local_region: int
    local_offset: int
    length: int


class TransferEngine(ABC):
    """One engine: registered regions, connections by peer name, reads.  Called on one event loop; never blocks it."""

    name: str
    quiesce: Literal["drain", "never"]
    """What ends a read in flight: `disconnect` does ("drain"), or only killing this process does ("never")."""

    @abstractmethod
    async def open(self, regions: Sequence[Region]) -> bytes:
        """Register memory and serve it to peers; the metadata that a peer's `connect` wants, below MAX_METADATA_BYTES.

        Raises TransferError with what to install or to change; its field is `network` where no device can be used.
        """

    @abstractmethod
    async def connect(self, peer: str, metadata: bytes) -> None:
        """Make a peer known. Again with the same metadata changes nothing while that connection holds; with others,
        the peer has been started again: what was under way with the old one is forced to its end.

        Raises TransferError naming what is wrong with the metadata; its field is `network` where the devices of both
        sides do not meet. An older connection of that name then stays.
        """

    @abstractmethod
    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        """Fill the items' destinations; "" when all bytes are there, else a word of REASONS. Never raises for them.

        `deadline_s` is how long from now, in seconds. `ended`: see the invariants; it must not raise.
        """

    @abstractmethod
    async def disconnect(self, peer: str) -> None:
        """Forget a peer; its reads are answered "cancelled". Unknown peers are fine."""

    @abstractmethod
    async def close(self) -> None:
        """End everything and unregister. Idempotent. No `ended` is called after it."""


# --- metadata ----------------------------------------------------------------------------------------------
#
# magic, format version, regions, length of the engine's name, of its part, CRC-32 of all that follows the CRC:
# region lengths, name, the engine's part.

_MAGIC = b"KVXF"
_VERSION = 1
_HEAD = struct.Struct("<4sHBBII")
_REGION = struct.Struct("<Q")


class PeerMetadata(NamedTuple):
    """What another instance's `open` returned."""

    region_bytes: tuple[int, ...]
    part: bytes
    """Of its engine alone."""


def pack_metadata(engine: str, regions: Sequence[Region], part: bytes) -> bytes:
    """Metadata for peers. Raises TransferError where they would be too long."""
    rest = b"".join(_REGION.pack(region.length) for region in regions) + engine.encode() + part
    packed = _HEAD.pack(_MAGIC, _VERSION, len(regions), len(engine), len(part), zlib.crc32(rest)) + rest
    if len(packed) > MAX_METADATA_BYTES:
        what = f"{len(packed)} bytes exceed {MAX_METADATA_BYTES}; use fewer network devices"
        raise TransferError(f"{engine}: the metadata for peers: {what}", field="metadata")
    return packed


def unpack_metadata(engine: str, peer: str, metadata: bytes) -> PeerMetadata:
    """Check and take apart what `pack_metadata` made elsewhere. Raises TransferError saying what is wrong."""

    def wrong(what: str) -> TransferError:
        return TransferError(f"{engine}: metadata of peer {peer!r:.80}: {what}", field="metadata")

    if not 0 < len(peer.encode()) <= MAX_PEER_NAME_BYTES:
        raise TransferError(f"{engine}: peer: must have 1 to {MAX_PEER_NAME_BYTES} bytes", field="peer")
    if len(metadata) > MAX_METADATA_BYTES:
        raise wrong(f"{len(metadata)} bytes, at most {MAX_METADATA_BYTES} can be")
    if len(metadata) < _HEAD.size or metadata[:4] != _MAGIC:
        raise wrong("is not of a kvstrata transfer engine")
    _, version, regions, name_bytes, part_bytes, checksum = _HEAD.unpack_from(metadata)
    if version != _VERSION:
        raise wrong(f"has format version {version}, this side speaks {_VERSION}; upgrade the older one")
    rest = metadata[_HEAD.size :]
    if len(rest) != regions * _REGION.size + name_bytes + part_bytes:
        raise wrong("is cut, or has bytes too many")
    if zlib.crc32(rest) != checksum:
        raise wrong("is damaged, its checksum is another")
    name = rest[regions * _REGION.size :][:name_bytes]
    if name != engine.encode():
        raise wrong(f"is of the engine {name.decode(errors='replace')!r}; use one engine on both sides")
    if not 0 < regions <= MAX_REGIONS:
        raise wrong(f"names {regions} regions, 1 to {MAX_REGIONS} can be")
    lengths = tuple(length for (length,) in _REGION.iter_unpack(rest[: regions * _REGION.size]))
    return PeerMetadata(lengths, rest[regions * _REGION.size + name_bytes :])


def check_regions(engine: str, regions: Sequence[Region]) -> None:
    """Raise TransferError for regions that cannot be registered."""
    if not 0 < len(regions) <= MAX_REGIONS:
        raise TransferError(f"{engine}: regions: 1 to {MAX_REGIONS}, not {len(regions)}", field="regions")
    for index, region in enumerate(regions):
        if region.address <= 0 or region.length <= 0 or region.address + region.length >= 1 << 63:
            what = f"{region.length} bytes at {region.address:#x} are no memory"
            raise TransferError(f"{engine}: regions[{index}]: {what}", field="regions")


def in_range(items: Sequence[ReadItem], local_bytes: Sequence[int], remote_bytes: Sequence[int]) -> bool:
    """Whether every item lies within its regions, which have these lengths, and there are 1 to MAX_ITEMS."""
    return 0 < len(items) <= MAX_ITEMS and all(
        item.length > 0
        and 0 <= item.remote_region < len(remote_bytes)
        and 0 <= item.remote_offset <= remote_bytes[item.remote_region] - item.length
        and 0 <= item.local_region < len(local_bytes)
        and 0 <= item.local_offset <= local_bytes[item.local_region] - item.length
        for item in items
    )
