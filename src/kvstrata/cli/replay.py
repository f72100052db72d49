"""`kvstrata replay`: simulates the hits of L1s of several sizes on recorded requests, with the server's own policy.

It reads logs of a server with `observability.record`, and traces in the format published with Mooncake (FAST 2025):
JSON lines with `timestamp` (ms) and `hash_ids`, one for each block of the prompt, equal for equal prefixes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvstrata.cli.bench import whole
from kvstrata.cli.boundary import Exit, guarded
from kvstrata.errors import ConfigError
from kvstrata.observability.load_line import TOKENS_DEPTH
from kvstrata.types import GB

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
        tokens, log, turns = read(path, Turn)
        chunk_tokens = tokens or chunk_tokens
        logs.append(log or b"".join(turn.logged() for turn in turns))
    rows: list[dict[str, Any]] = []
    for size_gb in given.l1_size_gb:
        capacity = int(size_gb * GB / (given.chunk_mb * (1 << 20)))
        row: dict[str, Any] = {"l1_size_gb": size_gb, "chunks": capacity}
        for policy in ("VALUE", "LRU"):
            shadow = Shadow(
                capacity=capacity,
                policy=policy,
                depth_cost=TOKENS_DEPTH * chunk_tokens,
                refuses=not given.l2,
                engine_chunks=int(given.engine_gb * GB / (given.chunk_mb * (1 << 20))),
                late=given.store == "late",
            )
            for path, log in zip(given.files, logs, strict=True):
                if not shadow.replay(log):
                    raise ConfigError(f"{path}: is truncated: the last request is incomplete", field="files")
            chunks, hit_chunks, cost, hit_cost = shadow.sums
            if not chunks:
                raise ConfigError("FILE: the files contain no request", field="files")
            row |= {
                f"hits_{policy}": round(hit_chunks / chunks, 4),
                f"seconds_{policy}": round(hit_cost / cost, 4),
            }
        rows.append(row)
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
        description="Compute the share of the chunks of recorded requests that L1s of these sizes would have hit, and "
        "the share of the prefill seconds that they would have saved.",
    )
    top.add_argument("files", nargs="+", type=Path, metavar="FILE",
        help="files of observability.record, oldest first, or traces in Mooncake's format")  # fmt: skip
    top.add_argument(
        "--l1-size-gb", nargs="+", type=positive, default=[16.0, 32.0, 64.0, 128.0, 256.0], metavar="GB",
        help="sizes of L1 (%(default)s)")  # fmt: skip
    top.add_argument("--chunk-mb", type=positive, required=True,
        help="size of a chunk in L1 in MiB: pool.used_bytes ÷ pool.entries.ready of the server's status")  # fmt: skip
    top.add_argument("--chunk-tokens", type=whole(1, 1 << 20), default=512,
        help="tokens in a block of a trace (%(default)s); recorded files contain this number")  # fmt: skip
    top.add_argument("--l2", action="store_true", help="simulate an L2, so that L1 refuses no chunk")
    top.add_argument("--engine-gb", type=positive, default=0.0, metavar="GB",
        help="total size of the engines' own caches; their hits count too")  # fmt: skip
    top.add_argument("--store", choices=("commit", "late"), default="commit",
        help="when engines store a chunk: once computed, or when their own cache evicts it (%(default)s)")  # fmt: skip
    top.add_argument("--json", action="store_true", help="print JSON")
    return top


class Turn(msgspec.Struct):
    """A request of a trace."""

    timestamp: Annotated[float, Meta(ge=0, le=1e13)]
    hash_ids: Annotated[list[Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]], Meta(max_length=1 << 20)] = []

    def logged(self) -> bytes:
        """As a server's log has it."""
        count = len(self.hash_ids)
        return struct.pack(f"<QII{count}q", int(self.timestamp * 1e6), count, 0, *self.hash_ids)


T = TypeVar("T", bound=Turn)


def read(path: Path, kind: type[T]) -> tuple[int, bytes, list[T]]:
    """Tokens of a chunk and the requests of a server's log; or 0, and the requests of a trace of this kind.

    Raises ConfigError naming the file and the line.
    """
    from kvstrata.server.request_log import HEADER, MAGIC

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="files") from None
    if content.startswith(MAGIC[:6]):
        if len(content) < HEADER.size or not content.startswith(MAGIC):
            raise ConfigError(f"{path}: is for another version of kvstrata; use that version", field="files")
        return HEADER.unpack_from(content)[1], content[HEADER.size :], []
    decode, rows = msgspec.json.Decoder(kind).decode, list[T]()
    for number, line in enumerate(content.splitlines(), 1):
        try:
            rows.append(decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: line {number}: not a request: {error}", field="files") from None
    return 0, b"", rows
