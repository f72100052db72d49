"""`kvstrata bench l2`: the speed of one L2 adapter on this host, without a server.

The adapter is built from the JSON of the server's --l2-adapter, as the same tier (codecs, deadline and breaker) and
with the same lanes or adapter host.  For each size of record the adapter is opened, runs a warm-up and the measured
passes of measure/l2.py, and is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from kvstrata import __version__
from kvstrata.cli.bench.flags import whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.clock import SystemClock
from kvstrata.config.flags import adapters_from_json
from kvstrata.errors import ConfigError, Refused
from kvstrata.measure.figures import machine, median_spread, percentile
from kvstrata.measure.l2 import Interrupted, Pass, Records, Workload
from kvstrata.native.core import record_bytes
from kvstrata.tiers.config import TierConfig, configure_tier
from kvstrata.tiers.tier import Tier, limits_of

MB = 1 << 20
PAGE_BYTES = 4096
LARGEST_MB = 2048
MEMORY_SHARE = 0.5
"""Largest share of the available memory that a run takes."""
CAP_SHARE = 0.9
"""Share of an adapter's cap that may be filled; above it the adapter might evict records before they are loaded."""


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench l2`."""
    top = argparse.ArgumentParser(
        prog="kvstrata bench l2",
        description="Measure one L2 adapter on this host, verified; needs no server.",
    )
    add = top.add_argument
    add("--l2-adapter", action="append", required=True, metavar="JSON",
        help='the adapter, as the server takes it: {"type": "fs", "base_path": "/mnt/nvme/kv"}')  # fmt: skip
    add("--chunk-mb", type=_sizes, default=[1.0, 4.0, 32.0], metavar="MB[,MB]",
        help="payload of a record in MiB, or several (1,4,32)")  # fmt: skip
    add("--count", type=whole(1, 65_536), default=16, metavar="N", help="records in a pass (%(default)s)")
    add("--batch", type=whole(1, 1024), default=8, metavar="N", help="records in a call (%(default)s)")
    add("--rounds", type=whole(1, 1000), default=5, metavar="N",
        help="measured passes for each size, after one that warms up (%(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of tables")
    return top


@guarded("kvstrata bench l2")
def main(arguments: Sequence[str] | None) -> int:
    """Run the benchmark; returns 0. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    try:
        report = run(options)
    except Interrupted:
        raise KeyboardInterrupt from None
    print(json.dumps(report, indent=1, ensure_ascii=False) if options.json else shown(report))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the report. Raises KvstrataError or Interrupted; in any case nothing is running afterwards.

    Records that may be left in the adapter are reported on standard error.
    """
    entries = adapters_from_json(options.l2_adapter)
    if len(entries) != 1:
        raise ConfigError(f"--l2-adapter: must name one adapter, found {len(entries)}", field="l2_adapter")
    options.batch = min(options.batch, options.count)
    _check_memory(max(options.chunk_mb), options.count, options.batch)
    return uvloop.run(_Run(options, configure_tier(entries[0], 0), entries[0]).report())


class _Run:
    """One run of the command, over all sizes."""

    def __init__(self, options: argparse.Namespace, config: TierConfig, entry: Mapping[str, Any]) -> None:
        self._options = options
        self._config = config
        self._entry = entry
        self._notes: list[str] = []
        self._work: Workload | None = None
        self._opening: asyncio.Task[None] | None = None
        self._stopped = False
        self._evicted = 0

    async def report(self) -> dict[str, Any]:
        """Measure every size."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        load_before = os.getloadavg()[0]
        options = self._options
        found = [await self._size(size) for size in options.chunk_mb]
        if self._evicted:
            self._notes.append(f"the adapter's cap evicted {self._evicted} records meanwhile")
        codecs = self._entry.get("codec")
        if codecs:
            self._notes.append("payloads are random bytes, which no codec makes smaller")
        isolation = self._entry.get("isolation", "in_process")
        where = self._entry.get("base_path", "")
        words = [self._config.name, f"isolation {isolation}", *([f"codec {codecs}"] if codecs else []), where]
        verified = sum(size["verified_bytes"] for size in found)
        return {
            "adapter": ", ".join(word for word in words if word),
            "version": __version__,
            "machine": machine(),
            "load": f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after (1 min average)",
            "run": f"{options.count} records a pass in batches of {options.batch}, {options.rounds + 1} passes",
            "verified": f"{verified / MB:,.0f} MiB came back byte for byte",
            "verified_bytes": verified,
            "sizes": found,
            "notes": self._notes,
        }

    async def _size(self, size_mb: float) -> dict[str, Any]:
        options = self._options
        try:
            records = Records(int(size_mb * MB), options.count, options.batch)
        except (OSError, MemoryError) as error:
            raise Refused(
                f"--chunk-mb: no memory for {options.count} records of {size_mb:g} MiB ({error})"
            ) from None
        tier = Tier(self._config, limits_of(self._config, records.pool.extents_bytes), SystemClock())
        with contextlib.ExitStack() as ends:
            ends.callback(records.close)
            try:
                await self._open(tier.open(records.context(self._was_evicted), must=True))
                await self._check_adapter(tier, records)
                passes = await self._passes(Workload(tier, records))
            finally:
                await tier.close()
        return size_figures(size_mb, records.record_bytes, passes)

    async def _passes(self, work: Workload) -> list[Pass]:
        """Run the passes; afterwards delete the records of `work`, and report those that may be left."""
        self._work = work
        if self._stopped:
            raise Interrupted
        try:
            return [await work.run() for _ in range(self._options.rounds + 1)][1:]
        finally:
            self._work = None
            if left := await work.end():
                print(
                    f"kvstrata bench l2: {left} records under random keys may be left in {self._config.name}",
                    file=sys.stderr,
                )

    async def _open(self, opening: Any) -> None:
        """Wait until the adapter is open. Raises Interrupted after Ctrl-C."""
        self._opening = asyncio.ensure_future(opening)
        try:
            await self._opening
        except asyncio.CancelledError:
            raise Interrupted from None
        finally:
            self._opening = None

    async def _check_adapter(self, adapter: Any, records: Records) -> None:
        can = adapter.capabilities
        if self._options.batch > can.max_batch:
            raise ConfigError(
                f"--batch: {adapter.name} takes {can.max_batch} records a call, found {self._options.batch}"
            )
        if not can.can_delete:
            raise ConfigError(
                f"--l2-adapter: {adapter.name} cannot delete records, so those of a run would stay"
            )
        usage = await adapter.usage()
        if usage.capacity_bytes and usage.records:
            raise Refused(
                f"--l2-adapter: {adapter.name} has a cap, and holds {usage.records} other records, which it may evict "
                "for those of this run; name an empty base_path on the same medium, or an adapter without a cap"
            )
        need = records.count * records.record_bytes
        room = int(CAP_SHARE * usage.capacity_bytes) - usage.used_bytes
        if usage.capacity_bytes and need > room:
            raise Refused(
                f"--count: {need / MB:,.0f} MiB do not fit in the {max(0, room) / MB:,.0f} MiB that this run may use "
                f"of the {usage.capacity_bytes / MB:,.0f} MiB cap of {adapter.name}; give a smaller --count or "
                "--chunk-mb, or a larger cap"
            )

    def _was_evicted(self, key: bytes) -> None:
        self._evicted += 1

    def _stop(self) -> None:
        self._stopped = True
        if self._opening is not None:
            self._opening.cancel()
        if self._work is not None:
            self._work.stop()


def size_figures(size_mb: float, record_length: int, passes: Sequence[Pass]) -> dict[str, Any]:
    """The figures of one size: rates have one value for each pass, times one for each call."""
    moved = sum(each.moved_bytes for each in passes)
    parts: dict[str, Any] = {}
    for name in ("put", "load"):
        median, (least, greatest) = median_spread(
            [each.moved_bytes / sum(getattr(each, name)) / 1e9 for each in passes]
        )
        parts[name] = {
            "gb_per_s": {"median": median, "least": least, "greatest": greatest},
            "ms": _percentiles([s for each in passes for s in getattr(each, name)]),
        }
    parts["exists"] = {"ms": _percentiles([s for each in passes for s in each.exists])}
    return {"chunk_mb": size_mb, "record_bytes": record_length, "verified_bytes": moved, **parts}


def shown(report: dict[str, Any]) -> str:
    """The report as text."""
    rates, times = [], []
    for size in report["sizes"]:
        chunk = f"{size['chunk_mb']:g} MiB"
        for name in ("put", "load"):
            found = size[name]["gb_per_s"]
            words = {"GB/s" if word == "median" else word: f"{rate:.3f}" for word, rate in found.items()}
            rates.append({"chunk": chunk, "operation": name, **words})
        for name in ("put", "load", "exists"):
            ms = size[name]["ms"]
            words = {word: f"{ms[word]:.3f}" for word in ("p50", "p95", "p99", "greatest")}
            times.append({"chunk": chunk, "ms a call": name, **words, "calls": ms["calls"]})
    heads = {name: report[name] for name in ("adapter", "machine", "load", "run", "verified")}
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return f"{table(heads)}\n\n{table(rates)}\n\n{table(times)}{notes}"


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ms = [1e3 * each for each in seconds]
    shares = {f"p{100 * share:.0f}": percentile(ms, share) for share in (0.5, 0.95, 0.99)}
    return {**shares, "greatest": max(ms), "calls": len(ms)}


def _check_memory(size_mb: float, count: int, batch: int) -> None:
    need = record_bytes(1, int(size_mb * MB)) * (count + batch)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            may = int(MEMORY_SHARE * int(line.split()[1]) * 1024)
            if need > may:
                raise Refused(
                    f"--chunk-mb: {count} records and {batch} extents of {size_mb:g} MiB take {need / MB:,.0f} MiB, "
                    f"more than half of the available memory ({may / MEMORY_SHARE / MB:,.0f} MiB); "
                    "give a smaller --count"
                )


def _sizes(text: str) -> list[float]:
    sizes = []
    for word in text.split(","):
        try:
            size = float(word)
        except ValueError:
            size = 0.0
        if not PAGE_BYTES / MB <= size <= LARGEST_MB or size * MB % PAGE_BYTES:
            raise argparse.ArgumentTypeError(
                f"must be MiB from 1/256 to {LARGEST_MB}, whole pages of {PAGE_BYTES} bytes, such as 1,4,32, "
                f"found {word!r}"
            )
        if size in sizes:
            raise argparse.ArgumentTypeError(f"names {size:g} twice")
        sizes.append(size)
    return sizes
