"""Asks OpenAI-compatible endpoints about long documents, in rounds, and measures the answers.

Every request is a streamed completion whose prompt is a list of token ids: a document, and a question about it that is
new in each round. The seed alone determines the tokens. Times, in seconds:

    TTFT  from sending the request to the first piece of the answer
    E2E   from sending the request to the end of the answer

Counts of tokens are those of the endpoint's `usage`. The sources of cached tokens are read from the /metrics of the
endpoints (with vLLM's names) and of the cache servers, before and after each round.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.errors import ConfigError, Unavailable
from kvstrata.measure.figures import percentile
from kvstrata.observability.numbers import FRESH_S

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


class Request(NamedTuple):
    """A question about a document, to endpoint number `endpoint`."""

    document: int
    round: int
    document_tokens: int
    question_tokens: int
    output_tokens: int
    endpoint: int

    def prompt(self, seed: int, vocabulary: range) -> list[int]:
        """The prompt's token ids, all within `vocabulary`."""
        document = random.Random(f"{seed}/document {self.document}")
        question = random.Random(f"{seed}/question {self.document} {self.round}")
        return [
            *document.choices(vocabulary, k=self.document_tokens),
            *question.choices(vocabulary, k=self.question_tokens),
        ]


def long_documents(
    documents: int,
    document_tokens: int,
    question_tokens: int,
    output_tokens: int,
    *,
    rounds: int,
    endpoints: int,
) -> list[list[Request]]:
    """Rounds with a question about each document; from round to round a document moves to the next endpoint."""
    return [
        [
            Request(
                number, turn, document_tokens, question_tokens, output_tokens, (number + turn) % endpoints
            )
            for number in range(documents)
        ]
        for turn in range(rounds)
    ]


class Endpoint(NamedTuple):
    """An endpoint: its `url` without a path, and the name of its `model`."""

    url: str
    model: str


class Options(NamedTuple):
    """Options for sending requests."""

    vocabulary: range
    seed: int
    concurrency: int
    """Maximum number of requests in flight, over all endpoints."""
    extra_body: Mapping[str, Any]
    """Further fields for every request."""


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


async def find_model(client: httpx.AsyncClient, url: str, model: str) -> Endpoint:
    """The endpoint at `url`, with its only model if `model` is empty. Raises ConfigError or Unavailable."""
    import httpx

    try:
        answer = await client.get(f"{url}/v1/models", timeout=PROBE_S)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"--url: {url}: {error}", field="url") from None
    except httpx.HTTPError as error:
        raise Unavailable(f"--url: {url}: {error or type(error).__name__}; is the engine up?") from None
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
    return Endpoint(url, model or names[0])


async def run_round(
    client: httpx.AsyncClient,
    pages: Mapping[str, httpx.AsyncClient],
    endpoints: Sequence[Endpoint],
    requests: Sequence[Request],
    options: Options,
) -> Round:
    """Send a round and wait for all its requests. A failed request is a result too.

    `pages`: by URL, the clients for reading the counters of endpoints and cache servers. Cancelling the call cancels
    all requests of the round.
    """
    before = await _counters(pages)
    room = asyncio.Semaphore(options.concurrency)

    async def one(request: Request) -> Result:
        async with room:
            return await _send(client, endpoints[request.endpoint], request, options)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    after = await _counters(pages)
    return Round([task.result() for task in tasks], *_grown(before, after))


async def _send(client: httpx.AsyncClient, endpoint: Endpoint, request: Request, options: Options) -> Result:
    import httpx

    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": request.prompt(options.seed, options.vocabulary),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options.extra_body,
    }
    first_s = 0.0
    usage: _Usage | None = None
    sent_s = time.monotonic()

    def failed(why: str) -> Result:
        return Result(sent_s, time.monotonic(), error=why[:200])

    try:
        async with (
            asyncio.timeout(REQUEST_S),
            client.stream("POST", f"{endpoint.url}/v1/completions", json=body, timeout=None) as answer,
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
