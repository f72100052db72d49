"""`kvstrata replay`: what L1s of several sizes would have hit on recorded requests, by the server's own policy.

It reads what a server with `observability.record` writes, and traces in the form published with Mooncake (FAST 2025):
JSON lines with `timestamp` (ms) and `hash_ids`, one for each block of the prompt, equal for equal prefixes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.cli.boundary import Exit, guarded
from kvstrata.errors import ConfigError
from kvstrata.observability.load_line import TOKENS_DEPTH

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


@guarded("kvstrata replay")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status."""
    from kvstrata.cli.table import table
    from kvstrata.native.core import Shadow

    given = parser().parse_args(arguments)
    if given.store == "late" and not given.engine_gb:
        raise ConfigError(
            "--store late: needs --engine-gb, the size of the engines' own caches", field="store"
        )
    chunk_tokens, logs = given.chunk_tokens, []
    for path in given.files:
        tokens, log = read(path)
        chunk_tokens = tokens or chunk_tokens
        logs.append(log)
    rows: list[dict[str, Any]] = []
    for size_gb in given.l1_size_gb:
        capacity = int(size_gb * 1e9 / (given.chunk_mb * (1 << 20)))
        row: dict[str, Any] = {"l1_size_gb": size_gb, "chunks": capacity}
        for policy in ("VALUE", "LRU"):
            shadow = Shadow(
                capacity=capacity,
                policy=policy,
                depth_cost=TOKENS_DEPTH * chunk_tokens,
                refuses=not given.l2,
                engine_chunks=int(given.engine_gb * 1e9 / (given.chunk_mb * (1 << 20))),
                late=given.store == "late",
            )
            for path, log in zip(given.files, logs, strict=True):
                if not shadow.replay(log):
                    raise ConfigError(f"{path}: ends within a request: the file was cut", field="files")
            chunks, hit_chunks, cost, hit_cost = shadow.sums
            if not chunks:
                raise ConfigError("the files hold no request", field="files")
            row |= {
                f"hits_{policy}": round(hit_chunks / chunks, 4),
                f"seconds_{policy}": round(hit_cost / cost, 4),
            }
        rows.append(row)
    if given.plot:
        try:
            given.plot.write_text(plot(rows))
        except OSError as error:
            raise ConfigError(f"--plot: {given.plot}: {error.strerror}", field="plot") from None
    print(json.dumps({"sizes": rows}) if given.json else table(rows))
    return Exit.DONE


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata replay`."""
    import argparse
    from pathlib import Path

    def positive(text: str) -> float:
        value = float(text)
        if not 0 < value < 1e9:
            raise ValueError(text)
        return value

    positive.__name__ = "number above 0"
    top = argparse.ArgumentParser(
        prog="kvstrata replay",
        description="Shares of the chunks that L1s of these sizes would have hit, and of the prefill seconds that they "
        "would have saved, on recorded requests.",
    )
    top.add_argument("files", nargs="+", type=Path, metavar="FILE",
        help="files of observability.record, oldest first, or traces in Mooncake's form")  # fmt: skip
    top.add_argument(
        "--l1-size-gb", nargs="+", type=positive, default=[16.0, 32.0, 64.0, 128.0, 256.0], metavar="GB"
    )
    top.add_argument("--chunk-mb", type=positive, required=True,
        help="MiB that a chunk takes in L1: pool.used_bytes ÷ pool.entries.ready of the server's status")  # fmt: skip
    top.add_argument("--chunk-tokens", type=int, default=512,
        help="tokens of a block of a trace (%(default)s); recorded files say it themselves")  # fmt: skip
    top.add_argument("--l2", action="store_true", help="with an L2: no chunk is refused")
    top.add_argument("--engine-gb", type=positive, default=0.0, metavar="GB",
        help="KV that the engines' own caches hold together; what these hit counts too")  # fmt: skip
    top.add_argument("--store", choices=("commit", "late"), default="commit",
        help="engines store a chunk as soon as it is computed, or when their own cache loses it")  # fmt: skip
    top.add_argument("--json", action="store_true")
    top.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves into this file, too")
    return top


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """The shares by size as a picture in SVG; sizes on a logarithmic scale."""
    import math

    rows = sorted(rows, key=lambda row: row["l1_size_gb"])
    names = [name for name in rows[0] if name.startswith(("hits_", "seconds_"))]
    logs = [math.log(row["l1_size_gb"]) for row in rows]
    low, span = min(logs), max(logs) - min(logs) or 1.0
    at = [60 + 440 * (log - low) / span for log in logs]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="660" height="340" font-family="sans-serif" font-size="12">',
        '<rect width="660" height="340" fill="white"/><text x="20" y="16">share of chunks hit, of seconds saved</text>',
    ]
    for mark in range(0, 101, 25):
        y = 300 - 2.7 * mark
        parts.append(
            f'<path d="M60 {y}H500" stroke="#ddd"/><text x="52" y="{y + 4}" text-anchor="end">{mark} %</text>'
        )
    for x, row in zip(at, rows, strict=True):
        parts.append(f'<text x="{x:.1f}" y="318" text-anchor="middle">{row["l1_size_gb"]:g}</text>')
    for number, name in enumerate(names):
        colour, dash = ("#0b6", "#c33")["LRU" in name], ("none", "5 3")["hits" in name]
        points = " ".join(f"{x:.1f},{300 - 270 * row[name]:.1f}" for x, row in zip(at, rows, strict=True))
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        y = 40 + 20 * number
        parts.append(f'<polyline points="{points}" {style}/><path d="M515 {y}h30" {style}/>')
        parts.append(f'<text x="551" y="{y + 4}">{name.replace("_", ", ")}</text>')
    return "\n".join([*parts, '<text x="280" y="334" text-anchor="middle">GB of L1</text></svg>', ""])


def read(path: Path) -> tuple[int, bytes]:
    """Tokens of a chunk, 0 if unknown, and the requests. Raises ConfigError naming the file and the line."""
    from kvstrata.server.request_log import HEADER, MAGIC

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="files") from None
    if content.startswith(MAGIC[:6]):
        if len(content) < HEADER.size or not content.startswith(MAGIC):
            raise ConfigError(f"{path}: written by another version of kvstrata", field="files")
        return HEADER.unpack_from(content)[1], content[HEADER.size :]
    requests = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            one = json.loads(line)
            blocks: list[int] = one["hash_ids"]
            at_ns = int(one["timestamp"] * 1e6)
            requests.append(struct.pack(f"<QII{len(blocks)}q", at_ns, len(blocks), 0, *blocks))
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ConfigError(
                f"{path}: line {number} is no request with timestamp and hash_ids: {error!r:.80}",
                field="files",
            ) from None
    return 0, b"".join(requests)
