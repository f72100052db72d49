"""HTTP ports on unix sockets: `kvstrata ctl` finds and uses them without a token, another user gets no byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import own_commands
from tests.harness.cluster_instance import ClusterInstance
from tests.harness.controller_process import ControllerProcess
from tests.harness.server_process import ServerFailed, ServerProcess

OTHER_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env")
# Prints the bytes that another user gets for a request that needs no token.
ASK = """
import socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
try:
    link.sendall(b"GET /healthz HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n")
    print(link.recv(4096))
except ConnectionError:
    print(b"")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: pytest's folders can be too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="kvs-") as path:
        yield Path(path)


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """Variables under which nothing but this test's own ports is found."""
    return {**os.environ, "XDG_RUNTIME_DIR": str(folder)}


def ctl(environment: dict[str, str], *arguments: str) -> Any:
    """What `kvstrata ctl` prints as JSON. Raises AssertionError with its error."""
    done = own_commands.run("kvstrata", "ctl", "--json", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ctl_works_over_the_socket_of_a_server_and_finds_it(tmp_path, folder, environment):
    path = folder / "admin" / "server.sock"
    flags = ("--http-host", f"unix:{path}")
    with ServerProcess(tmp_path, l1_mb=16, flags=flags, environment=environment) as server:
        for _ in range(2):  # the second start finds the socket that SIGKILL has left
            ready = server.start()
            assert (ready["http_port"], ready["http_socket"], ready["http_token_file"]) == (0, str(path), "")
            told = ctl(environment, "--url", f"unix:{path}", "status")
            assert told["instance"]["pid"] == server.ready["pid"]
            assert ctl(environment, "status")["instance"]["pid"] == server.ready["pid"]
            assert ctl(environment, "clear", "--tier", "all")["cleared"]
            server.kill()
            assert path.is_socket()
        server.start()
        shutil.rmtree(path.parent)
        server.expect("socket_made_anew", str(path))
        assert ctl(environment, "status")["instance"]["pid"] == server.ready["pid"]
        server.stop()
        assert not path.exists()


def test_a_second_server_on_the_socket_of_a_living_one_does_not_start(tmp_path, folder, environment):
    flags = ("--http-host", f"unix:{folder / 'admin.sock'}")
    with (
        ServerProcess(tmp_path / "one", l1_mb=16, flags=flags, environment=environment) as one,
        ServerProcess(tmp_path / "two", l1_mb=16, flags=flags, environment=environment) as two,
    ):
        one.start()
        with pytest.raises(ServerFailed, match=r"http\.host: another process listens"):
            two.start()
        assert ctl(environment, "status")["instance"]["pid"] == one.ready["pid"]


def test_too_long_a_path_stops_the_start(tmp_path: Path, folder: Path) -> None:
    flags = ("--http-host", f"unix:{folder / ('x' * 107)}")
    with (
        ServerProcess(tmp_path, l1_mb=16, flags=flags) as server,
        pytest.raises(ServerFailed, match=r"http\.host: .*at most 107"),
    ):
        server.start()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_byte_even_where_the_files_let_it_in(tmp_path, folder, environment):
    path = folder / "admin.sock"
    ask = [*OTHER_USER, "python3", "-c", ASK, str(path)]
    flags = ("--http-host", f"unix:{path}")
    with ServerProcess(tmp_path, l1_mb=16, flags=flags, environment=environment) as server:
        server.start()
        shut = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        assert shut.returncode != 0 and "PermissionError" in shut.stderr
        folder.chmod(0o755)
        path.chmod(0o666)
        done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "b''\n", done.stderr
        assert ctl(environment, "status")["http"]["closed_stranger"] == 1


def test_a_controller_on_a_socket_serves_ctl_and_instances_and_has_no_link_for_browsers(
    tmp_path: Path, folder: Path, environment: dict[str, str]
) -> None:
    path = folder / "controller.sock"
    flags = ("--http-host", f"unix:{path}")
    with ControllerProcess(tmp_path, flags=flags, environment=environment) as controller:
        assert controller.ready["http_socket"] == str(path)
        instance = ClusterInstance(controller.ports["reply"], "told", environment=environment)
        instance.join({})
        for url in ((), ("--url", f"unix:{path}")):
            rows = ctl(environment, *url, "cluster", "instances")["instances"]
            assert [row["id"] for row in rows] == ["told"]
        instance.close()
        with pytest.raises(AssertionError, match="a browser needs a tcp port"):
            ctl(environment, "cluster", "dashboard-link")
        assert "#/login/" not in controller.log.read_text()
