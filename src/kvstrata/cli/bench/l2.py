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
from typing import Any

import uvloop

from kvstrata import __version__
from kvstrata.cli.bench import whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.clock import SystemClock
from kvstrata.config.flags import adapters_from_json
from kvstrata.errors import ConfigError, Refused
from kvstrata.measure.figures import machine, median_spread, percentile
from kvstrata.measure.l2 import Pass, Records, Work
from kvstrata.memory.segment_settings import available_bytes
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
    """Run the benchmark; returns 0. Raises KvstrataError; in any case nothing is running afterwards.

    Records that may be left in the adapter are reported on standard error.
    """
    options = parser().parse_args(arguments)
    entries = adapters_from_json(options.l2_adapter)
    if len(entries) != 1:
        raise ConfigError(f"--l2-adapter: must name one adapter, found {len(entries)}", field="l2_adapter")
    options.batch = min(options.batch, options.count)
    _check_memory(max(options.chunk_mb), options.count, options.batch)
    config = configure_tier(entries[0], 0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # which cancels the run at Ctrl-C
        try:
            report = runner.run(_measured(options, config, entries[0]))
        except asyncio.CancelledError:  # SIGTERM
            raise KeyboardInterrupt from None
    print(json.dumps(report, indent=1, ensure_ascii=False) if options.json else shown(report))
    return 0


async def _measured(
    options: argparse.Namespace, config: TierConfig, entry: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure every size; returns the report."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    load_before = os.getloadavg()[0]
    found = [await _size(options, config, size) for size in options.chunk_mb]
    codecs, isolation = entry.get("codec"), entry.get("isolation", "in_process")
    words = [
        config.name,
        f"isolation {isolation}",
        *([f"codec {codecs}"] if codecs else []),
        entry.get("base_path"),
    ]
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
        "notes": ["payloads are random bytes, which no codec makes smaller"] if codecs else [],
    }


async def _size(options: argparse.Namespace, config: TierConfig, size_mb: float) -> dict[str, Any]:
    """Measure one size; afterwards its records are deleted, and those that may be left are reported."""
    try:
        records = Records(int(size_mb * MB), options.count, options.batch)
    except (OSError, MemoryError) as error:
        raise Refused(
            f"--chunk-mb: no memory for {options.count} records of {size_mb:g} MiB ({error})"
        ) from None
    tier = Tier(config, limits_of(config, records.pool.extents_bytes), SystemClock())
    with contextlib.closing(records):
        try:
            await tier.open(records.context(), must=True)
            await _check_adapter(options, tier, records)
            work = Work(tier, records)
            try:
                passes = [await work.run() for _ in range(options.rounds + 1)][1:]
            finally:
                if left := await work.end():
                    says = f"kvstrata bench l2: {left} records under random keys may be left in {config.name}"
                    print(says, file=sys.stderr)
        finally:
            await tier.close()
    return _figures(size_mb, records.record_bytes, passes)


async def _check_adapter(options: argparse.Namespace, tier: Tier, records: Records) -> None:
    can = tier.capabilities
    if options.batch > can.max_batch:
        raise ConfigError(f"--batch: {tier.name} takes {can.max_batch} records a call, found {options.batch}")
    if not can.can_delete:
        raise ConfigError(f"--l2-adapter: {tier.name} cannot delete records, so those of a run would stay")
    usage = await tier.usage()
    if usage.capacity_bytes and usage.records:
        raise Refused(
            f"--l2-adapter: {tier.name} has a cap, and holds {usage.records} other records, which it may evict "
            "for those of this run; name an empty base_path on the same medium, or an adapter without a cap"
        )
    need = records.count * records.record_bytes
    room = int(CAP_SHARE * usage.capacity_bytes) - usage.used_bytes
    if usage.capacity_bytes and need > room:
        raise Refused(
            f"--count: {need / MB:,.0f} MiB do not fit in the {max(0, room) / MB:,.0f} MiB that this run may use "
            f"of the {usage.capacity_bytes / MB:,.0f} MiB cap of {tier.name}; give a smaller --count or "
            "--chunk-mb, or a larger cap"
        )


def _figures(size_mb: float, record_length: int, passes: Sequence[Pass]) -> dict[str, Any]:
    """The figures of one size: rates have one value for each pass, times one for each call."""
    parts: dict[str, Any] = {}
    for name in ("put", "load"):
        rates = [each.moved_bytes / sum(getattr(each, name)) / 1e9 for each in passes]
        median, (least, greatest) = median_spread(rates)
        parts[name] = {
            "gb_per_s": {"median": median, "least": least, "greatest": greatest},
            "ms": _percentiles([s for each in passes for s in getattr(each, name)]),
        }
    parts["exists"] = {"ms": _percentiles([s for each in passes for s in each.exists])}
    moved = sum(each.moved_bytes for each in passes)
    return {"chunk_mb": size_mb, "record_bytes": record_length, "verified_bytes": moved, **parts}


def shown(report: dict[str, Any]) -> str:
    """The report as text."""
    rates, times = [], []
    for size in report["sizes"]:
        chunk = f"{size['chunk_mb']:g} MiB"
        for name in ("put", "load", "exists"):
            if name != "exists":
                found = size[name]["gb_per_s"]
                words = {"GB/s" if word == "median" else word: f"{rate:.3f}" for word, rate in found.items()}
                rates.append({"chunk": chunk, "operation": name, **words})
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
    need, available = record_bytes(1, int(size_mb * MB)) * (count + batch), available_bytes()
    if need > MEMORY_SHARE * available:
        raise Refused(
            f"--chunk-mb: {count} records and {batch} extents of {size_mb:g} MiB take {need / MB:,.0f} MiB, "
            f"more than half of the available memory ({available / MB:,.0f} MiB); give a smaller --count"
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
