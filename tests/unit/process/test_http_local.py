"""Tokens of local ports: where each is found, and when it ends."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvstrata import cli
from kvstrata.config.common_model import ListenSettings
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.process.http_local import find_token, fresh_token
from kvstrata.process.listen import ServedToken
from kvstrata.process.ports import port_uids
from tests.harness.other_user import as_nobody

HEAR = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
heard = [listener.accept()[0].recv(65_536).decode() for _ in range(2)]  # a probe goes before the request
print(*heard)
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return os.environ


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def served(token: str, port: int) -> ServedToken:
    return ServedToken(lambda token: None, ListenSettings(), port, token, EventLog("test"))


def test_a_token_is_found_at_every_name_of_this_host_until_its_file_is_closed(environ, port):
    token = fresh_token()
    file = served(token, port)
    for host in ("127.0.0.1", "localhost", "[::1]", "127.0.0.2"):
        assert find_token(f"http://{host}:{port}", environ) == token
    for elsewhere in (
        f"http://10.0.0.1:{port}",
        f"http://localhost.example:{port}",
        "http://localhost:x",
        "//",
        "",
    ):
        assert find_token(elsewhere, environ) == ""
    file.close()
    # Elsewhere there may be the file of a killed process that had the port before.
    assert not Path(file.path).exists() and find_token(f"http://localhost:{port}", environ) != token


def test_an_open_port_ends_the_file_that_a_killed_process_left(environ, port):
    left = Path(served(fresh_token(), port).path)
    assert left.exists()
    assert not served("", port).path and not left.exists()


def test_who_listens_is_told_apart_by_address() -> None:
    ours = os.getuid()
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with as_nobody() as theirs:
            second = socket.create_server(("127.0.0.2", port))
        with second, socket.create_connection(("127.0.0.2", port)):
            hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "::1", "")
            assert [port_uids(port, host) for host in hosts] == [
                {ours},
                {theirs},
                set(),
                set(),
                {ours, theirs},
            ]
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as any_address:
        port = any_address.getsockname()[1]
        assert port_uids(port, "127.0.0.1") == port_uids(port, "::1") == {ours}


def test_a_file_that_cannot_be_written_leaves_nothing_behind(environ, port):
    """A port tries again every 5 s to put it back."""
    file = served(fresh_token(), port)
    file.close()
    Path(file.path).mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        served(fresh_token(), port)
    assert [path.name for path in Path(file.path).parent.iterdir()] == [Path(file.path).name]
    opened = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if str(Path(file.path).parent) in path]


def test_the_file_of_a_later_process_on_the_port_stays(environ, port):
    first, second = (
        served(fresh_token(), port),
        served("second-token-0123456", port),
    )
    first.close()
    assert find_token(f"http://localhost:{port}", environ) == "second-token-0123456"
    second.close()


def test_a_token_that_others_can_read_is_not_used(environ, port):
    token = fresh_token()
    file = served(token, port)
    Path(file.path).chmod(0o640)
    assert find_token(f"http://localhost:{port}", environ) != token
    file.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("whose", ["another user", "the same user"])
def test_a_token_is_not_sent_to_a_port_that_another_user_has_taken(environ, monkeypatch, capsys, whose):
    other_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] * (whose == "another user")
    command = [*other_user, "/usr/bin/env", "python3", "-c", HEAR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        file = served(fresh_token(), port)
        assert cli.main(["ctl", "status", "--url", f"http://localhost:{port}"]) != 0
        file.close()
        heard = listener.stdout.read()
    capsys.readouterr()
    assert "GET /v1/status" in heard and ("Authorization" in heard) == (whose == "the same user")


def test_a_folder_that_others_can_write_to_stops_the_start(tmp_path, environ, port):
    folder = tmp_path / f"kvstrata-{os.geteuid()}" / "http"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"^http\.token_file: .*chmod 700"):
        served(fresh_token(), port)
