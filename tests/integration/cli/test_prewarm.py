"""`kvstrata prewarm`: a real server with a disk tier, and a small engine behind HTTP that makes tokens."""

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
    """Tokenizes any text as TOKENS. `asked`: paths and bodies."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.asked.append((self.path, body))
                self._answer({"tokens": TOKENS})

            def _answer(self, value: Any) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
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
def engine() -> Iterator[Engine]:
    made = Engine()
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


def test_a_text_is_loaded_from_the_disk_within_its_bytes(client, engine, run, tmp_path):
    text = tmp_path / "text"
    text.write_text("You are an assistant.")
    identity = client.identify(salt="x")
    client.store(identity, chain_of(identity.root, N))
    until_stored(client)
    for budget, loaded in ((3, 3), (9, N)):
        clear_l1(client)
        words = (str(text), "--text", "--engine", engine.url, "--salt", "x")
        report = run(*words, "--budget-bytes", str(budget * RECORD_BYTES + 1))
        facts = {"chunks": N, "l1_chunks": 0, "l2_chunks": loaded, "bytes": loaded * RECORD_BYTES}
        assert facts.items() <= report.items(), report
        assert run("--job", str(report["job"])) == report
    assert engine.asked == [("/tokenize", {"prompt": "You are an assistant."})] * 2


MESSAGES = json.dumps([{"role": "system", "content": "Be brief."}])


def test_a_conversation_is_tokenized_as_a_beginning(client, engine, run):
    client.identify()
    run(MESSAGES, "--engine", engine.url, "--budget-s", "20")
    assert engine.asked == [("/tokenize", {"messages": json.loads(MESSAGES), "add_generation_prompt": False})]


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
        (['["00"]'], 1, "keys[0]: must be 64 hexadecimal digits, found '00'"),
        ([MESSAGES, "--engine", "127.0.0.1:9"], 2, "--engine: '127.0.0.1:9' must be http://HOST:PORT"),
        ([MESSAGES, "--engine", "http://127.0.0.1:9"], 1, "--engine: http://127.0.0.1:9 does not answer"),
        (["[1]", "--model", "other"], 1, "model: 'other' must name the one attached engine"),
        (["--job", "99"], 1, "job: 99 is not a recent prewarm"),
        ([], 2, "one of the arguments PROMPT --job is required"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_named_with_what_to_change(client, run, words, status, says):
    found, error = run(*words)
    assert found == status and says in error and "Traceback" not in error, error
