"""A client finds a real server whose XDG_RUNTIME_DIR differs from its own, as between systemd and a login."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.memory import paths
from tests.harness.cache_engine import CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

OURS = f"kvstrata-{os.geteuid()}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server without XDG_RUNTIME_DIR and without a configured socket directory, as systemd starts it."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    with ServerProcess(tmp_path, l1_mb=64, flags=("--socket-dir=",), environment=environment) as made:
        yield made
        shutil.rmtree(paths.socket_dir("", made.port, {}), ignore_errors=True)


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """XDG_RUNTIME_DIR of this process, which runs the client; short enough for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_an_engine_of_a_login_finds_the_server_of_systemd_and_says_where(server, login, caplog):
    caplog.set_level("INFO", logger="kvstrata")
    server.start()
    assert server.ready["socket_dir"] == f"/tmp/{OURS}/{server.port}"
    with CacheEngine("", settings={"port": server.port}) as engine:
        engine.connect()
        engine.stored(prompt(2))
        assert engine.hit(prompt(2)) == 2
    [said] = [text for text in caplog.messages if "XDG_RUNTIME_DIR differs" in text]
    assert server.ready["socket_dir"] in said and str(login / OURS / str(server.port)) in said


def test_one_warning_names_every_place_until_a_server_comes(server, login, caplog):
    caplog.set_level("INFO", logger="kvstrata")
    with CacheEngine("", settings={"port": server.port}) as engine:
        eventually("it has looked", lambda: "no server" in engine.client.error)
        server.start()
        engine.connect()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "no cache server answers" in warning
    assert str(login / OURS / str(server.port)) in warning
    assert f"/tmp/{OURS}/{server.port}" in warning
    assert warning.endswith(f"as uid {os.geteuid()}: lmcache-server --port {server.port}")
    assert len([text for text in caplog.messages if text.startswith("connected to cache server")]) == 1


def test_a_configured_place_is_the_only_one(server, login):
    server.start()
    with CacheEngine(login / "mine", settings={"port": server.port}) as engine:
        eventually("it has looked", lambda: "no server" in engine.client.error)
        assert str(login / "mine") in engine.client.error
        assert "/tmp/" + OURS not in engine.client.error


@pytest.mark.long
def test_the_tools_of_a_login_find_the_server_of_systemd(server, login):
    server.start()

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "kvstrata", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert server.ready["instance_id"] in run("ctl", "--url", server.url, "status")
    small = ("--chunk-mb", "0.25", "--chunks", "1", "--rounds", "1")
    assert "store" in run("bench", "--port", str(server.port), "--url", server.url, *small, "--json")
