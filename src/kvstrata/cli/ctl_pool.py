"""`kvstrata ctl pool`: the pools on this machine, with or without a server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.types import GB

if TYPE_CHECKING:
    from kvstrata.memory.pools import FoundPool


def run(options: argparse.Namespace) -> Any:
    """Carry out one action. Raises SegmentError or ConfigError."""
    # These alone load the compiled modules; the other commands of `ctl` also run on a machine that lacks them.
    from kvstrata.memory import pools
    from kvstrata.memory.paths import SHM_ROOT

    if options.action == "list":
        found = pools.find_pools(options.roots or (SHM_ROOT,))
        return [_document(pool) for pool in found] if options.json else _brief(found)
    place = options.pool.absolute()
    freed = pools.free(place)
    return [_document(freed)] if options.json else f"freed {size(freed.memory_bytes)} of {place}"


def size(memory_bytes: int) -> str:
    """An amount of memory for people."""
    return f"{memory_bytes / GB:.1f} GB" if memory_bytes >= GB // 10 else f"{memory_bytes / (1 << 20):.1f} MB"


def span(seconds: float | None) -> str:
    """A length of time for people, in its largest unit."""
    if seconds is None:
        return "-"
    for unit, unit_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _document(pool: FoundPool) -> dict[str, Any]:
    return pool._asdict() | {"place": str(pool.place)}


def _brief(found: Sequence[FoundPool]) -> Any:
    if not found:
        return "no pool of this user is here"
    return [
        {
            "pool": str(pool.place),
            "memory": size(pool.memory_bytes),
            "age": span(pool.age_s),
            "idle": span(pool.idle_s),
            "owned_by": ", ".join(pool.owners) or "nobody",
        }
        for pool in found
    ]
