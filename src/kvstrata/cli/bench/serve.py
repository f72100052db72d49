"""`kvstrata bench serve`: measures OpenAI-compatible endpoints from their users' side, with any cache or none.

    kvstrata bench serve --url http://127.0.0.1:8000 long-doc-qa --documents 8 --document-tokens 6000

The rounds of a workload (measure/workloads.py) are sent one after the other, with streamed answers, and measured
(measure/serving.py).  With several endpoints, each document or user goes to another endpoint in the next round, so that
its hits there come from a cache that the endpoints share.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstrata import __version__
from kvstrata.cli.asking import read_token
from kvstrata.cli.bench.flags import add_report_flags, progress, run_and_report, whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.errors import ConfigError, Unavailable, install
from kvstrata.measure.figures import machine
from kvstrata.measure.plot import draw_serve
from kvstrata.measure.serving import (
    CacheServer,
    Options,
    Round,
    check_servers,
    figures,
    find_model,
    run_round,
)
from kvstrata.measure.workloads import (
    Workload,
    long_documents,
    read_trace,
    replay,
    shared_prefix_chat,
    synthetic_trace,
)
from kvstrata.process.http_token import find_token

MOST_TOKENS = 10_000_000


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench serve`."""
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--url", action="append", required=True, metavar="URL",
        help="an endpoint, like http://127.0.0.1:8000; repeatable")  # fmt: skip
    add("--model", default="", help="the model's name at the endpoint (default: its only model)")
    add("--concurrency", type=whole(1, 4096), default=8, metavar="N",
        help="most requests in flight, over all endpoints (%(default)s)")  # fmt: skip
    add(
        "--timeout-s",
        type=whole(1, 86_400),
        default=600,
        metavar="S",
        help="time limit of one request (%(default)s)",
    )
    add("--pause-s", type=whole(0, 3600), default=0, metavar="S",
        help="pause between rounds, in which the cache may store (%(default)s)")  # fmt: skip
    add("--vocabulary", type=_vocabulary, default=range(1000, 20_000), metavar="FIRST:END",
        help="range of the token ids in prompts (1000:20000)")  # fmt: skip
    add("--seed", type=whole(0, 1 << 62), default=0, metavar="N",
        help="seed of the prompts; the same seed gives the same prompts (%(default)s)")  # fmt: skip
    add("--stop-early", action="store_true",
        help="let the model end its answers; otherwise ignore_eos is sent, which vLLM accepts")  # fmt: skip
    add("--extra-body", type=_object, default={}, metavar="JSON",
        help='further fields of requests (none); {"detokenize": false} for vLLM without a tokenizer')  # fmt: skip
    add("--cache-server", action="append", default=[], metavar="URL",
        help="admin port of a server behind the endpoints, to tell L1 from L2 hits; repeatable (none)")  # fmt: skip
    add(
        "--cache-token-file",
        default="",
        metavar="FILE",
        help="file with the bearer token of every --cache-server (that of a server of this user)",
    )
    add("--label", default="", metavar="TEXT", help="title of the report and the plot (none)")
    add_report_flags(common)
    top = argparse.ArgumentParser(
        prog="kvstrata bench serve",
        description="Measure OpenAI-compatible endpoints as their users see them.",
        epilog="If OPENAI_API_KEY is set, it is sent. Needs the extra `bench`.",
    )
    workloads = top.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    tokens = whole(1, MOST_TOKENS)
    documents = workloads.add_parser(
        "long-doc-qa", parents=[common], help="questions about long documents, in rounds"
    )
    add = documents.add_argument
    add("--documents", type=whole(1, 100_000), default=8, metavar="N", help="(%(default)s)")
    add("--document-tokens", type=tokens, default=4096, metavar="N", help="(%(default)s)")
    add("--question-tokens", type=tokens, default=32, metavar="N", help="(%(default)s)")
    add("--output-tokens", type=tokens, default=16, metavar="N", help="(%(default)s)")
    add("--rounds", type=whole(1, 1000), default=2, metavar="N", help="(%(default)s)")
    chat = workloads.add_parser(
        "shared-prefix",
        parents=[common],
        help="chats that begin with the same system prompt; a round is a turn",
    )
    add = chat.add_argument
    add("--users", type=whole(1, 100_000), default=8, metavar="N", help="(%(default)s)")
    add("--turns", type=whole(1, 1000), default=4, metavar="N", help="(%(default)s)")
    add("--system-tokens", type=tokens, default=2048, metavar="N", help="(%(default)s)")
    add("--message-tokens", type=tokens, default=64, metavar="N", help="(%(default)s)")
    add("--output-tokens", type=tokens, default=32, metavar="N", help="(%(default)s)")
    trace = workloads.add_parser(
        "trace", parents=[common], help="requests sent at the times that a trace gives"
    )
    add = trace.add_argument
    add("--trace", type=Path, metavar="FILE",
        help="JSON lines as published with Mooncake: timestamp, input_length, output_length, hash_ids of 512 tokens "
        "(default: a synthetic trace)")  # fmt: skip
    add(
        "--requests",
        type=whole(1, 10_000_000),
        metavar="N",
        help="only the first N requests of the trace (all)",
    )
    add(
        "--speed",
        type=_positive,
        default=1.0,
        metavar="X",
        help="play the trace X times as fast (%(default)g)",
    )
    add("--scale", type=_positive, default=1.0, metavar="X",
        help="multiply all lengths by X, for models with short contexts (%(default)g)")  # fmt: skip
    add("--max-tokens", type=tokens, default=MOST_TOKENS, metavar="N",
        help="leave out requests whose scaled prompt and answer exceed N tokens (%(default)s)")  # fmt: skip
    return top


@guarded("kvstrata bench serve")
def main(arguments: Sequence[str] | None) -> int:
    """Run the benchmark; returns 0. Raises KvstrataError."""
    return run_and_report(parser().parse_args(arguments), run, shown=shown, draw=draw_serve)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the report. Raises KvstrataError; in any case nothing is running afterwards."""
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError(f"needs the Python package 'httpx': {install('bench')}")
    return asyncio.run(_measure(options, _workload(options)))


def _workload(options: argparse.Namespace) -> Workload:
    endpoints = len(options.url)
    if options.workload == "long-doc-qa":
        return long_documents(
            options.documents,
            options.document_tokens,
            options.question_tokens,
            options.output_tokens,
            rounds=options.rounds,
            endpoints=endpoints,
        )
    if options.workload == "shared-prefix":
        return shared_prefix_chat(
            options.users,
            options.turns,
            options.system_tokens,
            options.message_tokens,
            options.output_tokens,
            endpoints=endpoints,
        )
    if options.trace:
        requests, name = read_trace(options.trace), options.trace.name
    else:
        requests, name = synthetic_trace(), "a synthetic trace"
    return replay(
        requests[: options.requests],
        name,
        speed=options.speed,
        scale=options.scale,
        most_tokens=options.max_tokens,
        endpoints=endpoints,
    )


async def _measure(options: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    import httpx

    key = os.environ.get("OPENAI_API_KEY", "")
    token = read_token("--cache-token-file", options.cache_token_file)
    servers = [CacheServer(url.rstrip("/"), token or find_token(url)) for url in options.cache_server]
    extra = options.extra_body if options.stop_early else {"ignore_eos": True} | options.extra_body
    sending = Options(options.vocabulary, options.seed, options.concurrency, options.timeout_s, extra)
    notes: list[str] = []
    rounds: list[Round] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    async with httpx.AsyncClient(limits=limits, trust_env=False) as plain:
        await check_servers(plain, servers)
        async with httpx.AsyncClient(limits=limits, headers=headers, trust_env=False) as client:
            endpoints = [await find_model(client, url.rstrip("/"), options.model) for url in options.url]
            total = sum(len(part) for part in workload.rounds)
            with progress(total, "request", notes) as step:
                for number, requests in enumerate(workload.rounds):
                    await asyncio.sleep(options.pause_s if number else 0)
                    rounds.append(
                        await run_round(client, plain, endpoints, servers, requests, sending, lambda: step(1))
                    )
                    notes += [
                        f"round {number + 1}: the rows `from …` leave out {url}, because its counters were missing "
                        "before or after the round, or were reset during it"
                        for url in rounds[-1].uncounted
                    ]
    report = _report(options, workload, [endpoint.model for endpoint in endpoints], rounds, notes)
    if not report["total"]["requests"]:
        raise Unavailable(f"no request succeeded: {'; '.join(report['total']['errors'])}")
    return report


def _report(
    options: argparse.Namespace,
    workload: Workload,
    models: Sequence[str],
    rounds: Sequence[Round],
    notes: list[str],
) -> dict[str, Any]:
    return {
        "kvstrata": __version__,
        "label": options.label,
        "workload": workload.name,
        "meaning": workload.meaning,
        "endpoints": [{"url": url, "model": model} for url, model in zip(options.url, models, strict=True)],
        "concurrency": options.concurrency,
        "seed": options.seed,
        "machine": machine(),
        "rounds": [
            figures([part]) | {"ttfts_ms": [round(1e3 * r.ttft_s, 3) for r in part.results if not r.error]}
            for part in rounds
        ],
        "total": figures(rounds),
        "notes": notes,
    }


def shown(report: dict[str, Any]) -> str:
    """The report as text: a column for each round, and one for all rounds."""
    names = [f"round {number}" for number in range(1, len(report["rounds"]) + 1)]
    columns = dict(zip(names, report["rounds"], strict=True))
    if len(names) != 1:
        columns["all"] = report["total"]
    rows = []

    def row(label: str, value: Callable[[dict[str, Any]], str]) -> None:
        rows.append({"": label} | {name: value(found) for name, found in columns.items()})

    row("successful requests", lambda f: str(f["requests"]))
    row("failed requests", lambda f: str(f["failed"]))
    row("duration (s)", lambda f: f"{f['duration_s']:.2f}")
    row("input tokens", lambda f: str(f["input_tokens"]))
    row("output tokens", lambda f: str(f["output_tokens"]))
    row("requests/s", lambda f: f"{f['requests_per_s']:.2f}")
    row("output tokens/s", lambda f: f"{f['output_tokens_per_s']:.1f}")
    row("all tokens/s", lambda f: f"{f['total_tokens_per_s']:.1f}")
    for key, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E")):
        for word in ("mean", "median", "p99"):
            row(f"{label} {word} (ms)", lambda f, k=key, w=word: f"{f[k][w]:.1f}" if f[k] else "-")  # type: ignore[misc]
    if report["total"]["cached_tokens"] is not None:
        row("cached tokens (usage)", lambda f: str(f["cached_tokens"] or 0))
    for source in sorted(report["total"]["sources"]):
        unit = "" if "chunks" in source else " tokens"
        row(f"from {source}{unit}", lambda f, s=source: str(f["sources"].get(s, 0)))  # type: ignore[misc]
    heads = {name: report[name] for name in ("label", "workload", "meaning", "concurrency", "machine")}
    heads["endpoints"] = ", ".join(f"{each['url']} ({each['model']})" for each in report["endpoints"])
    errors = "".join(f"\nfailed {count} times: {why}" for why, count in report["total"]["errors"].items())
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return f"{table({k: v for k, v in heads.items() if v != ''})}\n\n{table(rows)}{errors}{notes}"


def _vocabulary(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal()) or not int(first) + 2 <= int(end) <= 1 << 31:
        what = f"must be FIRST:END with END from FIRST + 2 to {1 << 31}"
        raise argparse.ArgumentTypeError(f"{what}, found {text!r}")
    return range(int(first), int(end))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {text!r:.80}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number from 0.000001 to 1000000, found {text!r}")
    return value
