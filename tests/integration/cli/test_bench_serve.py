"""`kvstrata bench serve` against an HTTP server that streams completions, and the contents of its workloads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvstrata.cli.bench.serve import main
from kvstrata.observability.exposition import Pages, ServerCollector
from kvstrata.observability.metrics import ServerCounters
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


class Endpoint:
    """Streams as many pieces as asked for; caches whole prompts by their first 64 tokens, like an engine with L0."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.bodies: list[dict[str, Any]] = []
        self.seen: set[tuple[int, ...]] = set()
        self.hit_tokens = 0
        self.key = ""
        self.fails = False
        self.pages = 0
        self.shows: Callable[[int], bool] = lambda page: True
        """Says for each request of the metrics, by its number, whether it is answered."""
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.completions)
        self.app.get("/metrics")(self.metrics)

    def models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"data": [{"id": "small"}]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.fails:
            return JSONResponse({"error": {"message": "token id out of vocabulary"}}, 400)
        start = tuple(body["prompt"][:64])
        cached = 64 if start in self.seen else 0
        self.seen.add(start)
        self.hit_tokens += cached
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}

        async def events() -> AsyncIterator[str]:
            for _ in range(body["max_tokens"]):
                yield f"data: {json.dumps({'choices': [{'text': 'a '}], 'usage': None})}\n\n"
                await asyncio.sleep(0)
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def metrics(self) -> Response:
        self.pages += 1
        if not self.shows(self.pages):
            return Response(status_code=503)
        name = "vllm:prompt_tokens_cached_by_source_total"
        return Response(
            f'# TYPE {name} counter\n{name}{{source="device"}} {self.hit_tokens}\n{name}{{source="disk"}} 0\n'
        )


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_a_round_trip_counts_every_request_token_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint()
    with served(endpoint.app) as url:
        report = report_of(
            capsys, "long-doc-qa", "--url", url, "--documents", "3", "--document-tokens", "100",
            "--question-tokens", "10", "--output-tokens", "5",
        )  # fmt: skip
    first, second = report["rounds"]
    assert [first["requests"], second["requests"], report["total"]["requests"]] == [3, 3, 6]
    assert first["input_tokens"] == second["input_tokens"] == 330 and first["output_tokens"] == 15
    assert first["sources"] == {"device": 0, "disk": 0} and second["sources"] == {"device": 192, "disk": 0}
    for word in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 < first[word]["median"] <= first[word]["p99"]
    assert all(body["ignore_eos"] and body["model"] == "small" for body in endpoint.bodies)


@pytest.mark.parametrize("page", [7, 8], ids=["before the last round", "after it"])
def test_a_round_without_counters_before_and_after_it_is_left_out_and_noted(page, capsys):
    one, other = Endpoint(), Endpoint()
    other.shows = lambda asked: asked != page
    arguments = ["--documents", "4", "--document-tokens", "80", "--output-tokens", "1", "--rounds", "4"]
    with served(one.app) as first, served(other.app) as second:
        report = report_of(capsys, "long-doc-qa", "--url", first, "--url", second, *arguments)
    # In the third round each document is back at its first endpoint; the last round has one endpoint's counts.
    assert [each["sources"]["device"] for each in report["rounds"]] == [0, 0, 4 * 64, 2 * 64]
    assert report["total"]["sources"]["device"] == 6 * 64
    [note] = report["notes"]
    assert note.startswith("round 4: ") and second in note


def test_a_token_that_others_may_read_opens_a_cache_servers_counters(capsys, tmp_path):
    token = tmp_path / "http-token"
    token.write_text("a-token-of-this-test-only\n")
    token.chmod(0o600)
    environment = {**os.environ, "KVSTRATA_HTTP_TOKEN_FILE": str(token)}
    with ServerProcess(tmp_path / "server", l1_mb=16, environment=environment) as server:
        server.start()
        cache = ["--cache-server", f"http://127.0.0.1:{server.ready['http_port']}"]
        with served(Endpoint().app) as url:
            arguments = ["long-doc-qa", "--url", url, "--documents", "1", *cache, "--cache-token-file"]
            report = report_of(capsys, *arguments, str(token))
            assert main([*arguments, "/nowhere/http-token"]) == 2
    assert {"L1 chunks", "L2 chunks"} <= report["total"]["sources"].keys()
    assert "/nowhere/http-token: cannot be read" in capsys.readouterr().err


def test_hits_of_a_round_count_though_a_cache_server_shows_a_page_for_a_while(capsys):
    """Each request is a hit of one chunk in L1; both readings of a short round would be the same page."""
    counters = ServerCounters()
    pages = Pages(ServerCollector("one", counters, dict))

    class Caching(Endpoint):
        async def completions(self, request: Request) -> Response:
            counters.l1_hit_chunks += 1
            return await super().completions(request)

    cache = FastAPI()
    cache.get("/metrics")(lambda: Response(pages.page()))
    with served(Caching().app) as url, served(cache) as server:
        arguments = ["--documents", "2", "--document-tokens", "80", "--output-tokens", "1"]
        report = report_of(capsys, "long-doc-qa", "--url", url, "--cache-server", server, *arguments)
    assert [each["sources"]["L1 chunks"] for each in report["rounds"]] == [2, 2]


def test_with_several_endpoints_a_document_moves_on(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = Endpoint(), Endpoint()
    with served(one.app) as first, served(other.app) as second:
        report_of(
            capsys, "long-doc-qa", "--url", first, "--url", second, "--documents", "4", "--document-tokens",
            "80", "--output-tokens", "1",
        )  # fmt: skip

    def documents(endpoint: Endpoint) -> list[tuple[int, ...]]:
        return [tuple(body["prompt"][:80]) for body in endpoint.bodies]

    assert len(set(documents(one))) == 4 and sorted(documents(one)) == sorted(documents(other))


def test_a_request_that_fails_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint()
    endpoint.fails = True
    with served(endpoint.app) as url:
        assert main(["long-doc-qa", "--url", url, "--documents", "2", "--rounds", "1"]) == 1
    assert "token id out of vocabulary" in capsys.readouterr().err


def test_wrong_arguments_name_the_flag_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    for change, status, expected in (
        (["--url", "http://127.0.0.1:9"], 1, "is the engine up?"),
        (["--url", "ftp//x"], 2, "--url: ftp//x"),
        (["--model", "large"], 2, "--model: must be one of small at URL, found 'large'"),
        (["--cache-server", "URL"], 2, "--cache-server"),
    ):
        with served(Endpoint().app) as url:
            given = [url if word == "URL" else word for word in change]
            urls = [] if "--url" in given else ["--url", url]
            assert main(["long-doc-qa", *urls, *given]) == status
        assert expected.replace("URL", url) in capsys.readouterr().err


def test_an_endpoint_that_needs_a_key_is_named_and_gets_it(capsys, monkeypatch):
    endpoint = Endpoint()
    endpoint.key = "a-key-for-the-test"
    arguments = ["long-doc-qa", "--documents", "1", "--rounds", "1", "--url"]
    with served(endpoint.app) as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert main([*arguments, url]) == 2
        assert "OPENAI_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", endpoint.key)
        assert main([*arguments, url]) == 0
    assert endpoint.key not in capsys.readouterr().out
