"""The HTTP page's socket: tokens, bodies, strangers and attacks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.config.common_model import ListenSettings
from kvstrata.process import operations
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import make_port
from kvstrata.process.listen import listen
from kvstrata.process.operations import operations_of
from tests.harness import own_commands
from tests.harness.controller_process import ControllerProcess
from tests.harness.http_read import read
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess

OTHER_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env")
CLEAR = b'{"tier": "all"}'
FOREIGN = [
    {"host": "evil.example"},
    {"host": "evil.example:8080"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "10.0.0.1"},
    {"host": "user@localhost"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]
# Prints the status of each request that another user sends.
ASK = """
import http.client, sys
port, *asked = sys.argv[1:]
for each in asked:
    method, path = each.split(" ")
    link = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    body = '{"tier": "all"}' if method == "POST" else None
    link.request(method, path, body, {"Content-Type": "application/json"})
    print(link.getresponse().status)
"""


def port_of(process: ServerProcess | ControllerProcess) -> int:
    return int(process.ready["http_port"])


def send(
    port: int, head: dict[str, str], body: bytes = b"", *, request: str = "POST /v1/clear"
) -> tuple[int, str]:
    """Send one request as it is; return the status and the body of the answer."""
    lines = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **head,
    }
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection(("127.0.0.1", port), 30) as link:
        link.sendall(f"{request} HTTP/1.1\r\n{text}connection: close\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: link.recv(65_536), b""))
    first, _, rest = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), rest.decode()


def token_of(process: ServerProcess | ControllerProcess) -> str:
    return Path(process.ready["http_token_file"]).read_text().strip()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_this_machine_may_only_ask_the_probes_and_the_metrics(server: ServerProcess) -> None:
    asked = ["GET /healthz", "GET /readyz", "GET /metrics", "GET /v1/status", "POST /v1/clear", "GET /docs",
             "GET /openapi.json", "GET /v1/l2/adapters", "POST /v1/l2/adapters/fs-0/pause", "GET /",
             "GET /nowhere"]  # fmt: skip
    assert asked_by_another_user(server, asked) == [200] * 3 + [401] * 8


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_the_probes_the_metrics_and_an_empty_page_from_a_controller(controller):
    opened = ["GET /healthz", "GET /readyz", "GET /metrics", "GET /", "GET /dashboard/main.js"]
    asked = ["GET /v1/cluster", "GET /v1/instances", "GET /v1/state", "GET /v1/events", "GET /docs",
             "GET /openapi.json", "POST /v1/clear", "POST /v1/dashboard-link",
             "POST /v1/instances/a/drain", "DELETE /v1/instances/a", "GET /nowhere"]  # fmt: skip
    expected = [200] * len(opened) + [401] * len(asked)
    assert asked_by_another_user(controller, [*opened, *asked]) == expected


def asked_by_another_user(process: ServerProcess | ControllerProcess, asked: list[str]) -> list[int]:
    command = [*OTHER_USER, "python3", "-c", ASK, str(port_of(process)), *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


def test_a_foreign_page_and_an_unknown_name_of_this_port_are_refused_even_with_the_token(server, controller):
    right = {"authorization": f"Bearer {token_of(server)}"}
    assert send(port_of(server), right, CLEAR)[0] == 200
    for head in FOREIGN:
        status, answer = send(port_of(server), {**right, **head}, CLEAR)
        assert (status, json.loads(answer)["code"]) == (403, "not_permitted"), head
        assert send(port_of(controller), head, CLEAR)[0] == 403, head
        for path in ("/", "/metrics", "/v1/cluster"):
            assert send(port_of(controller), head, request=f"GET {path}")[0] == 403, (head, path)


def test_names_and_pages_of_this_port_are_served(server: ServerProcess) -> None:
    right, port = {"authorization": f"Bearer {token_of(server)}"}, port_of(server)
    for host in ("localhost", "127.0.0.1", f"127.0.0.1:{port}", "LOCALHOST:1", "[::1]:9"):
        assert send(port, {**right, "host": host}, CLEAR)[0] == 200, host
        same = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert send(port, {**right, "host": host, **same}, CLEAR)[0] == 200, host


def test_a_wrong_token_is_refused(server: ServerProcess) -> None:
    for token in ("", "Bearer", "Bearer wrong", "Basic {}", "{}", "Bearer {}x"):
        status, answer = send(port_of(server), {"authorization": token.format(token_of(server))}, CLEAR)
        assert status == 401 and "bearer token" in json.loads(answer)["message"], token


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_chunked_body_that_goes_on_and_on_takes_no_memory(server: ServerProcess) -> None:
    before = rss_bytes(server.ready["pid"])
    with socket.create_connection(("127.0.0.1", port_of(server)), 30) as link:
        link.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"{}" * (1 << 15) + b"\r\n"
        sent = 0
        try:
            while sent < 60 << 20:
                link.sendall(chunk)
                sent += len(chunk)
        except ConnectionError:
            pass
    assert rss_bytes(server.ready["pid"]) - before < 16 << 20
    assert send(port_of(server), {}, request="GET /healthz")[0] == 200


def test_ctl_of_the_same_user_finds_the_token_which_ends_with_its_process(begin):
    process = begin()
    words = ("status",) if isinstance(process, ServerProcess) else ("cluster", "status")
    file, first = Path(process.ready["http_token_file"]), token_of(process)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert own_commands.run("kvstrata", "ctl", "--url", process.url, *words).returncode == 0
    process.stop()
    assert not file.exists()
    process.start()
    assert token_of(process) != first
    assert first not in process.log.read_text()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        read(f"{process.url}/openapi.json", token=first)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_off_loopback_only_the_probes_answer_without_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("t" * 32)
    server = ServerProcess(
        tmp_path / "server", l1_mb=16, flags=("--http-host", "0.0.0.0"),
        environment={**os.environ, "KVSTRATA_HTTP_TOKEN_FILE": str(token)},
    )  # fmt: skip
    flags = ("--host", "0.0.0.0", "--monitor-host", "127.0.0.1", "--token-file", str(token))
    controller = ControllerProcess(tmp_path / "controller", flags=flags)
    asked = ["GET /healthz", "GET /readyz", "GET /metrics", "POST /v1/clear", "GET /openapi.json"]
    with server, controller:
        server.start()
        for process in (server, controller):
            assert asked_by_another_user(process, asked) == [200] * 2 + [401] * 3
            process.expect("port_without_tls", "host=0.0.0.0", f"port={port_of(process)}")
            right = {"authorization": f"Bearer {token.read_text()}"}
            assert send(port_of(process), right, request="GET /metrics")[0] == 200


def test_insecure_opens_the_port_and_the_log_says_so_at_each_start(begin):
    process = begin(flags=("--insecure",))
    for starts in (1, 2):
        for head, status in (({}, 200), ({"host": "evil.example"}, 403)):
            assert send(port_of(process), head, request="GET /openapi.json")[0] == status
        process.expect("http_port_open", count=starts)
        if isinstance(process, ControllerProcess):
            assert process.dashboard_link() == f"{process.url}/"
        process.stop()
        process.start()


DESCRIPTORS = 256


def test_connections_up_to_the_descriptor_limit_end_no_server(tmp_path: Path) -> None:
    """libzmq's ipc listener aborts the process when accept finds no descriptor."""
    with ServerProcess(tmp_path, l1_mb=16).started() as server:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        with contextlib.ExitStack() as silent:
            for _ in range(2 * DESCRIPTORS):
                silent.enter_context(socket.create_connection(("127.0.0.1", port_of(server))))
            for path in ("/healthz", "/readyz", "/metrics"):
                assert read(server.url + path)
            with RpcClient(server.socket_dir) as client:
                assert client.ping().epoch == server.ready["epoch"]
                assert client.status()["http"]["closed"]["idle"] >= DESCRIPTORS
        assert server.stop() == 0


MOST = (32 << 20) - 100
TOKENS = b'{"model": "%s", "tokens": [' + b"4294967295," * 2_900_000 + b"1]}"
BODIES = (
    (b"[" * MOST, 413, "besides its list"),
    (b'{"tokens": [' + b"1.5e9," * (MOST // 6) + b"1]}", 400, "tokens[0]: Expected `int`"),
    (b'{"tokens": [' + b"9" * MOST + b"]}", 400, "has more than 65536 bytes"),
    (TOKENS % b"nobody", 400, "'nobody' must name the one attached engine"),
)


def while_pinging(server: ServerProcess, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which runs on a thread while an engine pings the server."""
    done: list[Any] = []
    with RpcClient(server.socket_dir) as engine:
        thread = threading.Thread(target=lambda: done.append(work()))
        thread.start()
        while thread.is_alive():
            engine.ping()
        thread.join()
    return done[0]


def test_a_large_body_is_answered_while_an_engine_pings(server: ServerProcess) -> None:
    right = {"authorization": f"Bearer {token_of(server)}"}
    for body, expected, says in BODIES:
        status, answer = while_pinging(
            server, lambda body=body: send(port_of(server), right, body, request="POST /v1/prewarm")
        )
        assert (status, json.loads(answer)["code"]) == (expected, "bad_request"), says
        assert says in json.loads(answer)["message"]


def test_millions_of_tokens_are_prefetched(server: ServerProcess) -> None:
    right = {"authorization": f"Bearer {token_of(server)}"}
    status, answer = while_pinging(
        server, lambda: send(port_of(server), right, TOKENS % b"tiny", request="POST /v1/prewarm")
    )
    assert status == 202, answer
    job = json.loads(send(port_of(server), right, request=f"GET /v1/prewarm/{json.loads(answer)['job']}")[1])
    assert job["chunks"] == 2_900_001 // 16


def test_a_controller_takes_as_many_tokens_and_keys_as_its_api_says(controller: ControllerProcess) -> None:
    for field, listed, status, says in (
        ("tokens", b"7," * 4_194_303 + b"7", 400, "no engine has"),
        ("tokens", b"7," * 4_194_304 + b"7", 400, "at most 4194304 items"),
        ("keys", b",".join([b'"%064x"' % 7] * 65_536), 200, '"longest"'),
        ("keys", b",".join([b'"%064x"' % 7] * 65_537), 400, "at most 65536 items"),
        ("keys", b",".join([b'"nothing"'] * 20_000), 400, "keys[0]: must be 64 hexadecimal digits"),
        ("tokens", b",".join([b'"%064x"' % 7] * 2_000), 400, "tokens[0]: Expected `int`"),
        ("keys", b"7," * 50_000 + b"7", 400, "keys[0]: Expected `str`"),
    ):
        body = b'{"%s": [%s]}' % (field.encode(), listed)
        found, answer = send(port_of(controller), controller.bearer(), body, request="POST /v1/lookup")
        assert (found, says in answer) == (status, True), answer[:500]


STEP_S, ROUNDS = 0.004, 20
"""Maximum time for which a step may keep the interpreter.  A ping asks for it four times (to wake, to read, after the
pool, to write), and waits for SWITCH_S and a step each time: 18 of the 20 ms that an attack may cost."""
CHUNKED = "host: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
ONE_BYTE_CHUNKS = "1\r\nx\r\n" * 50_000
HEADERS = "".join(f"a{number}: b\r\n" for number in range(5_000))
SHAPES = {
    "probes": "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
    "metrics": "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
    "refused": "GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
    "foreign": "GET /metrics HTTP/1.1\r\nhost: evil.example\r\n\r\n" * 50,
    "one-byte chunks on a probe": f"GET /healthz HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}",
    "one-byte chunks on the metrics": f"GET /metrics HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}",
    "one-byte chunks on a route": f"POST /v1/clear HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}",
    "a long body": f"POST /v1/clear HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40000000\r\n\r\n{'x' * 400_000}",
    "a body of brackets": f"GET /metrics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 65536\r\n\r\n{'[' * 65_536}",
    "many headers": f"GET /healthz HTTP/1.1\r\nhost: localhost\r\n{HEADERS}\r\n",
    "a header without end": "GET /healthz HTTP/1.1\r\nhost: localhost\r\na: " + "b" * 400_000,
    "half a request": "GET /metrics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx",
    "nothing of HTTP": "\x16\x03\x01" * 20_000,
    "connections": "",
}


class Steps:
    """The longest CPU time between two calls or returns of the port's thread, at each of which others may take over."""

    longest_s = before_s = 0.0

    def __call__(self, frame: object, event: str, argument: object) -> None:
        if threading.current_thread().name != "kv-http":
            sys.setprofile(None)
            return
        self.longest_s = max(self.longest_s, time.thread_time() - self.before_s)
        self.before_s = time.thread_time()


def send_text(port: int, text: str) -> None:
    """Send a text over a connection of its own, and read what comes until the port ends it."""
    with socket.create_connection(("127.0.0.1", port)) as link, contextlib.suppress(OSError):
        link.sendall(text.encode("latin-1"))
        link.shutdown(socket.SHUT_WR)
        while link.recv(65536):
            pass


PARTS = SimpleNamespace(readiness=lambda: (True, ""), page=lambda: bytes(256 << 10))


@pytest.mark.integration
async def test_no_attack_on_the_http_port_keeps_the_interpreter_from_an_engine() -> None:
    """What else an attack could cost an engine, turns of its loop, is in tests/unit/process/test_http_thread.py."""
    port, steps = (
        await make_port("test", operations_of(operations), PARTS, Access(ListenSettings(), "t" * 32)),
        Steps(),
    )
    listener = listen(ListenSettings(port=0))
    threading.setprofile(steps)
    task = asyncio.create_task(port.serve(listener))
    gc.freeze()
    try:
        for name, text in SHAPES.items():
            for turn in range(1, ROUNDS + 1):  # the machine may add time, and takes none away
                steps.longest_s = 0.0
                await asyncio.to_thread(send_text, listener.port, text)
                if steps.longest_s <= STEP_S:
                    break
                assert turn < ROUNDS, f"{name}: a step takes {steps.longest_s * 1000:.1f} ms"
        assert steps.before_s
    finally:
        threading.setprofile(None)
        gc.unfreeze()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
