"""`kvstrata bench serve long-doc-qa`: OpenAI-compatible endpoints as their users see them, with any cache or none.

With several endpoints, each document goes to another endpoint in the next round, so that its hits there come from a
cache that the endpoints share. `vllm bench serve` measures other workloads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata import __version__
from kvstrata.cli.asking import read_token
from kvstrata.cli.bench.flags import whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.errors import ConfigError, Unavailable, install
from kvstrata.measure.figures import machine
from kvstrata.measure.serving import Options, Round, figures, find_model, long_documents, run_round
from kvstrata.process.http_local import find_token


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench serve`."""
    top = argparse.ArgumentParser(
        prog="kvstrata bench serve",
        description="Ask OpenAI-compatible endpoints about long documents, in rounds, and measure the answers.",
        epilog="If OPENAI_API_KEY is set, it is sent. Needs the extra `bench`. For other workloads: vllm bench serve.",
    )
    add = top.add_argument
    add("workload", choices=("long-doc-qa",), help="another question about each document in each round")
    add("--url", action="append", required=True, metavar="URL",
        help="an endpoint, like http://127.0.0.1:8000; repeatable")  # fmt: skip
    add("--model", default="", help="the model's name at the endpoint (default: its only model)")
    tokens = whole(1, 10_000_000)
    for name, kind, default, meaning in (
        ("documents", whole(1, 100_000), 8, "documents in a round"),
        ("document-tokens", tokens, 4096, "tokens of a document"),
        ("question-tokens", tokens, 32, "tokens of a question"),
        ("output-tokens", tokens, 16, "tokens of an answer"),
        ("rounds", whole(1, 1000), 2, "rounds"),
        ("concurrency", whole(1, 4096), 8, "maximum number of requests in flight, over all endpoints"),
        ("pause-s", whole(0, 3600), 0, "pause between rounds, in which the cache may store"),
        ("seed", whole(0, 1 << 62), 0, "seed of the prompts; the same seed gives the same prompts"),
    ):
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{meaning} (%(default)s)")
    add("--vocabulary", type=_vocabulary, default=range(1000, 20_000), metavar="FIRST:END",
        help="range of the token ids in prompts (1000:20000)")  # fmt: skip
    add("--extra-body", type=_object, default={}, metavar="JSON",
        help='further fields of requests beside {"ignore_eos": true}; {"detokenize": false} for vLLM without a '
        "tokenizer")  # fmt: skip
    add("--cache-server", action="append", default=[], metavar="URL",
        help="admin port of a server behind the endpoints, to tell L1 from L2 hits; repeatable (none)")  # fmt: skip
    add("--cache-token-file", default="", metavar="FILE",
        help="file with the bearer token of every --cache-server (that of a server of this user)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")
    return top


@guarded("kvstrata bench serve")
def main(arguments: Sequence[str] | None) -> int:
    """Run the benchmark; returns 0. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    report = run(options)
    print(json.dumps(report, indent=1, ensure_ascii=False) if options.json else shown(report))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the report. Raises KvstrataError; in any case nothing is running afterwards."""
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError(f"needs the Python package 'httpx': {install('bench')}")
    return asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import httpx

    urls = [url.rstrip("/") for url in options.url]
    workload = long_documents(
        options.documents,
        options.document_tokens,
        options.question_tokens,
        options.output_tokens,
        rounds=options.rounds,
        endpoints=len(urls),
    )
    sending = Options(
        options.vocabulary,
        options.seed,
        options.concurrency,
        {"ignore_eos": True, **options.extra_body},
    )
    given = read_token("--cache-token-file", options.cache_token_file)
    rounds: list[Round] = []
    async with contextlib.AsyncExitStack() as stack:

        async def client(token: str) -> httpx.AsyncClient:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            headers = {"Authorization": f"Bearer {token}"} if token else None
            made = httpx.AsyncClient(limits=limits, headers=headers, trust_env=False)
            return await stack.enter_async_context(made)

        engines = await client(os.environ.get("OPENAI_API_KEY", ""))
        pages = {url: await client("") for url in urls}  # the endpoints' key is not for their counters
        for url in options.cache_server:
            pages[url.rstrip("/")] = page = await client(given or find_token(url))
            await _check_server(page, url.rstrip("/"))
        endpoints = [await find_model(engines, url, options.model) for url in urls]
        for number, requests in enumerate(workload):
            await asyncio.sleep(options.pause_s if number else 0)
            rounds.append(await run_round(engines, pages, endpoints, requests, sending))
    total = figures(rounds)
    if not total["requests"]:
        raise Unavailable(f"no request succeeded: {'; '.join(total['errors'])}")
    return {
        "kvstrata": __version__,
        "endpoints": ", ".join(f"{url} ({model})" for url, model in endpoints),
        "documents": f"{options.documents} of {options.document_tokens} tokens, questions of "
        f"{options.question_tokens}, answers of {options.output_tokens}",
        "concurrency": options.concurrency,
        "seed": options.seed,
        "machine": machine(),
        "rounds": [
            figures([part]) | {"ttfts_ms": [round(1e3 * r.ttft_s, 3) for r in part.results if not r.error]}
            for part in rounds
        ],
        "total": total,
        "notes": [
            f"round {number}: the rows `from …` leave out {url}, because its counters were missing before or after "
            "the round, or were reset during it"
            for number, part in enumerate(rounds, start=1)
            for url in part.uncounted
        ],
    }


async def _check_server(client: Any, url: str) -> None:
    """Raise ConfigError if a server's admin port does not serve its metrics."""
    import httpx

    try:
        page = await client.get(f"{url}/metrics")
        why = f"status {page.status_code}" if page.status_code != 200 else ""
        why = why or ("" if "kvstrata_instance" in page.text else "no metrics of lmcache-server")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
    if why:
        raise ConfigError(
            f"--cache-server: {url}: {why}; give the admin port's address", field="cache_server"
        )


def shown(report: dict[str, Any]) -> str:
    """The report as text: a column for each round, and one for all rounds."""
    columns = {f"round {number}": found for number, found in enumerate(report["rounds"], start=1)}
    if len(columns) != 1:
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
    for key in ("ttft_ms", "e2e_ms"):
        for word in ("mean", "median", "p99"):
            row(f"{key[:-3].upper()} {word} (ms)", lambda f, k=key, w=word: f"{f[k][w]:.1f}" if f[k] else "-")  # type: ignore[misc]
    for source in sorted(report["total"]["sources"]):
        unit = "" if "chunks" in source else " tokens"
        row(f"from {source}{unit}", lambda f, s=source: str(f["sources"].get(s, 0)))  # type: ignore[misc]
    heads = {name: report[name] for name in ("endpoints", "documents", "concurrency", "machine")}
    errors = "".join(f"\nfailed {count} times: {why}" for why, count in report["total"]["errors"].items())
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return f"{table(heads)}\n\n{table(rows)}{errors}{notes}"


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
