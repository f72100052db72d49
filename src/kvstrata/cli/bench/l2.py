"""`kvstrata bench l2`: the speed of one L2 adapter on this host, beside raw O_DIRECT I/O, without a server.

The adapter is built from the JSON of the server's --l2-adapter, in the same wrappers (codecs, deadline and breaker) and
with the same lanes or adapter host.  For each size of record the adapter is opened, runs a warm-up and the measured
passes of measure/l2.py (with --burst: rounds of measure/burst.py), and is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvloop

from kvstrata import __version__
from kvstrata.cli.bench.flags import add_report_flags, progress, run_and_report, whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.clock import SystemClock
from kvstrata.config.flags import adapters_from_json
from kvstrata.errors import ConfigError, Refused, StorageError
from kvstrata.measure.burst import IDLE_S, LOOKUP_EVERY_S, LOOKUP_KEYS, Burst, Lookups, Round
from kvstrata.measure.figures import machine, median_spread, percentile
from kvstrata.measure.l2 import Interrupted, Pass, Records, Work, Workload
from kvstrata.measure.plot import draw_l2
from kvstrata.measure.raw_io import RawFiles, check_direct
from kvstrata.native.record import record_bytes
from kvstrata.storage.entry import TierConfig, configure_tier
from kvstrata.storage.lanes import Lane
from kvstrata.storage.stack import Surroundings, build_stack

T = TypeVar("T")

MB = 1 << 20
PAGE_BYTES = 4096
LARGEST_MB = 2048
SIZES, COUNT, BATCH = (1.0, 4.0, 32.0), 16, 8
BURST_SIZES, BURST_COUNT, BURST_BATCH = (1.0,), 1024, 64
DEFAULT_THREADS = 4
"""Threads of an adapter whose entry names none."""
MOST_THREADS = 256
MOST_CALLERS = 64
MEMORY_SHARE = 0.5
"""Largest share of the available memory that a run takes."""
CAP_SHARE = 0.9
"""Share of an adapter's cap that may be filled; above it the adapter might evict records before they are loaded."""


class Threads(NamedTuple):
    """Threads of raw I/O."""

    write: int
    read: int


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench l2`."""
    top = argparse.ArgumentParser(
        prog="kvstrata bench l2",
        description="Measure one L2 adapter on this host, verified, beside raw O_DIRECT I/O; needs no server.",
    )
    add = top.add_argument
    add("--l2-adapter", action="append", required=True, metavar="JSON",
        help='the adapter, as the server takes it: {"type": "fs", "base_path": "/mnt/nvme/kv"}')  # fmt: skip
    add("--chunk-mb", type=_sizes, action="extend", metavar="MB[,MB]",
        help="payload of a record in MiB; several as a list, or by repeating the flag (1,4,32)")  # fmt: skip
    add("--count", type=whole(1, 65_536), metavar="N", help=f"records in a pass ({COUNT})")
    add("--batch", type=whole(1, 1024), metavar="N", help=f"records in a call ({BATCH})")
    add("--rounds", type=whole(1, 1000), default=5, metavar="N",
        help="measured passes for each size, after one that warms up (%(default)s)")  # fmt: skip
    add("--burst", type=whole(1, MOST_CALLERS), metavar="N",
        help=f"measure lookups of {LOOKUP_KEYS} keys instead, alone and while N callers put a pass (no). Then by "
        f"default: --chunk-mb {BURST_SIZES[0]:g}, --count {BURST_COUNT}, --batch {BURST_BATCH}")  # fmt: skip
    add("--raw-dir", default="", metavar="DIR",
        help="directory for raw I/O, on the adapter's medium (the adapter's base_path)")  # fmt: skip
    add("--threads", type=whole(1, MOST_THREADS), metavar="N",
        help="threads of raw I/O (those of the adapter's entry, else 4)")  # fmt: skip
    add("--seed", type=whole(0, 1 << 62), default=0, metavar="N",
        help="seed of the records' random payloads (%(default)s); keys are always random")  # fmt: skip
    add("--keep", action="store_true", help="keep the records; otherwise they are deleted")
    add_report_flags(top)
    return top


@guarded("kvstrata bench l2")
def main(arguments: Sequence[str] | None) -> int:
    """Run the benchmark; returns 0. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    try:
        return run_and_report(options, run, shown=shown, draw=draw_l2)
    except Interrupted:
        raise KeyboardInterrupt from None


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the report. Raises KvstrataError or Interrupted; in any case nothing is running afterwards.

    Records that may be left in the adapter are reported on standard error.
    """
    entries = adapters_from_json(options.l2_adapter)
    if len(entries) != 1:
        raise ConfigError(f"--l2-adapter: must name one adapter, found {len(entries)}", field="l2_adapter")
    config = configure_tier(entries[0], 0)
    if options.burst:
        for flag in ("raw-dir", "threads", "keep", "svg"):
            if getattr(options, flag.replace("-", "_")):
                raise ConfigError(f"--{flag}: has no effect with --burst; leave one of them out")
    defaults = (BURST_SIZES, BURST_COUNT, BURST_BATCH) if options.burst else (SIZES, COUNT, BATCH)
    sizes = options.chunk_mb or list(defaults[0])
    options.count = options.count or defaults[1]
    options.batch = min(options.batch or defaults[2], options.count)
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"--chunk-mb: a size is named twice in {', '.join(f'{s:g}' for s in sizes)}")
    _check_memory(max(sizes), options.count, options.count if options.burst else options.batch)
    return uvloop.run(_Run(options, config, entries[0], sizes).report())


class _Run:
    """One run of the command, over all sizes."""

    def __init__(
        self, options: argparse.Namespace, config: TierConfig, entry: Mapping[str, Any], sizes: list[float]
    ) -> None:
        self._options = options
        self._config = config
        self._entry = entry
        self._sizes = sizes
        self._threads = raw_threads(options.threads, entry)
        self._notes: list[str] = []
        self._work: Work | None = None
        self._opening: asyncio.Task[None] | None = None
        self._stopped = False
        self._kept = 0
        self._evicted = 0

    async def report(self) -> dict[str, Any]:
        """Measure every size."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        load_before = os.getloadavg()[0]
        options = self._options
        passes = options.rounds + 1
        moves = passes if options.burst else 2 * passes
        total = sum(moves * options.count * record_bytes(1, int(size * MB)) for size in self._sizes)
        with progress(total, "B", self._notes) as moved:
            found = [await self._size(size, moved) for size in self._sizes]
        if self._kept:
            self._notes.append(f"--keep: {self._kept} records under random keys stay in {self._config.name}")
        if self._evicted:
            self._notes.append(f"the adapter's cap evicted {self._evicted} records meanwhile")
        codecs = self._entry.get("codec")
        if codecs:
            self._notes.append("payloads are random bytes, which no codec makes smaller")
        isolation = self._entry.get("isolation", "in_process")
        where = self._entry.get("base_path", "")
        words = [self._config.name, f"isolation {isolation}", *([f"codec {codecs}"] if codecs else []), where]
        return {
            "adapter": ", ".join(word for word in words if word),
            "version": __version__,
            "machine": machine(),
            "load": f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after (1 min average)",
            **(self._burst_words() if options.burst else self._pass_words(found)),
            "sizes": found,
            "notes": self._notes,
        }

    def _burst_words(self) -> dict[str, Any]:
        options = self._options
        return {
            "run": f"{options.burst} callers put {options.count} records in batches of {options.batch}, "
            f"{options.rounds} rounds of {IDLE_S:g} s idle and a burst",
            "lookups": f"of {min(LOOKUP_KEYS, 2 * options.count)} keys, half of them stored, one due every "
            f"{1e3 * LOOKUP_EVERY_S:g} ms",
        }

    def _pass_words(self, sizes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        options = self._options
        verified = sum(size["verified_bytes"] for size in sizes)
        return {
            "run": f"{options.count} records a pass in batches of {options.batch}, {options.rounds + 1} passes; "
            f"raw I/O with {self._threads.write} threads to write, {self._threads.read} to read",
            "verified": f"{verified / MB:,.0f} MiB came back byte for byte",
            "verified_bytes": verified,
        }

    async def _size(self, size_mb: float, moved: Callable[[int], None]) -> dict[str, Any]:
        options = self._options
        room = options.count if options.burst else options.batch
        try:
            records = Records(int(size_mb * MB), options.count, room, options.seed)
        except (OSError, MemoryError) as error:
            raise Refused(
                f"--chunk-mb: no memory for {options.count} records of {size_mb:g} MiB ({error})"
            ) from None
        around = Surroundings(SystemClock(), records.pool.extents_bytes, lambda report: None)
        built = build_stack(self._config, around)
        with contextlib.ExitStack() as ends:
            ends.callback(records.close)
            try:
                await self._open(built.adapter.open(records.context(self._was_evicted)))
                await self._check_adapter(built.adapter, records)
                if options.burst:
                    burst = Burst(built, records, callers=options.burst, batch=options.batch, moved=moved)
                    rounds = await self._measured(burst, lambda: self._rounds(burst))
                    return burst_figures(size_mb, records.record_bytes, rounds)
                raw = ends.enter_context(self._raw())
                work = Workload(built, records, raw, keep=options.keep, moved=moved)
                passes = await self._measured(work, lambda: self._passes(work))
                self._kept += work.kept
            finally:
                await built.adapter.close()
        return size_figures(size_mb, records.record_bytes, passes)

    async def _passes(self, work: Workload) -> list[Pass]:
        passes = [await work.run(number) for number in range(self._options.rounds + 1)]
        return passes[1:]

    async def _rounds(self, burst: Burst) -> list[Round]:
        await burst.warm_up()
        return [await burst.run() for _ in range(self._options.rounds)]

    async def _measured(self, work: Work, measure: Callable[[], Awaitable[T]]) -> T:
        """Run `measure`; afterwards delete the records of `work`, and report those that may be left."""
        self._work = work
        if self._stopped:
            raise Interrupted
        try:
            return await measure()
        except OSError as error:
            raise StorageError(f"--raw-dir: raw I/O failed: {error}") from None
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
        options = self._options
        can = adapter.capabilities
        if options.batch > can.max_batch:
            raise ConfigError(
                f"--batch: {adapter.name} takes {can.max_batch} records a call, found {options.batch}"
            )
        if not can.can_delete and not options.keep:
            raise ConfigError(
                f"--keep: {adapter.name} cannot delete records; give --keep to leave them there"
            )
        usage = await adapter.usage()
        others = usage.records - self._kept
        if usage.capacity_bytes and others > 0:
            raise Refused(
                f"--l2-adapter: {adapter.name} has a cap, and holds {others} other records, which it may evict for "
                "those of this run; name an empty base_path on the same medium, or an adapter without a cap"
            )
        passes_there = 2 if options.burst else options.rounds + 1 if options.keep else 1
        need = records.count * records.record_bytes * passes_there
        room = int(CAP_SHARE * usage.capacity_bytes) - usage.used_bytes
        if usage.capacity_bytes and need > room:
            raise Refused(
                f"--count: {need / MB:,.0f} MiB do not fit in the {max(0, room) / MB:,.0f} MiB that this run may use "
                f"of the {usage.capacity_bytes / MB:,.0f} MiB cap of {adapter.name}; give a smaller --count or "
                "--chunk-mb, or a larger cap"
            )

    @contextlib.contextmanager
    def _raw(self) -> Iterator[RawFiles | None]:
        """Raw I/O in a fresh folder, which is removed afterwards; None, with a note, if no folder supports it."""
        given = self._options.raw_dir
        base = given or self._entry.get("base_path")
        if not isinstance(base, str):
            self._note("no raw I/O beside it: the adapter has no base_path; give --raw-dir")
            yield None
            return
        folder = Path(base).expanduser()
        try:
            check_direct(folder)
        except StorageError as error:
            if given:
                raise StorageError(f"--raw-dir: {error.message}") from None
            self._note(f"no raw I/O beside it: {error.message}; give --raw-dir")
            yield None
            return
        try:
            own = Path(tempfile.mkdtemp(prefix="kvstrata-bench-", dir=folder))
        except OSError as error:
            raise StorageError(f"--raw-dir: {folder}: no folder can be made in it: {error}") from None
        raw = RawFiles(own, self._threads.write, self._threads.read)
        try:
            yield raw
        finally:
            raw.close()
            shutil.rmtree(own)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _was_evicted(self, key: bytes) -> None:
        self._evicted += 1

    def _stop(self) -> None:
        self._stopped = True
        if self._opening is not None:
            self._opening.cancel()
        if self._work is not None:
            self._work.stop()


def size_figures(size_mb: float, record_length: int, passes: Sequence[Pass]) -> dict[str, Any]:
    """The figures of one size: rates and ratios have one value for each pass, times one for each call."""
    moved = sum(each.moved_bytes for each in passes)
    parts: dict[str, Any] = {}
    for name, raw in (("put", "raw_write"), ("load", "raw_read")):
        ours = [each.moved_bytes / sum(getattr(each, name)) / 1e9 for each in passes]
        beside = [each.moved_bytes / sum(getattr(each, raw)) / 1e9 for each in passes if getattr(each, raw)]
        parts[name] = {
            "gb_per_s": _spread(ours),
            "raw_gb_per_s": _spread(beside) if beside else None,
            "ratio": _spread([a / b for a, b in zip(ours, beside, strict=True)]) if beside else None,
            "ms": _percentiles([s for each in passes for s in getattr(each, name)]),
        }
    parts["exists"] = {"ms": _percentiles([s for each in passes for s in each.exists])}
    return {"chunk_mb": size_mb, "record_bytes": record_length, "verified_bytes": moved, **parts}


def burst_figures(size_mb: float, record_length: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of one size: lookups of all rounds together, and the rate of each round's burst."""
    idle, burst = _lookups([each.idle for each in rounds]), _lookups([each.burst for each in rounds])
    return {
        "chunk_mb": size_mb,
        "record_bytes": record_length,
        "idle": idle,
        "burst": {**burst, "gb_per_s": _spread([each.put_bytes / each.put_s / 1e9 for each in rounds])},
        "p99_ratio": burst["ms"]["p99"] / idle["ms"]["p99"],
    }


def _lookups(taken: Sequence[Lookups]) -> dict[str, Any]:
    """The times and counts of lookups. Raises Refused if no lookup was answered."""
    answered = [s for each in taken for s in each.answered]
    if not answered:
        raise Refused(
            "--burst: no lookup was answered; give the adapter a longer deadline_ms, or fewer callers"
        )
    return {"ms": _percentiles(answered), "unknown": sum(each.unknown for each in taken)}


def _shown_burst(report: dict[str, Any]) -> str:
    heads = {name: report[name] for name in ("adapter", "machine", "load", "run", "lookups")}
    lines = []
    for size in report["sizes"]:
        for name in ("idle", "burst"):
            found = size[name]
            ms = found["ms"]
            lines.append(
                {
                    "chunk": f"{size['chunk_mb']:g} MiB",
                    "ms a lookup": name,
                    **{word: f"{ms[word]:.3f}" for word in ("p50", "p95", "p99", "greatest")},
                    "lookups": ms["calls"],
                    "unknown": found["unknown"],
                    "p99 to idle": f"{size['p99_ratio']:.2f}" if name == "burst" else "",
                    "put GB/s": f"{found['gb_per_s']['median']:.3f}" if name == "burst" else "",
                }
            )
    return f"{table(heads)}\n\n{table(lines)}"


def shown(report: dict[str, Any]) -> str:
    """The report as text."""
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return (_shown_burst(report) if "lookups" in report else _shown_passes(report)) + notes


def _shown_passes(report: dict[str, Any]) -> str:
    rates, times = [], []
    for size in report["sizes"]:
        chunk = f"{size['chunk_mb']:g} MiB"
        for name in ("put", "load"):
            found = size[name]
            raw, ratio = found["raw_gb_per_s"], found["ratio"]
            rates.append(
                {
                    "chunk": chunk,
                    "operation": name,
                    "GB/s": f"{found['gb_per_s']['median']:.3f}",
                    "least": f"{found['gb_per_s']['least']:.3f}",
                    "greatest": f"{found['gb_per_s']['greatest']:.3f}",
                    "raw GB/s": f"{raw['median']:.3f}" if raw else "-",
                    "ratio to raw": f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['greatest']:.2f})"
                    if ratio
                    else "-",
                }
            )
        for name in ("put", "load", "exists"):
            ms = size[name]["ms"]
            words = {word: f"{ms[word]:.3f}" for word in ("p50", "p95", "p99", "greatest")}
            times.append({"chunk": chunk, "ms a call": name, **words, "calls": ms["calls"]})
    heads = {name: report[name] for name in ("adapter", "machine", "load", "run", "verified")}
    return f"{table(heads)}\n\n{table(rates)}\n\n{table(times)}"


def _spread(values: Sequence[float]) -> dict[str, float]:
    median, (least, greatest) = median_spread(values)
    return {"median": median, "least": least, "greatest": greatest}


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ms = [1e3 * each for each in seconds]
    shares = {f"p{100 * share:.0f}": percentile(ms, share) for share in (0.5, 0.95, 0.99)}
    return {**shares, "greatest": max(ms), "calls": len(ms)}


def raw_threads(given: int | None, entry: Mapping[str, Any]) -> Threads:
    """The threads `given`, else those that the entry names for puts and loads, in the fields of `fs` and `disk`."""
    if given:
        return Threads(given, given)
    own = entry.get("per_op_workers")
    lanes = own if isinstance(own, Mapping) else {}

    def of(lane: Lane) -> int:
        for count in (lanes.get(str(lane)), entry.get("num_workers")):
            if isinstance(count, int) and 1 <= count <= MOST_THREADS:
                return count
        return DEFAULT_THREADS

    return Threads(of(Lane.PUT), of(Lane.LOAD))


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
        sizes.append(size)
    return sizes
