"""Who may use the HTTP ports of a server and a controller: not another user, not a web page, not a body without end."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.cli import asking
from tests.harness import own_commands
from tests.harness.controller_process import ControllerProcess
from tests.harness.http_read import read
from tests.harness.server_process import ServerFailed, ServerProcess

OTHER_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=16) as process:
        process.start()
        yield process


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path_factory.mktemp("controller")) as process:
        yield process


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
    asked = ["GET /v1/cluster", "GET /v1/instances", "GET /v1/state", "GET /v1/events", "GET /v1/login", "GET /docs",
             "GET /openapi.json", "POST /v1/clear", "POST /v1/dashboard-link", "POST /v1/logout",
             "POST /v1/instances/a/drain", "DELETE /v1/instances/a", "GET /nowhere"]  # fmt: skip
    expected = [200] * len(opened) + [405 if each == "GET /v1/login" else 401 for each in asked]
    assert asked_by_another_user(controller, [*opened, *asked]) == expected
    status, answer = send(port_of(controller), {}, b'{"code": "x"}', request="POST /v1/login")
    assert (status, json.loads(answer)["field"]) == (403, "code")


def asked_by_another_user(process: ServerProcess | ControllerProcess, asked: list[str]) -> list[int]:
    """The status of each request."""
    command = [*OTHER_USER, "/usr/bin/env", "python3", "-c", ASK, str(port_of(process)), *asked]
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


def test_a_body_without_a_token_is_refused_before_it_arrives(server: ServerProcess) -> None:
    long = {"content-length": str(60 << 20)}
    for head in (long, {"transfer-encoding": "chunked", "content-length": ""}):
        named = {name: value for name, value in head.items() if value}
        with socket.create_connection(("127.0.0.1", port_of(server)), 30) as link:
            text = "".join(f"{name}: {value}\r\n" for name, value in named.items())
            link.sendall(f"POST /v1/clear HTTP/1.1\r\nhost: localhost\r\n{text}\r\n".encode())
            answer = b"".join(iter(lambda: link.recv(65_536), b""))  # until the server closes
        assert answer.split()[1] == b"401"
    assert send(port_of(server), long, request="GET /metrics")[0] == 413
    right = {"authorization": f"Bearer {token_of(server)}"}
    status, answer = send(port_of(server), {**long, **right})
    assert status == 413 and json.loads(answer)["field"] == "body"


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


def test_ctl_of_the_same_user_finds_the_token_and_it_ends_with_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, l1_mb=16) as server:
        server.start()
        file = Path(server.ready["http_token_file"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        first = token_of(server)
        assert own_commands.run("kvstrata", "ctl", "--url", server.url, "status").returncode == 0
        assert asking.ask(server.url, asking.Ask("/v1/status"))["instance"]
        assert read(server.url + "/v1/status")
        server.stop()
        assert not file.exists()
        server.start()
        assert token_of(server) != first
        assert first not in server.log.read_text()


def test_ctl_of_the_same_user_finds_a_controller_s_token_which_is_new_at_each_start(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        file, first = Path(controller.ready["http_token_file"]), token_of(controller)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert (
            own_commands.run("kvstrata", "ctl", "--url", controller.url, "cluster", "status").returncode == 0
        )
        controller.stop()
        assert not file.exists()
        controller.start()
        assert token_of(controller) != first
        assert first not in controller.log.read_text()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            controller.ask("/v1/cluster", token=first)


def test_a_token_file_that_others_can_read_stops_the_start(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o644)
    environment = {**os.environ, "KVSTRATA_HTTP_TOKEN_FILE": str(token)}
    with (
        ServerProcess(tmp_path / "server", l1_mb=16, environment=environment) as server,
        pytest.raises(ServerFailed, match=r"http\.token_file: .*mode 644\); chmod 600"),
    ):
        server.start()


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


def test_insecure_opens_the_port_and_the_log_says_so_at_each_start(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, l1_mb=16, flags=("--insecure",)) as server:
        for starts in (1, 2):
            server.start()
            assert send(port_of(server), {}, CLEAR)[0] == 200
            assert send(port_of(server), {"host": "evil.example"}, CLEAR)[0] == 403
            server.expect("http_port_open", count=starts)
            server.stop()


def test_insecure_opens_a_controller_and_the_log_says_so_at_each_start(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path, flags=("--insecure",)) as controller:
        for starts in (1, 2):
            assert controller.ask("/v1/instances", token="")["instances"] == []
            assert send(port_of(controller), {"host": "evil.example"}, request="GET /v1/cluster")[0] == 403
            controller.expect("http_port_open", count=starts)
            assert controller.dashboard_link() == f"{controller.url}/"
            controller.stop()
            controller.start()
