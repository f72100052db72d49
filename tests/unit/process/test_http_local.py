"""process/http_local.py: a token or socket is found by its own user while its server lives, and who is ours."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvstrata import cli
from kvstrata.config.model import HttpSettings
from kvstrata.errors import ConfigError
from kvstrata.process.http_local import (
    find_sockets,
    find_token,
    fresh_token,
    socket_file,
    socket_path,
    token_file,
)
from kvstrata.process.listen import listen

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
    file = token_file(token, port, environ)
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
    file = token_file(fresh_token(), port, environ)
    file.close()
    file.path.mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        token_file(fresh_token(), port, environ)
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    opened = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if str(file.path.parent) in path]


def test_the_token_of_an_ended_process_is_neither_found_nor_kept(environ, port):
    file = token_file(fresh_token(), port, environ)
    left = file.path.read_bytes()
    file.close()
    file.path.write_bytes(left)
    file.path.chmod(0o600)
    assert find_token(f"http://localhost:{port}", environ) == ""
    other = token_file(fresh_token(), port + 1, environ)
    assert not file.path.exists()
    other.close()


def test_the_file_of_a_later_process_on_the_port_stays(environ, port):
    first, second = (
        token_file(fresh_token(), port, environ),
        token_file("second-token-0123456", port, environ),
    )
    first.close()
    assert find_token(f"http://localhost:{port}", environ) == "second-token-0123456"
    second.close()


def test_a_token_that_others_can_read_is_not_used(environ, port):
    file = token_file(fresh_token(), port, environ)
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
        file = token_file(fresh_token(), port, environ)
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
        token_file(fresh_token(), port, environ)


# -- unix sockets


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: pytest's folders can be too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="kvs-") as path:
        yield Path(path)


def at(path: Path) -> HttpSettings:
    return HttpSettings(host=f"unix:{path}")


def test_an_address_is_no_path_and_a_path_is_absolute():
    assert socket_path("127.0.0.1") is None and socket_path("unix") is None
    assert socket_path("unix:/run/a.sock") == Path("/run/a.sock")
    assert socket_path("unix:~/a.sock") == Path.home() / "a.sock"
    for wrong in ("unix:", "unix:a.sock", "unix:./a", "unix:/run/", "unix://"):
        with pytest.raises(ConfigError, match=r"^http\.host: '.*absolute path"):
            socket_path(wrong)
    with pytest.raises(ConfigError, match=r"^--url: ") as refused:
        socket_path("unix:a", "--url")
    assert refused.value.field == "--url"


def test_a_socket_is_for_its_user_alone_and_goes_with_the_listener(folder):
    path = folder / "new" / "admin.sock"
    listener = listen(at(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert listener.port == 0 and listener.path == path
    listener.close()
    assert not path.exists()
    listener.close()


def test_a_stale_socket_is_replaced_and_one_that_a_process_listens_on_is_not(folder):
    path = folder / "admin.sock"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
        ended.listen()
    assert path.is_socket()
    first = listen(at(path))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^http\.host: another process listens"):
            listen(at(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))  # the first one's socket is as it was
    path.unlink()
    second = listen(at(path))
    first.close()
    assert path.is_socket()
    second.close()
    path.write_text("no socket")
    with pytest.raises(ConfigError, match="is no socket"):
        listen(at(path))
    assert path.read_text() == "no socket"


def test_the_socket_of_a_process_that_accepts_nothing_is_not_replaced(folder):
    path = folder / "admin.sock"
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        with pytest.raises(ConfigError, match="another process listens"):
            listen(at(path))
        assert path.is_socket()


def test_a_folder_that_others_can_write_to_is_refused(folder):
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"^http\.host: .*mode 0777"):
        listen(at(folder / "admin.sock"))


def test_sockets_are_found_by_their_kind_while_their_process_lives(folder):
    environ = {"XDG_RUNTIME_DIR": str(folder)}
    one, two = (socket_file("server", folder / name, environ) for name in ("a.sock", "b.sock"))
    other, token = socket_file("controller", folder / "c.sock", environ), token_file("t" * 40, 8080, environ)
    assert find_sockets("server", environ) == [str(folder / "a.sock"), str(folder / "b.sock")]
    assert find_sockets("controller", environ) == [str(folder / "c.sock")]
    left = one.path.read_bytes()
    one.close()
    one.path.write_bytes(left)  # as after SIGKILL
    one.path.chmod(0o600)
    assert find_sockets("server", environ) == [str(folder / "b.sock")]
    for each in (two, other, token):
        each.close()
    ours = {str(folder / name) for name in ("a.sock", "b.sock", "c.sock")}
    assert not ours & {*find_sockets("server", environ), *find_sockets("controller", environ)}
