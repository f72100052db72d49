"""Tokens of local ports and sessions of browsers: where each is found, and when it ends."""

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
from kvstrata.process.http_gate import Access
from kvstrata.process.http_local import TokenFile, find_token, fresh_token
from kvstrata.process.http_login import CODE_S, MAX_SESSIONS, PAGE_KEY, SESSION_S, Logins, Session

HEAR = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
heard = [listener.accept()[0].recv(65_536).decode() for _ in range(2)]  # a probe goes before the request
print(*heard)
"""


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_token_is_found_at_every_name_of_this_host_until_its_file_is_closed(environ, port):
    token = fresh_token()
    file = TokenFile(token, port, environ)
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
    assert not file.path.exists() and find_token(f"http://localhost:{port}", environ) == ""


def test_a_file_that_cannot_be_written_leaves_nothing_behind(environ, port):
    """A port tries again every 5 s to put it back."""
    file = TokenFile(fresh_token(), port, environ)
    file.close()
    file.path.mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        TokenFile(fresh_token(), port, environ)
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    opened = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if str(file.path.parent) in path]


def test_the_token_of_an_ended_process_is_neither_found_nor_kept(environ, port):
    file = TokenFile(fresh_token(), port, environ)
    left = file.path.read_bytes()
    file.close()
    file.path.write_bytes(left)
    file.path.chmod(0o600)
    assert find_token(f"http://localhost:{port}", environ) == ""
    other = TokenFile(fresh_token(), port + 1, environ)
    assert not file.path.exists()
    other.close()


def test_the_file_of_a_later_process_on_the_port_stays(environ, port):
    first, second = (
        TokenFile(fresh_token(), port, environ),
        TokenFile("second-token-0123456", port, environ),
    )
    first.close()
    assert find_token(f"http://localhost:{port}", environ) == "second-token-0123456"
    second.close()


def test_a_token_that_others_can_read_is_not_used(environ, port):
    file = TokenFile(fresh_token(), port, environ)
    file.path.chmod(0o640)
    assert find_token(f"http://localhost:{port}", environ) == ""
    file.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("whose", ["another user", "the same user"])
def test_a_token_is_not_sent_to_a_port_that_another_user_has_taken(environ, monkeypatch, capsys, whose):
    monkeypatch.setenv("XDG_RUNTIME_DIR", environ["XDG_RUNTIME_DIR"])
    other_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] * (whose == "another user")
    command = [*other_user, "/usr/bin/env", "python3", "-c", HEAR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        file = TokenFile(fresh_token(), port, environ)
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
        TokenFile(fresh_token(), port, environ)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logins(clock: Clock) -> Logins:
    return Logins(9000, clock)


def headers(session: Session, name: str = "kvstrata-9000") -> dict[bytes, bytes]:
    cookie = f"theme=dark; {name}={session.cookie};other"
    return {b"cookie": cookie.encode(), PAGE_KEY: session.page_key.encode()}


@pytest.mark.parametrize("code", ["", "x", "ü" * 32, "\ud800"])
def test_an_unknown_code_is_refused_and_uses_no_other_one_up(logins, code):
    right = logins.new_code()
    assert not logins.take(code) and not logins.take(right[:-1])
    assert logins.take(right)


def test_a_code_expires(logins, clock):
    early, late = logins.new_code(), logins.new_code()
    clock.now_s += CODE_S - 0.01
    assert logins.take(early)
    clock.now_s += 0.01
    assert not logins.take(late)


def test_a_session_needs_the_cookie_and_the_page_key_of_one_session(logins):
    one, other = logins.begin(), logins.begin()
    assert len({*one, *other}) == 4
    assert logins.proven(headers(one)) and logins.proven(headers(other))
    for crossed in (
        Session(one.cookie, other.page_key),
        Session(one.cookie, one.cookie),
        Session(one.page_key, one.page_key),
        Session(one.cookie, ""),
        Session("", one.page_key),
        Session("", ""),
    ):
        assert not logins.proven(headers(crossed))
    assert not logins.proven(headers(one, "kvstrata-9001"))
    assert not logins.proven({PAGE_KEY: one.page_key.encode()})
    assert not logins.proven({b"cookie": headers(one)[b"cookie"]})


def test_a_session_ends_with_its_time_and_at_the_bound_the_oldest_ends(logins, clock):
    sessions = [logins.begin() for _ in range(MAX_SESSIONS + 2)]
    assert [logins.proven(headers(one)) for one in sessions] == [False] * 2 + [True] * MAX_SESSIONS
    clock.now_s += SESSION_S
    assert not any(logins.proven(headers(one)) for one in sessions)


def test_another_token_ends_the_sessions_that_the_last_one_opened(logins):
    access = Access(ListenSettings(), "an-old-token-0123456789", logins=logins)
    session, code = headers(logins.begin()), logins.new_code()
    assert access.proven(session)
    access.set_token("a-new-token-0123456789")
    assert not access.proven(session) and not logins.take(code)
    assert access.proven({b"authorization": b"Bearer a-new-token-0123456789"})
