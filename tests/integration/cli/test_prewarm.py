"""`kvstrata prewarm`: a real server with a disk tier, and a small engine behind HTTP that stores what it is asked."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import prewarm
from tests.harness.l2_load import clear_l1, until_stored
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, RpcClient, chain_of
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration
N = 5
TOKENS = list(range(N * CHUNK_TOKENS))


class Engine:
    """Tokenizes any text as TOKENS; computes and stores prompts of these tokens. `asked`: paths and bodies.

    It answers completions with `status`, and computes none before `may_compute`.
    """

    def __init__(self, client: RpcClient) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.status, self.may_compute = 200, threading.Event()
        self.may_compute.set()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.asked.append((self.path, body))
                engine.may_compute.wait()
                if self.path == "/v1/completions" and engine.status == 200:
                    identity = client.identify(salt=body.get("cache_salt", ""))
                    client.store(identity, chain_of(identity.root, len(body["prompt"]) // CHUNK_TOKENS))
                self._answer({"tokens": TOKENS, "error": {"message": "no room"}})

            def _answer(self, value: Any) -> None:
                self.send_response(engine.status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.may_compute.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(start: Callable[..., ServerProcess], tmp_path: Path) -> ServerProcess:
    return start({"type": "disk", "base_path": str(tmp_path / "l2"), "capacity_gb": 1})


@pytest.fixture
def client(server: ServerProcess) -> Iterator[RpcClient]:
    with RpcClient(server.socket_dir) as client:
        yield client


@pytest.fixture
def engine(client: RpcClient) -> Iterator[Engine]:
    made = Engine(client)
    yield made
    made.close()


@pytest.fixture
def run(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command; its report, or its exit status and error."""

    def run(*words: str) -> Any:
        status = prewarm.main([*words, "--url", server.url, "--json"])
        out, err = capsys.readouterr()
        found = json.loads(out) if out else err
        return found if status == 0 else (status, found)

    return run


def test_a_prompt_is_computed_by_the_engine_and_later_loaded_from_the_disk(client, engine, run, tmp_path):
    client.identify()
    text = tmp_path / "text"
    text.write_text("You are an assistant.")
    computed = run(str(text), "--text", "--engine", engine.url, "--salt", "x")
    facts = {
        "chunks": N,
        "l1_chunks": N,
        "l2_chunks": 0,
        "computed_chunks": N,
        "keys": 0,
        "affordable_tokens": 0,
    }
    assert facts.items() <= computed.items(), computed
    assert 0 < computed["phases"]["compute"] < computed["seconds"]
    assert engine.asked == [
        ("/tokenize", {"prompt": "You are an assistant."}),
        (
            "/v1/completions",
            {
                "prompt": TOKENS,
                "max_tokens": 1,
                "cache_salt": "x",
                "kv_transfer_params": {"kvstrata.store": "commit"},
            },
        ),
    ]
    until_stored(client)
    clear_l1(client)
    loaded = run(json.dumps(TOKENS), "--salt", "x", "--engine", engine.url)
    facts = {"chunks": N, "l1_chunks": 0, "l2_chunks": N, "computed_chunks": 0, "bytes": N * RECORD_BYTES}
    assert facts.items() <= loaded.items() and len(engine.asked) == 2, loaded
    assert run("--job", str(loaded["job"])) == loaded


@pytest.mark.parametrize(("budget", "in_l2", "in_all"), [(3, 0, 3), (3, 2, 3), (2, 2, 2), (9, 2, N)])
def test_loads_and_computed_chunks_together_stay_within_the_bytes(client, engine, run, budget, in_l2, in_all):
    identity = client.identify()
    if in_l2:
        client.store(identity, chain_of(identity.root, in_l2))
        until_stored(client)
        clear_l1(client)
    report = run(json.dumps(TOKENS), "--engine", engine.url, "--budget-bytes", str(budget * RECORD_BYTES + 1))
    assert report["l1_chunks"] + report["l2_chunks"] == in_all, report
    assert (report["bytes"], report["computed_chunks"]) == (in_l2 * RECORD_BYTES, in_all - in_l2)
    prompts = [body["prompt"] for path, body in engine.asked if path == "/v1/completions"]
    assert prompts == ([TOKENS[: in_all * CHUNK_TOKENS]] if in_all > in_l2 else [])
    assert client.status()["pool"]["entries"]["ready"] == in_all


def test_an_engine_that_refuses_or_takes_too_long_is_named_or_ends_with_the_time(client, engine, run):
    client.identify()
    engine.status = 400
    status, error = run(json.dumps(TOKENS), "--engine", engine.url)
    assert (status, error) == (1, f"kvstrata prewarm: --engine: {engine.url}: no room\n")
    engine.status = 200
    engine.may_compute.clear()
    status, report = run(json.dumps(TOKENS), "--engine", engine.url, "--budget-s", "0.5")
    assert (status, report["reason"], report["l1_chunks"]) == (1, "deadline", 0)


MESSAGES = json.dumps([{"role": "system", "content": "Be brief."}])


def test_a_conversation_is_tokenized_as_a_beginning(client, engine, run):
    client.identify()
    run(MESSAGES, "--engine", engine.url, "--budget-s", "20")
    path, body = engine.asked[0]
    assert (path, body) == (
        "/tokenize",
        {"messages": json.loads(MESSAGES), "add_generation_prompt": False},
    )


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["no such file"], 2, "no such file: cannot be read"),
        (["[1, 2"], 2, "PROMPT: [1, 2: not a JSON list of token ids, keys or messages; for a text add --text"),
        (["[-1]"], 2, "tokens[0]: must be a whole number of at least 0"),
        (["[1]", "--budget-s", "0"], 2, "budget_s: must be a number above 0"),
        (["[1]", "--budget-bytes", "-5"], 2, "budget_bytes: must be"),
        (["/dev/null", "--text"], 2, "--engine: give the URL of an engine"),
        ([MESSAGES], 2, "--engine: give the URL of an engine"),
        (['["00"]', "--engine", "http://127.0.0.1:9"], 2, "of which only keys are given; give token ids or a text"),
        (['["00"]'], 1, "keys[0]: must be 64 hexadecimal digits, found '00'"),
        ([MESSAGES, "--engine", "127.0.0.1:9"], 2, "--engine: '127.0.0.1:9' must be http://HOST:PORT"),
        ([MESSAGES, "--engine", "http://127.0.0.1:9"], 1, "--engine: http://127.0.0.1:9 does not answer"),
        (["[1]", "--model", "other"], 1, "model: 'other' must name the one attached engine"),
        (["--job", "99"], 1, "job: 99 is not among the recent ones"),
        ([], 2, "one of the arguments PROMPT --job is required"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_named_with_what_to_change(client, run, words, status, says):
    found, error = run(*words)
    assert found == status and says in error and "Traceback" not in error, error
