"""`kvstrata plan`: predicts which configuration serves a recorded trace best (controller/plan.py).

A trace is a log that a server with `observability.record` has written (it lacks the lengths of answers), or a file in
the format of Mooncake's published traces, with one JSON object per request and line: `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, and `hash_ids`, one prefix hash per 512-token block of the prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.cli.bench import whole
from kvstrata.cli.boundary import Exit, guarded
from kvstrata.cli.replay import Turn, read
from kvstrata.cli.table import table
from kvstrata.controller.plan import Engine, Predicted, Shape, predict
from kvstrata.errors import ConfigError
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.types import GB

BLOCK_TOKENS = 512
REQUEST = struct.Struct("<QII")
"""Record in the log of requests: nanoseconds, number of chunks, 0; eight bytes for each chunk follow."""
MAX_REQUESTS = 1_000_000
MAX_GPUS = 64
WINDOW_S = 60.0
SIZES = (0.5, 1, 2, 4, 8)
ENOUGH = 0.05
"""Share of the seconds of computing that each doubling of the memory must save to be worth it."""


class Row(Turn, kw_only=True):
    """A request with its lengths."""

    input_length: Annotated[int, Meta(ge=1, le=1 << 24)]
    output_length: Annotated[int, Meta(ge=0, le=1 << 24)]


class Window(NamedTuple):
    """The result of one part of the trace with one size of L1."""

    engine: Engine
    shapes: list[Shape]


@guarded("kvstrata plan")
def main(arguments: Sequence[str] | None) -> int:
    """Run the command; returns the exit status."""
    given = parser().parse_args(arguments)
    (block_tokens, rows), model = read_trace(given.trace, given.answer_tokens), read_model(given.model)
    report = planned(given, rows, block_tokens, model)
    print(json.dumps(report, indent=1) if given.json else table(report))
    return Exit.DONE


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata plan`."""
    top = argparse.ArgumentParser(
        prog="kvstrata plan",
        description="Compute the configuration that serves a recorded trace best, and the gain of more L1 or engines.",
    )
    add = top.add_argument
    add("--trace", required=True, metavar="FILE", help="file of observability.record, or one JSON object "
        "per line: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks")  # fmt: skip
    add("--model", default="", metavar="FILE", help="JSON file with the step times of an engine, named as the "
        "flags of `kvstrata sim`: step_us, prefill_token_us, … (an 8B model on an H100)")  # fmt: skip
    add("--gpus", type=whole(1, MAX_GPUS), required=True, metavar="N", help="number of engines")
    add("--l1-gb", type=whole(1, 1 << 20), default=64, metavar="GB", help="size of L1 (%(default)s)")
    add("--kv-token-bytes", type=whole(1, 1 << 30), default=131_072, metavar="N",
        help="bytes of one token's KV (%(default)s)")  # fmt: skip
    add("--ttft-ms", type=whole(0, 3_600_000), default=2_000, metavar="N",
        help="target for the time to the first token; 0: no target (%(default)s)")  # fmt: skip
    add("--tpot-ms", type=whole(0, 3_600_000), default=50, metavar="N",
        help="target for the time per further token; 0: no target (%(default)s)")  # fmt: skip
    add("--answer-tokens", type=whole(1, 1 << 24), default=256, metavar="N",
        help="tokens of an answer, for files of observability.record, which lack them (%(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return top


def read_trace(path: str, answer_tokens: int) -> tuple[int, list[Row]]:
    """Tokens of a block, and the requests in the order of their times. Raises ConfigError."""
    block_tokens, log, rows = read(Path(path), Row)
    rows = rows or list(_of_log(log, block_tokens, answer_tokens))
    if len(rows) > MAX_REQUESTS:
        raise ConfigError(f"--trace: more than {MAX_REQUESTS} requests; give a part of it", field="--trace")
    if len(rows) < 2 or max(one.timestamp for one in rows) == min(one.timestamp for one in rows):
        raise ConfigError(
            f"--trace: {path:.200} must have two requests with different timestamps", field="--trace"
        )
    return block_tokens or BLOCK_TOKENS, sorted(rows, key=lambda one: one.timestamp)


def _of_log(log: bytes, block_tokens: int, answer_tokens: int) -> Iterator[Row]:
    """The requests with at least one whole chunk; a request at the end that was cut is left out."""
    at = 0
    while at + REQUEST.size <= len(log):
        at_ns, count, _ = REQUEST.unpack_from(log, at)
        at += REQUEST.size
        if at + 8 * count > len(log):
            return
        ids = list(struct.unpack_from(f"<{count}q", log, at))
        at += 8 * count
        if count:
            yield Row(at_ns / 1e6, ids, input_length=count * block_tokens + 1, output_length=answer_tokens)


def read_model(path: str) -> EngineModel:
    """The engine's times. Raises ConfigError."""
    if not path:
        return EngineModel()
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=EngineModel)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--model: {path:.200}: {error}", field="--model") from None


def planned(
    given: argparse.Namespace, rows: list[Row], block_tokens: int, model: EngineModel
) -> dict[str, Any]:
    """The report."""
    n, by_size = given.gpus, {}
    for size in SIZES:
        blocks = int(size * given.l1_gb * GB / (given.kv_token_bytes * block_tokens))
        by_size[size] = windows(given, rows, computed(rows, blocks, block_tokens), model)
    total = sum(one.requests_s for window in by_size[1] for one in window.shapes)

    def served(found: list[Window], engines: int, first: int, *, splits: bool = True) -> tuple[float, float]:
        """The share of requests in time, and the seconds of computing prompts for each second."""
        all_of = [predict([window.engine] * engines, window.shapes, first, splits=splits) for window in found]
        return sum(one.met_s for one in all_of) / total, _compute_s(all_of)

    now = by_size[1]
    ways = {"each engine does both, and no request is split": served(now, n, 0, splits=False)}
    if n > 1:
        ways["each engine does both, and requests are split where that costs less"] = served(now, n, 0)
        for first in range(1, n):
            ways[f"{first} prefill for {n - first} others"] = served(now, n, first)
    best = max(ways, key=lambda way: ways[way][0] - 1e-3 * list(ways).index(way))
    splits, first = best != next(iter(ways)), int(best.split()[0]) if best[0].isdigit() else 0
    present = served(now, n, first, splits=splits)
    buys = {
        f"{size:g} × the L1 ({size * given.l1_gb:g} GB)": served(by_size[size], n, first, splits=splits)
        for size in SIZES
        if size != 1
    }
    buys["another engine"] = served(now, n + 1, first, splits=splits)
    costs = {
        size: _compute_s([predict([one.engine], one.shapes, 0) for one in by_size[size]]) for size in SIZES
    }
    wanted = next(
        size
        for size in SIZES
        if all(
            costs[size] * (1 - ENOUGH * math.log2(more / size)) < costs[more] for more in SIZES if more > size
        )
    )
    return {
        "engines": n,
        "way": best,
        "split": splits,
        "prefilling": first,
        "l1_gb": wanted * given.l1_gb,
        "in_time": round(present[0], 4),
        "ways": [{"way": way, "in_time": round(share, 4)} for way, (share, _) in ways.items()],
        "buys": [
            {"what": what, "requests_in_time": round((share - present[0]) * len(rows)),
             "computing_s": round((present[1] - busy) * len(now) * _span_s(rows, len(now)))}
            for what, (share, busy) in buys.items()
        ],
    }  # fmt: skip


def computed(rows: Sequence[Row], blocks: int, block_tokens: int) -> list[int]:
    """By request: prompt tokens that an LRU cache of `blocks` blocks lacks; the last token is always computed."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for row in rows:
        held = next((at for at, one in enumerate(row.hash_ids) if one not in cache), len(row.hash_ids))
        found.append(max(1, row.input_length - held * block_tokens))
        for one in reversed(
            row.hash_ids
        ):  # the head of a prompt is what most others share, so it leaves last
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found


def _span_s(rows: Sequence[Row], parts: int) -> float:
    return (rows[-1].timestamp - rows[0].timestamp) / 1_000 / parts


def windows(
    given: argparse.Namespace, rows: Sequence[Row], lacking: Sequence[int], model: EngineModel
) -> list[Window]:
    """The trace in equal parts of about WINDOW_S, each with requests of alike lengths together."""
    count = max(1, round(_span_s(rows, 1) / WINDOW_S))
    span_s = _span_s(rows, count)
    sums: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(count)]
    for row, tokens in zip(rows, lacking, strict=True):
        at = min(count - 1, int((row.timestamp - rows[0].timestamp) / 1_000 / span_s))
        answer = max(1, row.output_length)
        key = tokens.bit_length() // 2, answer.bit_length() // 2
        kept = sums[at].setdefault(key, [0, 0, 0, 0])
        for i, more in enumerate((1, tokens, answer, row.input_length)):
            kept[i] += more
    return [_window(given, list(one.values()), span_s, model) for one in sums]


def _window(given: argparse.Namespace, sums: list[list[int]], span_s: float, model: EngineModel) -> Window:
    shapes = [
        Shape(requests_s=n / span_s, prompt_tokens=tokens / n, answer_tokens=answer / n,
              ttft_s=given.ttft_ms / 1_000, tpot_s=given.tpot_ms / 1_000)
        for n, tokens, answer, _ in sums
    ]  # fmt: skip
    tokens, answers = sum(one[1] for one in sums), sum(one[2] for one in sums)
    seconds = (
        sum(one[1] * (model.prefill_token_us + one[3] / one[0] / 2 * model.prefill_pair_us) for one in sums)
        / 1e6
    )
    context = sum(one[2] * (one[3] + one[2] / 2) / one[0] for one in sums) / max(1, answers)
    engine = Engine(
        name="",
        prefill_tokens_s=tokens / seconds if seconds else 1e6 / model.step_us,
        alone_s=model.step_us / 1e6,
        each_s=(model.decode_sequence_us + context * model.decode_context_token_us) / 1e6,
    )
    return Window(engine, shapes)


def _compute_s(found: Sequence[Predicted]) -> float:
    return sum(one.compute_s for one in found) / len(found)
