"""process/http_unix.py: paths that are refused, sockets that are replaced and those that are not, and who is ours."""

from __future__ import annotations

import contextlib
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.config.model import HttpSettings
from kvstrata.errors import ConfigError
from kvstrata.process.http_token import SocketFile, TokenFile, find_sockets
from kvstrata.process.http_unix import socket_path
from kvstrata.process.listen import listen


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
    one, two = (SocketFile("server", folder / name, environ) for name in ("a.sock", "b.sock"))
    other, token = SocketFile("controller", folder / "c.sock", environ), TokenFile("t" * 40, 8080, environ)
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
