"""The segments of tenants that have a pool of their own, beside the shared segment of the instance.

    <segment dir>/own-NAME/     index  extents  sessions.lock  server.pid
    holder                      NAME: index, extents, sessions.lock

NAME is a digest of the tenant's name.  The locks and rules are those of `segment`; the epoch is that of the shared
segment, so every process of the instance is told the same one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvstrata.memory import holder_client
from kvstrata.memory.paths import HOLDER_SOCKET
from kvstrata.memory.segment import Segment
from kvstrata.memory.segment_files import remove_replaced
from kvstrata.memory.segment_settings import SegmentSettings

_log = logging.getLogger(__name__)

PREFIX = "own-"
_ENTRY_PER_BYTES = 64 << 10
_MIN_ENTRIES, _MAX_ENTRIES = 1024, 4 << 20


class OwnSize(NamedTuple):
    """The size of a tenant's pool."""

    quota_bytes: int
    """Memory that it may have at first."""
    most_bytes: int
    """Memory that it may ever have: the length of its file."""


def segment_name(tenant: str) -> str:
    """The name of a tenant's segment in folders and in the holder."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:16]


def own_settings(shared: SegmentSettings, tenant: str, size: OwnSize, epoch: int) -> SegmentSettings:
    """Settings of a tenant's segment: those of the shared one, with a size and an index of its own."""
    name = segment_name(tenant)
    return msgspec.structs.replace(
        shared,
        directory=shared.directory / f"{PREFIX}{name}",
        extents_bytes=size.most_bytes,
        limit_bytes=size.quota_bytes,
        beside_bytes=0,
        entry_capacity=min(max(size.most_bytes // _ENTRY_PER_BYTES, _MIN_ENTRIES), _MAX_ENTRIES),
        holder_name=name,
        epoch=epoch,
    )


def open_own_segments(
    shared: SegmentSettings, epoch: int, sizes: Mapping[str, OwnSize]
) -> dict[str, Segment]:
    """Adopt or make the segment of each tenant of `sizes`, and remove those of all other tenants.

    `shared` are the settings of the shared segment, which is open, and `epoch` is its epoch.  Raises as `Segment.open`;
    what was opened is closed again then.
    """
    _remove_others(shared, {segment_name(tenant) for tenant in sizes})
    opened: dict[str, Segment] = {}
    try:
        for tenant, size in sizes.items():
            opened[tenant] = Segment.open_beside(own_settings(shared, tenant, size, epoch))
    except BaseException:
        for segment in opened.values():
            segment.close()
        raise
    return opened


def _remove_others(shared: SegmentSettings, names: set[str]) -> None:
    """Remove the segments of tenants that have no pool of their own any more."""
    for left in shared.directory.glob(f"{PREFIX}*"):
        if left.name.removeprefix(PREFIX) not in names:
            _log.info("segment: %s is removed: its tenant has no pool of its own now", left)
            remove_replaced(left)
    path = shared.socket_dir / HOLDER_SOCKET
    if not path.exists():
        return
    try:
        for name in holder_client.names(path):
            if name and name not in names and holder_client.dismiss(path, name):
                path.unlink(missing_ok=True)
    except (OSError, holder_client.HolderUnreachable) as error:
        _log.warning("segment: the holder could not be asked for segments of former tenants: %s", error)
