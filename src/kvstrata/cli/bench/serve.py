"""`kvstrata bench serve long-doc-qa`: latency of OpenAI-compatible endpoints, with any KV cache or none.

Every request is a streamed completion whose prompt is a list of token ids: a document, and a question about it that is
new in each round. The seed alone determines the tokens. Times, in seconds:

    TTFT  from sending the request to the first piece of the answer
    E2E   from sending the request to the end of the answer

Token counts come from the endpoint's `usage`. The sources of cached tokens are read from the /metrics of the endpoints
(with vLLM's names) and of the cache servers, before and after each round.  With several endpoints, each document goes
to another endpoint in the next round, so that its hits there come from a cache that the endpoints share. `vllm bench
serve` measures other workloads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata import __version__
from kvstrata.cli.asking import read_token
from kvstrata.cli.bench import whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.errors import ConfigError, Unavailable, install
from kvstrata.measure.figures import machine, percentile
from kvstrata.observability.numbers import FRESH_S
from kvstrata.process.http_local import find_token

if TYPE_CHECKING:
    import httpx

REQUEST_S = 600.0
"""Limit for one request."""
PROBE_S = 10.0
"""Limit for an endpoint to list its models, and for a page of metrics."""
CACHED = "vllm:prompt_tokens_cached_by_source"
"""vLLM's metric of cached prompt tokens, by their source."""
SERVER_CHUNKS = {"kvstrata_l1_hit_chunks": "L1 chunks", "kvstrata_l2_hit_chunks": "L2 chunks"}
"""Metrics of a cache server, and the sources that they count."""


def prompt(options: argparse.Namespace, document: int, turn: int) -> list[int]:
    """The token ids of a question about a document, another one in each round, all within the vocabulary."""
    seed, vocabulary = options.seed, options.vocabulary
    return [
        *random.Random(f"{seed}/document {document}").choices(vocabulary, k=options.document_tokens),
        *random.Random(f"{seed}/question {document} {turn}").choices(vocabulary, k=options.question_tokens),
    ]


class Result(NamedTuple):
    """The outcome of one request. With an `error`, only `sent_s` and `ended_s` have a meaning."""

    sent_s: float
    ended_s: float
    ttft_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Round(NamedTuple):
    """The outcome of one round; `sources` counts tokens (or chunks, if the name says so) by source."""

    results: list[Result]
    sources: dict[str, int]
    uncounted: list[str]
    """URLs whose counters are not in `sources`: they were missing before or after the round, or reset during it."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[Any] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


async def _model_at(client: httpx.AsyncClient, url: str, model: str) -> str:
    """The name of the model, by default of the only one, at an endpoint. Raises ConfigError or Unavailable."""
    import httpx

    try:
        answer = await client.get(f"{url}/v1/models", timeout=PROBE_S)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"--url: {url}: {error}", field="url") from None
    except httpx.HTTPError as error:
        raise Unavailable(f"--url: {url}: {error or type(error).__name__}; check that it runs") from None
    if answer.status_code == 401:
        raise ConfigError(f"--url: {url} asks for a key: set OPENAI_API_KEY", field="url")
    try:
        names = [str(each["id"]) for each in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--url: {url} does not answer /v1/models as an OpenAI-compatible server does "
            f"(status {answer.status_code})",
            field="url",
        ) from None
    if len(names) != 1 if not model else model not in names:
        raise ConfigError(
            f"--model: must be one of {', '.join(names)} at {url}, found {model!r}", field="model"
        )
    return model or names[0]


async def _send(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Result:
    """Send one request; one that fails is a result too."""
    import httpx

    first_s = 0.0
    usage: _Usage | None = None
    sent_s = time.monotonic()

    def failed(why: str) -> Result:
        return Result(sent_s, time.monotonic(), error=why[:200])

    try:
        async with (
            asyncio.timeout(REQUEST_S),
            client.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as answer,
        ):
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                return failed(f"status {answer.status_code}: {text.strip()}")
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                event = _decode(line[5:])
                if event.error is not None:
                    return failed(f"in the answer: {event.error}")
                if event.choices:
                    first_s = first_s or time.monotonic()
                usage = event.usage or usage
    except TimeoutError:
        return failed(f"the answer did not end within {REQUEST_S:g} s")
    except httpx.HTTPError as error:
        return failed(f"{type(error).__name__}: {error}")
    except msgspec.DecodeError as error:
        return failed(f"an event of the answer is not the expected JSON: {error}")
    if not first_s or usage is None:
        return failed("an answer without usage" if first_s else "an answer without tokens")
    return Result(sent_s, time.monotonic(), first_s - sent_s, usage.prompt_tokens, usage.completion_tokens)


async def _counters(pages: Mapping[str, httpx.AsyncClient]) -> dict[str, Counter[str]]:
    """The current counters of each endpoint and cache server that shows them, by URL.

    A server's page may be FRESH_S old: this waits so long that none was made before the call.
    """
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    counted = {}
    await asyncio.sleep(FRESH_S)
    for url, client in pages.items():
        try:
            page = await client.get(f"{url}/metrics", timeout=PROBE_S)
        except httpx.HTTPError:
            continue  # this endpoint has no metrics; if it does not answer at all, the requests say so
        if page.status_code != 200:
            continue
        total = counted[url] = Counter[str]()
        for family in text_string_to_metric_families(page.text):
            for sample in family.samples:
                if sample.name == f"{CACHED}_total":
                    total[str(sample.labels.get("source", "cached"))] += int(sample.value)
                elif family.name in SERVER_CHUNKS and sample.name == f"{family.name}_total":
                    total[SERVER_CHUNKS[family.name]] += int(sample.value)
    return counted


def _grown(
    before: Mapping[str, Counter[str]], after: Mapping[str, Counter[str]]
) -> tuple[dict[str, int], list[str]]:
    """How much each counter grew between two readings, and the URLs whose growth is unknown."""
    total: Counter[str] = Counter()
    unknown = list(before.keys() ^ after.keys())
    for url in before.keys() & after.keys():
        grown = Counter(after[url])
        grown.subtract(before[url])
        if any(count < 0 for count in grown.values()):  # the process was restarted
            unknown.append(url)
        else:
            total.update(grown)
    return {name: total[name] for name in sorted(total)}, sorted(unknown)


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of all results of these rounds. Names end in the unit; the times are None if no request succeeded."""
    results = [result for part in rounds for result in part.results]
    good = [result for result in results if not result.error]
    # The time between two rounds counts for neither.
    duration_s = sum(
        max(r.ended_s for r in part.results) - min(r.sent_s for r in part.results) for part in rounds
    )
    input_tokens = sum(result.input_tokens for result in good)
    output_tokens = sum(result.output_tokens for result in good)
    sources: Counter[str] = Counter()
    for part in rounds:
        sources.update(part.sources)
    return {
        "requests": len(good),
        "failed": len(results) - len(good),
        "errors": dict(Counter(result.error for result in results if result.error).most_common(5)),
        "duration_s": duration_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": output_tokens / duration_s,
        "ttft_ms": _times([result.ttft_s for result in good]),
        "e2e_ms": _times([result.ended_s - result.sent_s for result in good]),
        "sources": dict(sources),
    }


def _times(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ms = [1e3 * each for each in seconds]
    return {"mean": sum(ms) / len(ms), "median": percentile(ms, 0.5), "p99": percentile(ms, 0.99)}


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench serve`."""
    top = argparse.ArgumentParser(
        prog="kvstrata bench serve",
        description="Send questions about long documents to OpenAI-compatible endpoints, and measure the answers.",
        epilog="If OPENAI_API_KEY is set, it is sent. Needs the extra `bench`. For other workloads: vllm bench serve.",
    )
    add = top.add_argument
    add("workload", choices=("long-doc-qa",), help="a different question about each document in each round")
    add("--url", action="append", required=True, metavar="URL",
        help="URL of an endpoint, such as http://127.0.0.1:8000; repeatable")  # fmt: skip
    add("--model", default="", help="the model's name at the endpoint (default: its only model)")
    tokens = whole(1, 10_000_000)
    for name, kind, default, meaning in (
        ("documents", whole(1, 100_000), 8, "documents in a round"),
        ("document-tokens", tokens, 4096, "tokens of a document"),
        ("question-tokens", tokens, 32, "tokens of a question"),
        ("output-tokens", tokens, 16, "tokens of an answer"),
        ("rounds", whole(1, 1000), 2, "rounds"),
        ("concurrency", whole(1, 4096), 8, "maximum number of requests in flight, over all endpoints"),
        ("pause-s", whole(0, 3600), 0, "seconds between rounds, in which caches can finish their stores"),
        ("seed", whole(0, 1 << 62), 0, "seed of the prompts; the same seed gives the same prompts"),
    ):
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{meaning} (%(default)s)")
    add("--vocabulary", type=_vocabulary, default=range(1000, 20_000), metavar="FIRST:END",
        help="range of the token ids in prompts (1000:20000)")  # fmt: skip
    add("--extra-body", type=_object, default={}, metavar="JSON",
        help='fields of requests besides {"ignore_eos": true}; {"detokenize": false} for vLLM without a '
        "tokenizer")  # fmt: skip
    add("--cache-server", action="append", default=[], metavar="URL",
        help="admin port of a server behind the endpoints, to tell L1 from L2 hits; repeatable (none)")  # fmt: skip
    add("--cache-token-file", default="", metavar="FILE",
        help="file with the bearer token of every --cache-server (the token of this user's server)")  # fmt: skip
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
        models = [await _model_at(engines, url, options.model) for url in urls]
        room = asyncio.Semaphore(options.concurrency)

        async def send(document: int, turn: int) -> Result:
            async with room:
                to = (document + turn) % len(urls)
                body = {
                    "model": models[to],
                    "prompt": prompt(options, document, turn),
                    "max_tokens": options.output_tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "ignore_eos": True,
                    **options.extra_body,
                }
                return await _send(engines, urls[to], body)

        for turn in range(options.rounds):
            await asyncio.sleep(options.pause_s if turn else 0)
            before = await _counters(pages)
            results = await asyncio.gather(*(send(document, turn) for document in range(options.documents)))
            rounds.append(Round(results, *_grown(before, await _counters(pages))))
    total = figures(rounds)
    if not total["requests"]:
        raise Unavailable(f"no request succeeded: {'; '.join(total['errors'])}")
    return {
        "kvstrata": __version__,
        "endpoints": ", ".join(f"{url} ({model})" for url, model in zip(urls, models, strict=True)),
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
