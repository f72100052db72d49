"""`disk_write_amp*`: how many bytes a full disk log writes for each byte that is put, replayed without payloads.

    python -m benchmarks.disk_write_amp --trace FILE

benchmarks/native/disk_replay.cpp runs the real log on sparse files in /dev/shm, with records whose payloads are zeros.
Its policy, frames, tables and checksums are those of a server, and a log of tens of GB takes some MB of memory.  A
record of 1 MiB stands for a block of 512 tokens (64 MiB for Llama-8B); with such small records the header of a frame,
of 4 KiB, weighs more than in reality.

- `disk_write_amp`: the requests of a trace (benchmarks/policies.py describes its form).  Each request loads the leading
  blocks that are stored and puts the others.  The log has no L1 in front of it, so all hits are loads from the log, and
  as many records as possible are written again.  The figure is the worst of logs that hold 5, 10 and 20 % of the
  distinct blocks.
- `disk_write_amp_synthetic`: the same with a synthetic trace; `make bench` measures this one.
- `disk_write_amp_uniform`: keys drawn uniformly from twice as many as fit; a stored key is loaded, another one is put.

Counting begins with the first segment that retires: from then on live records are at least nine tenths of the log.

Sketch: a frame's header and table are 0.4 %; up to a fifth of a retiring segment may be written again, so the bound is
1 / (1 - 0.2) = 1.25, plus those 0.4 %.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import figure, sized
from benchmarks.run import RESULTS, merge
from benchmarks.traces import TraceRequest, read_trace, synthetic_trace

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build" / "native" / "bench" / "disk_replay"
RECORD_BYTES = 1 << 20
FRAME_BYTES = RECORD_BYTES + 4096
SHARES = sized((0.05, 0.10, 0.20), (0.10,))
UNIFORM_RECORDS = sized(16_000, 2_000)
UNIFORM_KEYS = 2 * UNIFORM_RECORDS
UNIFORM_ACCESSES = 8 * UNIFORM_RECORDS
ACCESSES_OF_COUNT = sized(100, 10)
TARGET = 1.3


class Amplified(NamedTuple):
    """The result of a replay."""

    ratio: float
    """Bytes written per byte put."""
    hit_share: float
    full_share: float
    """Share of the log's capacity that live records have at the end."""
    reinserted_share: float
    """Share of the bytes of retired segments that were written again."""


def replayed(capacity_bytes: int, accesses: Iterable[str]) -> Amplified:
    """Replay accesses and count from the first segment that retires. Raises RuntimeError if no segment retires."""
    lines = "".join(with_counts(accesses))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [PROGRAM, str(capacity_bytes), str(RECORD_BYTES), f"{folder}/log"]
        done = subprocess.run(command, input=lines, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    counts = [json.loads(line) for line in done.stdout.splitlines()]
    last = counts[-1]
    first = next((count for count in counts if count["retired_segments"]), last)
    if first["put_bytes"] == last["put_bytes"]:
        raise RuntimeError("the accesses do not fill the log")
    of = {name: last[name] - first[name] for name in last}
    evicted_bytes = of["evicted_records"] * FRAME_BYTES
    return Amplified(
        of["written_bytes"] / of["put_bytes"],
        of["loaded"] / of["asked"],
        last["used_bytes"] / capacity_bytes,
        of["reinserted_bytes"] / (of["reinserted_bytes"] + evicted_bytes),
    )


def with_counts(accesses: Iterable[str]) -> Iterator[str]:
    """Yield the program's input: the accesses, and orders to print its counts."""
    for number, access in enumerate(accesses):
        yield f"{access}\n"
        if number % ACCESSES_OF_COUNT == 0:
            yield "counts\n"
    yield "counts\n"


def uniform() -> Iterator[str]:
    """Yield accesses to keys drawn uniformly."""
    draw = random.Random(1)
    for _ in range(UNIFORM_ACCESSES):
        yield f"use {draw.randrange(UNIFORM_KEYS)}"


def of_prompts(prompts: Iterable[TraceRequest]) -> Iterator[str]:
    """Yield the accesses of the requests of a trace."""
    return (f"use {' '.join(map(str, prompt.blocks))}" for prompt in prompts)


def trace_figure(name: str, prompts: list[TraceRequest], what: str) -> dict[str, Any]:
    """Return the figure of a trace: the worst of SHARES, all of which are in `logs`."""
    blocks = len({block for prompt in prompts for block in prompt.blocks})
    logs = {share: replayed(int(share * blocks) * FRAME_BYTES, of_prompts(prompts)) for share in SHARES}
    worst = max(logs.values())
    return figure(
        name,
        value=worst.ratio,
        unit="written/put",
        ratio=worst.ratio / TARGET,
        ratio_to="the target",
        target=f"≤ {TARGET}",
        ok=worst.ratio <= TARGET,
        spread=[min(logs.values()).ratio, worst.ratio],
        trace=what,
        logs={f"{share:.0%} of {blocks} blocks": log._asdict() for share, log in logs.items()},
    )


def make_program() -> None:
    """Compile the program if its sources have changed. Raises RuntimeError with the compiler's output."""
    source, target = "benchmarks/native/disk_replay.cpp", str(PROGRAM.relative_to(ROOT))
    command = [sys.executable, "ext/make", "program", source, target]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")


def run() -> list[dict[str, Any]]:
    """Measure the figures that need no trace."""
    make_program()
    found = replayed(UNIFORM_RECORDS * FRAME_BYTES, uniform())
    return [
        trace_figure("disk_write_amp_synthetic", synthetic_trace(sized(6000, 600)), "synthetic"),
        figure(
            "disk_write_amp_uniform",
            value=found.ratio,
            unit="written/put",
            ratio=found.ratio / TARGET,
            ratio_to="the target of the trace",
            target="reported: uniform keys, twice as many as fit",
            ok=True,
            log=found._asdict(),
        ),
    ]


def main() -> None:
    """Run the command line: measure the figure of a trace and write it into build/bench.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, as for benchmarks.policies")
    arguments = parser.parse_args()
    make_program()
    found = trace_figure("disk_write_amp", read_trace(arguments.trace), arguments.trace.name)
    merge([found], RESULTS)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
