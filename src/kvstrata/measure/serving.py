"""Sends a workload to OpenAI-compatible endpoints and measures what their users see.

Every request is a streamed completion whose prompt is a list of token ids.  Times, in seconds:

    TTFT  from sending the request to the first piece of the answer
    ITL   between two pieces of the answer
    TPOT  from the first piece to the last, divided by the tokens after the first
    E2E   from sending the request to the end of the answer

Counts of tokens are those of the endpoint's `usage`.  The sources of cached tokens are read from the /metrics of the
endpoints (with vLLM's names) and of the cache servers, before and after each round.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.errors import ConfigError, Unavailable
from kvstrata.measure.figures import percentile
from kvstrata.measure.workloads import Request, Workload
from kvstrata.observability.exposition import FRESH_S

if TYPE_CHECKING:
    import httpx

PROBE_S = 10.0
"""Limit for an endpoint to list its models, and for a page of metrics."""
CACHED = "vllm:prompt_tokens_cached_by_source"
"""vLLM's metric of cached prompt tokens, by their source."""
CACHED_BEFORE = {"vllm:prefix_cache_hits": "device", "vllm:external_prefix_cache_hits": "external"}
"""Metrics of a vLLM that lacks CACHED, and the sources that they count."""
SERVER_CHUNKS = {"kvstrata_l1_hit_chunks": "L1 chunks", "kvstrata_l2_hit_chunks": "L2 chunks"}
"""Metrics of a cache server, and the sources that they count."""


class Endpoint(NamedTuple):
    """An endpoint: its `url` without a path, and the name of its `model`."""

    url: str
    model: str


class CacheServer(NamedTuple):
    """The `url` of an lmcache-server's admin port; `token` is empty if that port needs none."""

    url: str
    token: str


class Options(NamedTuple):
    """Options for sending requests."""

    vocabulary: range
    seed: int
    concurrency: int
    """Most requests in flight, over all endpoints."""
    timeout_s: float
    extra_body: Mapping[str, Any]
    """Further fields for every request."""


class Result(NamedTuple):
    """The outcome of one request. With an `error`, only `sent_s` and `ended_s` have a meaning."""

    sent_s: float
    ended_s: float
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """None: the endpoint does not report it (vLLM: --enable-prompt-tokens-details)."""
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
    prompt_tokens_details: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
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
    if model and model not in names:
        raise ConfigError(f"--model: {url} has no {model!r}; it has {', '.join(names)}", field="model")
    if not model and len(names) != 1:
        raise ConfigError(
            f"--model: {url} has {len(names)} models, name one: {', '.join(names)}", field="model"
        )
    return Endpoint(url, model or names[0])


async def run_round(
    client: httpx.AsyncClient,
    plain: httpx.AsyncClient,
    endpoints: Sequence[Endpoint],
    servers: Sequence[CacheServer],
    requests: Sequence[Request],
    options: Options,
    ended: Callable[[], object],
) -> Round:
    """Send a round and wait for all its requests; `ended` is called after each. A failed request is a result too.

    `plain`: a client that does not send the endpoints' key, for reading the counters.  Cancelling the call cancels all
    requests of the round.
    """
    before = await _counters(plain, endpoints, servers)
    room = asyncio.Semaphore(options.concurrency)
    begun_s = time.monotonic()

    async def one(request: Request) -> Result:
        try:
            prompt = request.prompt(options.seed, options.vocabulary)
            return await _send(client, endpoints[request.endpoint], request, prompt, options)
        finally:
            ended()
            room.release()

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            if request.at_s is not None:
                await asyncio.sleep(max(0.0, begun_s + request.at_s - time.monotonic()))
            await room.acquire()
            tasks.append(group.create_task(one(request)))
    after = await _counters(plain, endpoints, servers)
    return Round([task.result() for task in tasks], *_grown(before, after))


async def _send(
    client: httpx.AsyncClient, endpoint: Endpoint, request: Request, prompt: list[int], options: Options
) -> Result:
    import httpx

    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options.extra_body,
    }
    pieces_s: list[float] = []
    usage: _Usage | None = None
    sent_s = time.monotonic()

    def failed(why: str) -> Result:
        return Result(sent_s, time.monotonic(), error=why[:200])

    try:
        async with (
            asyncio.timeout(options.timeout_s),
            client.stream("POST", f"{endpoint.url}/v1/completions", json=body, timeout=None) as answer,
        ):
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                return failed(f"status {answer.status_code}: {_message(text)}")
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                event = _decode(line[5:])
                if event.error is not None:
                    return failed(f"in the answer: {event.error}")
                if event.choices:
                    pieces_s.append(time.monotonic())
                usage = event.usage or usage
    except TimeoutError:
        return failed(f"the answer did not end within {options.timeout_s:g} s")
    except httpx.HTTPError as error:
        return failed(f"{type(error).__name__}: {error}")
    except msgspec.DecodeError as error:
        return failed(f"an event of the answer is not the expected JSON: {error}")
    if not pieces_s or usage is None:
        return failed("an answer without tokens" if not pieces_s else "an answer without usage")
    details = usage.prompt_tokens_details
    cached = details.get("cached_tokens") if details else None
    return Result(
        sent_s,
        time.monotonic(),
        pieces_s[0] - sent_s,
        tuple(b - a for a, b in itertools.pairwise(pieces_s)),
        usage.prompt_tokens,
        usage.completion_tokens,
        cached if isinstance(cached, int) else None,
    )


def _message(body: str) -> str:
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        found = msgspec.json.decode(body)
        return str(found.get("message") or found["error"]["message"])
    return body.strip()


async def _counters(
    client: httpx.AsyncClient, endpoints: Sequence[Endpoint], servers: Sequence[CacheServer]
) -> dict[str, Counter[str]]:
    """The current counters of each endpoint and cache server that shows them, by URL.

    A server's page may be FRESH_S old: this waits so long that none was made before the call.
    """
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    counted = {}
    if servers:
        await asyncio.sleep(FRESH_S)
    pages = [(endpoint.url, "") for endpoint in endpoints] + [
        (server.url, server.token) for server in servers
    ]
    for url, token in dict.fromkeys(pages):
        headers = {"Authorization": f"Bearer {token}"} if token else None
        try:
            page = await client.get(f"{url}/metrics", headers=headers, timeout=PROBE_S)
        except httpx.HTTPError:
            continue  # this endpoint has no metrics; if it does not answer at all, the requests say so
        if page.status_code != 200:
            continue
        found = {family.name: family for family in text_string_to_metric_families(page.text)}
        total = counted[url] = Counter[str]()
        if CACHED in found:
            for sample in found[CACHED].samples:
                if sample.name == f"{CACHED}_total":
                    total[str(sample.labels.get("source", "cached"))] += int(sample.value)
        else:
            total.update(_summed(found, CACHED_BEFORE))
        total.update(_summed(found, SERVER_CHUNKS))
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


def _summed(families: dict[str, Any], names: dict[str, str]) -> dict[str, int]:
    return {
        shown: int(sum(s.value for s in families[name].samples if s.name == f"{name}_total"))
        for name, shown in names.items()
        if name in families
    }


async def check_servers(client: httpx.AsyncClient, servers: Sequence[CacheServer]) -> None:
    """Raise ConfigError if an admin port does not serve its metrics."""
    import httpx

    for server in servers:
        headers = {"Authorization": f"Bearer {server.token}"} if server.token else None
        why = ""
        try:
            page = await client.get(f"{server.url}/metrics", headers=headers, timeout=PROBE_S)
            if page.status_code != 200 or "kvstrata_instance" not in page.text:
                why = f"status {page.status_code}, without metrics of lmcache-server"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
        if why:
            raise ConfigError(
                f"--cache-server: {server.url}: {why}; give the admin port's address", field="cache_server"
            )


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
    cached = [result.cached_tokens for result in good if result.cached_tokens is not None]
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
        "total_tokens_per_s": (input_tokens + output_tokens) / duration_s,
        "ttft_ms": _times([result.ttft_s for result in good]),
        "tpot_ms": _times(
            [sum(result.gaps_s) / (result.output_tokens - 1) for result in good if result.output_tokens > 1]
        ),
        "itl_ms": _times([gap for result in good for gap in result.gaps_s]),
        "e2e_ms": _times([result.ended_s - result.sent_s for result in good]),
        "cached_tokens": sum(cached) if cached else None,
        "sources": dict(sources),
    }


def _times(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ms = [1e3 * each for each in seconds]
    return {
        "mean": sum(ms) / len(ms),
        "median": percentile(ms, 0.5),
        "p99": percentile(ms, 0.99),
        "greatest": max(ms),
    }


def describe(workload: Workload) -> str:
    """Requests and tokens of a workload in words."""
    requests = [request for part in workload.rounds for request in part]
    return f"{len(requests)} requests, {sum(request.input_tokens for request in requests)} tokens of prompts"
