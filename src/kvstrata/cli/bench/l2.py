"""`kvstrata bench l2`: the speed of one L2 adapter on this host, without a server.

The adapter is built from the JSON of the server's --l2-adapter, as the same tier (codecs, deadline and breaker) and
with the same lanes or adapter host; it runs a warm-up and the measured passes of measure/l2.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
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
from kvstrata.measure.figures import machine, percentile
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
        description="Measure one L2 adapter on this host without a server, and verify the bytes that it returns.",
    )
    add = top.add_argument
    add("--l2-adapter", action="append", required=True, metavar="JSON",
        help='the adapter, in the form of the server\'s flag: {"type": "fs", "base_path": "/mnt/nvme/kv"}')  # fmt: skip
    add(
        "--chunk-mb",
        type=_payload_bytes,
        default="4",
        metavar="MB",
        help="payload of a record in MiB (%(default)s)",
    )
    add("--count", type=whole(1, 65_536), default=16, metavar="N", help="records in a pass (%(default)s)")
    add("--batch", type=whole(1, 1024), default=8, metavar="N", help="records in a call (%(default)s)")
    add("--rounds", type=whole(1, 1000), default=5, metavar="N",
        help="measured passes, after one warm-up pass (%(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
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
    need = record_bytes(1, options.chunk_mb) * (options.count + options.batch)
    if need > MEMORY_SHARE * (available := available_bytes()):
        raise Refused(
            f"--count: the run takes {need / MB:,.0f} MiB, more than half of the available memory "
            f"({available / MB:,.0f} MiB); give a smaller --count or --chunk-mb"
        )
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
    """Measure; returns the report. The run's records are deleted, and those that may be left are reported."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        records = Records(options.chunk_mb, options.count, options.batch)
    except (OSError, MemoryError) as error:
        raise Refused(f"--count: no memory for {options.count} records ({error}); give fewer") from None
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
    codecs, moved_bytes = entry.get("codec"), sum(each.moved_bytes for each in passes)
    place = [f"codec {codecs}" if codecs else "", entry.get("base_path", "")]
    return {
        "adapter": ", ".join(filter(None, [config.name, *place])),
        "version": __version__,
        "machine": machine(),
        "run": f"{options.count} records of {options.chunk_mb / MB:g} MiB a pass, in batches of {options.batch}, "
        f"{options.rounds + 1} passes",
        "verified": f"{moved_bytes / MB:,.0f} MiB came back byte for byte",
        "verified_bytes": moved_bytes,
        **_figures(passes),
        "notes": ["payloads are random bytes, which no codec makes smaller"] if codecs else [],
    }


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


def shown(report: dict[str, Any]) -> str:
    """The report as text."""
    rows = []
    for name in ("put", "load", "exists"):
        found = report[name]
        ms = {f"{word} ms": f"{found[word]:.3f}" for word in ("p50", "p99")}
        rows.append({"call": name, "GB/s": f"{found['gb_per_s']:.3f}" if name != "exists" else "", **ms})
    heads = {name: report[name] for name in ("adapter", "machine", "run", "verified")}
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return f"{table(heads)}\n\n{table(rows)}{notes}"


def _figures(passes: Sequence[Pass]) -> dict[str, Any]:
    """Rates are medians of the passes, times percentiles of all calls."""
    figures: dict[str, Any] = {}
    for name in ("put", "load", "exists"):
        ms = [1e3 * seconds for each in passes for seconds in getattr(each, name)]
        figures[name] = {"p50": percentile(ms, 0.5), "p99": percentile(ms, 0.99), "calls": len(ms)}
    for name in ("put", "load"):
        rates = [each.moved_bytes / sum(getattr(each, name)) / 1e9 for each in passes]
        figures[name]["gb_per_s"] = statistics.median(rates)
    return figures


def _payload_bytes(text: str) -> int:
    """The bytes of a payload, from a flag in MiB."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not PAGE_BYTES / MB <= size <= LARGEST_MB or size * MB % PAGE_BYTES:
        raise argparse.ArgumentTypeError(
            f"must be MiB from 1/256 to {LARGEST_MB}, whole pages of {PAGE_BYTES} bytes, found {text!r}"
        )
    return int(size * MB)
