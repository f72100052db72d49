"""`disk_write_amp*`: what the disk log writes for a byte that is put, once it is full, over metadata only.

    python -m benchmarks.disk_write_amp --trace FILE

ext/core/bench/disk_replay.cpp runs the real log on files in memory that keep everything but zeros, with records whose
payloads are zeros: its policy, frames, tables and checksums are those of a server, and a log of tens of GB takes some
MB.  A record of 1 MiB stands for a block of 512 tokens (64 MiB for Llama-8B): only the frame's header of 4 KiB weighs
more then.

- `disk_write_amp`: the requests of a trace (see benchmarks/policies.py for its form).  Each loads the leading blocks
  that are there and puts the others.  No L1 is before the log, so all hits are its loads: as much is written again as
  can be.  The worst of logs that hold 5, 10 and 20 % of the distinct blocks.
- `disk_write_amp_synthetic`: the same of a synthetic trace, which is what `make bench` does.
- `disk_write_amp_uniform`: keys drawn uniformly from twice as many as fit, loaded where they are there, else put.

Counted is from the first segment that retired: from then on live records are nine tenths of the log and more.

Sketch: a frame's header and table are 0.4 %; what retires may be written again up to a fifth, so the bound is
1 / (1 - 0.2) = 1.25 and those.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import figure, sized
from benchmarks.run import merge
from kvstrata.measure.workloads import TraceRequest, read_trace, synthetic_trace

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "ext" / "core"
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
    """What a replay says."""

    ratio: float
    """Bytes written for bytes put."""
    hit_share: float
    full_share: float
    """Live bytes of the log's capacity, at the end."""
    reinserted_share: float
    """Of the bytes that retired segments held."""


def replayed(capacity_bytes: int, accesses: Iterable[str]) -> Amplified:
    """From the first segment that retired. Raises RuntimeError where none did."""
    lines = "".join(with_counts(accesses))
    done = subprocess.run(
        [PROGRAM, str(capacity_bytes), str(RECORD_BYTES)], input=lines, capture_output=True, text=True
    )
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
    """The lines for the program."""
    for number, access in enumerate(accesses):
        yield f"{access}\n"
        if number % ACCESSES_OF_COUNT == 0:
            yield "counts\n"
    yield "counts\n"


def uniform() -> Iterator[str]:
    """One key after the other."""
    draw = random.Random(1)
    for _ in range(UNIFORM_ACCESSES):
        yield f"use {draw.randrange(UNIFORM_KEYS)}"


def of_prompts(prompts: Iterable[TraceRequest]) -> Iterator[str]:
    """One request after the other."""
    return (f"use {' '.join(map(str, prompt.blocks))}" for prompt in prompts)


def trace_figure(name: str, prompts: list[TraceRequest], what: str) -> dict[str, Any]:
    """The worst of SHARES; each is in `logs`."""
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
    """Compile it with the library that `make setup` made of ext/core/src. Raises RuntimeError."""
    made = [*(ROOT / "build" / "native").glob("core-*/libkvstrata_core.a")]
    if not made:
        raise RuntimeError("build/native holds no libkvstrata_core.a: run `make setup`")
    newest = max(made, key=lambda library: library.stat().st_mtime_ns)
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *("g++", "-std=c++20", "-O2", "-UNDEBUG", "-pthread", f"-I{CORE / 'include'}", f"-I{CORE / 'tests'}"),
        *(CORE / "bench" / "disk_replay.cpp", newest, "-ldl", "-o", PROGRAM),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")


def run() -> list[dict[str, Any]]:
    """The figures that need no trace."""
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
    """Command line: the figure of a trace, into build/bench.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, as for benchmarks.policies")
    arguments = parser.parse_args()
    make_program()
    found = trace_figure("disk_write_amp", read_trace(arguments.trace), arguments.trace.name)
    merge([found])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
