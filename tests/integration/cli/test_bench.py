"""`kvstrata bench`, `bench --l2` and `bench serve`: what they measure, refuse, and leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvstrata.cli.bench.engine import RunningServer, SimulatedEngine
from kvstrata.cli.bench.serve import main
from kvstrata.config.client_model import ClientSettings
from kvstrata.errors import InternalError, Refused, Unavailable
from kvstrata.native.core import record_bytes
from kvstrata.observability.explain import ServerNumbers
from kvstrata.observability.numbers import Pages
from kvstrata.types import RequestIdentity
from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

SMALL = ("--chunk-mb", "1", "--rounds", "2")
TOKEN = "secret-of-blue-0123456"
SERVER = {"chunk_tokens": CHUNK_TOKENS}


def words(server: ServerProcess, *arguments: str) -> tuple[str, ...]:
    where = ("--port", str(server.port), "--socket-dir", str(server.socket_dir), "--url", server.url)
    return ("bench", *where, *SMALL, *arguments)


def of_l2(adapter: str, *arguments: str) -> tuple[str, ...]:
    return ("bench", "l2", "--l2-adapter", adapter, *SMALL_L2, *arguments)


def begun(words: tuple[str, ...]) -> subprocess.Popen[str]:
    """A command as a terminal starts it; a shell without job control starts its children with SIGINT ignored."""
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "kvstrata", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ended(running: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait until it and every process of it has ended."""
    out, err = running.communicate(timeout=60)

    def group_is_gone() -> bool:
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return True
        return False

    eventually("every process of it has ended", group_is_gone)
    return running.returncode, out, err


def bench(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return own_commands.run("kvstrata", *words(server, *arguments))


def measured(words: tuple[str, ...]) -> dict[str, Any]:
    done = own_commands.run("kvstrata", *words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def nothing_is_left(server: ServerProcess) -> bool:
    """The server has no session, lease, reservation or hold, and no tenant has a chunk."""
    status = server.get("/v1/status")
    pool = status["pool"]
    counts = [pool[name] for name in ("leases", "reservations", "holds", "rows_claimed")]
    tenants = [row for row in status["tenants"] if row["tenant"] != "#00000000"]
    return not any(counts) and not tenants and not status["peers"]


def test_a_run_gives_every_figure_verified_and_leaves_nothing(server):
    report = measured(words(server, "--chunks", "3"))
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert list(figures) == [
        "store", "retrieve", "memcpy", "store / memcpy", "retrieve / memcpy", "lookup p50", "lookup p99",
    ]  # fmt: skip
    assert all(0 < figure["least"] <= figure["value"] <= figure["greatest"] for figure in figures.values())
    assert report["verified_bytes"] == 3 * 2 * (1 << 20)
    assert report["notes"] == []
    eventually("all is cleared", lambda: nothing_is_left(server))


def test_a_run_leaves_the_chunks_of_others(server, request):
    with CacheEngine(server.socket_dir, model=request.node.name) as engine:
        engine.connect()
        engine.stored(prompt(8))
        measured(words(server, "--chunks", "4"))
        assert engine.hit(prompt(8)) == 8


def test_a_run_is_bounded_by_the_free_room_in_l1_and_notes_it(server):
    report = measured(words(server, "--chunks", "1000"))
    assert 20 <= report["chunks"] <= 30
    assert f"{report['chunks']} chunks a round instead of 1000" in report["notes"][0]
    assert not any("evicted" in note for note in report["notes"])


def test_without_room_for_a_chunk_the_error_says_what_to_change(server):
    done = bench(server, "--chunk-mb", "128")
    assert (done.returncode, done.stdout) == (1, "")
    assert "MiB of L1 without evicting" in done.stderr and "--l1-size-gb" in done.stderr
    assert done.stderr.count("\n") == 1


def test_wrong_arguments_are_named(server) -> None:
    for arguments, says in (
        (("--socket-dir", "/tmp/no such server"), "not in /tmp/no such server"),
        (("--url", "http://127.0.0.1:1"), "Start one with `lmcache-server`"),
        (("--chunk-mb", "4096"), "--chunk-mb: must be MiB below 4096"),
        (("--chunks", "0"), "--chunks: must be a whole number from 1 to 4096, found '0'"),
        (("--token-file", "/nowhere"), "token_file: /nowhere: cannot be read"),
    ):
        done = bench(server, *arguments)
        assert done.returncode in (1, 2) and done.stdout == ""
        assert says in done.stderr and "Traceback" not in done.stderr
        assert nothing_is_left(server)


def test_an_interrupted_run_leaves_nothing(server):
    running = begun(words(server, "--rounds", "1000", "--chunks", "10"))
    eventually("chunks are stored", lambda: server.get("/v1/status")["pool"]["leased_bytes"])
    with server.frozen():  # the run cannot end by itself from here on
        os.killpg(running.pid, signal.SIGINT)
    assert ended(running) == (130, "", "kvstrata bench: interrupted\n")
    assert nothing_is_left(server)


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[SimulatedEngine]:
    settings = ClientSettings(socket_dir=str(server.socket_dir), port=server.port, chunk_size=256)
    made = SimulatedEngine(settings, 16, 3, 1, RequestIdentity(tenant="tenant"))
    made.connect(0)
    yield made
    made.close()


def test_wrong_bytes_are_an_error(engine):
    engine.store(1)
    engine.retrieve()
    engine._source.fill([2], "another")
    with pytest.raises(InternalError, match="came back with other bytes"):
        engine.retrieve()


def test_missing_chunks_are_an_error(engine, server):
    engine.store(2)
    eventually("its chunks are cleared", lambda: [server_clear(server), nothing_of(server, "tenant")][1])
    with pytest.raises(Refused, match="only 0 of the 3 stored chunks are found"):
        engine.retrieve()


@pytest.mark.silence
def test_a_frozen_server_does_not_count_as_missing_chunks(engine, server):
    engine.store(3)
    with server.frozen(), pytest.raises(Unavailable):
        engine.retrieve()
    eventually("the server answers again", lambda: engine.client.connected)


def server_clear(server: ServerProcess) -> None:
    RunningServer(server.url, "", [server.socket_dir]).clear("tenant")


def nothing_of(server: ServerProcess, tenant: str) -> bool:
    return not any(row["tenant"] == tenant and row["bytes"] for row in server.get("/v1/status")["tenants"])


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    tenants, token, config = (tmp_path / name for name in ("tenants", "token", "server.yaml"))
    for path, text in ((tenants, f"{TOKEN} blue\n"), (token, TOKEN)):
        path.touch(mode=0o600)
        path.write_text(text)
    config.write_text(f"security: {{tenants_file: {tenants}}}\n")
    with ServerProcess(tmp_path, l1_mb=64, flags=("--config", str(config))).started() as server:
        yield lambda *arguments: bench(server, "--json", *(word.format(token=token) for word in arguments))


def test_a_server_with_tenants_is_measured_as_one_of_them(guarded):
    refused = guarded()
    assert refused.returncode == 1 and "give --tenant and --token-file" in refused.stderr
    done = guarded("--tenant", "blue", "--token-file", "{token}")
    assert done.returncode == 0, done.stderr
    assert "stay in L1 until they are evicted" in json.loads(done.stdout)["notes"][-1]


SMALL_L2 = ("--chunk-mb", "1", "--count", "5", "--batch", "2", "--rounds", "2")


def entry(folder: Path, **more: Any) -> str:
    return json.dumps({"type": "fs", "base_path": str(folder), "min_free_gb": 0, **more})


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".kvstrata.lock"]


def test_the_disk_adapter_is_measured_like_any_other(tmp_path):
    report = measured(of_l2(entry(tmp_path, type="disk", capacity_gb=0.5)))
    assert report["verified_bytes"] == 2 * 5 * record_bytes(1, 1 << 20)
    again = measured(of_l2(entry(tmp_path, type="disk", capacity_gb=0.5)))
    assert again["notes"] == [], "all records of the first run were deleted, or the second were refused"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="here"),
        pytest.param({"isolation": "process"}, id="in a host"),
        pytest.param({"codec": ["zstd"]}, id="compressed"),
        pytest.param({"use_odirect": False, "num_workers": 1}, id="buffered", marks=pytest.mark.long),
    ],
)
def test_an_adapter_is_measured_verified_and_emptied(tmp_path, more):
    report = measured(of_l2(entry(tmp_path, **more)))
    assert report["verified_bytes"] == 2 * 5 * record_bytes(1, 1 << 20)
    for name in ("put", "load"):
        assert report[name]["gb_per_s"] > 0 and report[name]["calls"] == 2 * 3
    assert 0 < report["exists"]["p50"] <= report["exists"]["p99"]
    assert files(tmp_path) == []


def test_a_capacity_without_room_for_a_pass_is_refused(tmp_path):
    done = own_commands.run("kvstrata", *of_l2(entry(tmp_path, capacity_gb=0.003)))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--count: 5 MiB do not fit in the 3 MiB" in done.stderr
    assert files(tmp_path) == []


def test_a_directory_of_a_running_server_is_refused(tmp_path):
    other = begun(of_l2(entry(tmp_path), "--rounds", "1000", "--chunk-mb", "1"))
    try:
        eventually("records are stored", lambda: files(tmp_path))
        done = own_commands.run("kvstrata", *of_l2(entry(tmp_path)))
        assert (done.returncode, done.stdout) == (1, "")
        assert str(tmp_path) in done.stderr and "Traceback" not in done.stderr
    finally:
        other.terminate()
        ended(other)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "isolation"),
    [
        (signal.SIGINT, "process"),
        pytest.param(signal.SIGINT, "in_process", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "process", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_over_l2_leaves_nothing(tmp_path, number, isolation):
    running = begun(of_l2(entry(tmp_path, isolation=isolation), "--rounds", "1000", "--chunk-mb", "1"))
    eventually("records are stored", lambda: files(tmp_path))
    os.killpg(running.pid, number)
    assert ended(running) == (130, "", "kvstrata bench l2: interrupted\n")
    assert files(tmp_path) == []


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
    for word in ("ttft_ms", "e2e_ms"):
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
    with ServerProcess(tmp_path / "server", l1_mb=16, environment=environment).started() as server:
        cache = ["--cache-server", f"http://127.0.0.1:{server.ready['http_port']}"]
        with served(Endpoint().app) as url:
            arguments = ["long-doc-qa", "--url", url, "--documents", "1", *cache, "--cache-token-file"]
            report = report_of(capsys, *arguments, str(token))
            assert main([*arguments, "/nowhere/http-token"]) == 2
    assert {"L1 chunks", "L2 chunks"} <= report["total"]["sources"].keys()
    assert "/nowhere/http-token: cannot be read" in capsys.readouterr().err


def test_hits_of_a_round_count_though_a_cache_server_shows_a_page_for_a_while(capsys):
    """Each request is a hit of one chunk in L1; both readings of a short round would be the same page."""
    counters = ServerNumbers()
    pages = Pages(lambda: [("", counters)])

    class Caching(Endpoint):
        async def completions(self, request: Request) -> Response:
            counters.l1_hit_chunks += 1
            return await super().completions(request)

    cache = FastAPI()
    cache.get("/metrics")(lambda: Response(b"kvstrata_instance 1\n" + pages.page()))
    with served(Caching().app) as url, served(cache) as server:
        arguments = ["--documents", "2", "--document-tokens", "80", "--output-tokens", "1"]
        report = report_of(capsys, "long-doc-qa", "--url", url, "--cache-server", server, *arguments)
    assert [each["sources"]["L1 chunks"] for each in report["rounds"]] == [2, 2]


def test_a_request_that_fails_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint()
    endpoint.fails = True
    with served(endpoint.app) as url:
        assert main(["long-doc-qa", "--url", url, "--documents", "2", "--rounds", "1"]) == 1
    assert "token id out of vocabulary" in capsys.readouterr().err


def test_wrong_arguments_name_the_flag_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    for change, status, expected in (
        (["--url", "http://127.0.0.1:9"], 1, "check that it runs"),
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
