"""`host_cost`: puts and loads of 32 × 1 MiB by an adapter in an adapter host, against the same adapter in process.

The adapter is `fs`, first on tmpfs, where only memory limits the speed and the host's cost shows most, then on this
machine's disk, the usual medium of `fs`.  In each round three ways take turns, so that a busy machine slows all alike:
the adapter in process, the adapter in its host, and the adapter in a bare process, which is the floor (`_floor`).  The
bare process blocks on a socket and lets the adapter do one batch at a time, without the host's code.

Sketch: the host adds two messages of 1.4 KB and a few context switches to a batch that moves 32 MiB.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common import figure, median_spread, scratch, sized
from benchmarks.hosted import BareProcess, Extents, Way, serve_bare, turns
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.host.parent import HostedAdapter

ITEMS = 32
PAYLOAD_BYTES = 1 << 20
ROUNDS = sized((6, 36), (1, 2))
TARGET = 0.9


def in_process(folder: Path, number: int) -> StorageAdapter:
    """Return the adapter, without a host."""
    return configure_tier({"type": "fs", "base_path": str(folder)}, number).make()


async def serve(folder: Path, channel_fd: int, extents_fd: int) -> None:
    """Body of the bare process."""
    await serve_bare(channel_fd, Way(in_process(folder, 2), Extents(ITEMS, PAYLOAD_BYTES, extents_fd)))


async def compare(folder: Path) -> dict[str, list[list[float]]]:
    """Return [in process, in a host, in a bare process] seconds of each round, by operation."""
    extents = Extents(ITEMS, PAYLOAD_BYTES)
    hosted = configure_tier({"type": "fs", "base_path": str(folder / "in-a-host")}, 1)
    ways = [
        Way(in_process(folder / "in-process", 0), extents),
        Way(HostedAdapter(hosted, kill_ms=60_000), extents),
        BareProcess("benchmarks.host_cost", [str(folder / "bare")], extents),
    ]
    try:
        for way in ways:
            await way.open()
        return await turns(ways, ("put", "exists", "load"), ROUNDS, ITEMS)
    finally:
        for way in ways:
            await way.close()
        extents.close()


@contextmanager
def on_tmpfs() -> Iterator[Path]:
    """Make a folder on tmpfs and remove it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir="/dev/shm") as folder:
        yield Path(folder)


def numbers(times: dict[str, list[list[float]]], medium: str) -> dict[str, Any]:
    """Return the medians of each operation in ms, and the speeds of host and bare process as shares of that in process.

    A share is the median of the rounds' own shares.
    """
    found: dict[str, Any] = {}
    for operation, rounds in times.items():
        for which, suffix in enumerate(("", "_host", "_floor")):
            ms = statistics.median(each[which] for each in rounds) * 1e3
            found[f"{medium}_{operation}{suffix}_ms"] = round(ms, 3)
            if which:
                share = statistics.median(each[0] / each[which] for each in rounds)
                found[f"{medium}_{operation}{suffix}_ratio"] = round(share, 3)
    return found


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    with on_tmpfs() as folder:
        memory = uvloop.run(compare(folder))
    with scratch("host-cost") as folder:
        disk = uvloop.run(compare(folder))
    parts = {**numbers(memory, "tmpfs"), **numbers(disk, "disk")}
    value, worse = min((parts[f"tmpfs_{operation}_host_ratio"], operation) for operation in ("put", "load"))
    ratios = [here / there for operation in ("put", "load") for here, there, _ in memory[operation]]
    return [
        figure(
            "host_cost",
            value=value,
            unit="x",
            ratio=value,
            target=f">= {TARGET} x in process",
            ok=value >= TARGET,
            spread=median_spread(ratios)[1],
            ratio_to="the same adapter in process, on tmpfs; the worse of put and load",
            floor_ratio=parts[f"tmpfs_{worse}_floor_ratio"],
            **parts,
        )
    ]


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), *map(int, sys.argv[2:])))
