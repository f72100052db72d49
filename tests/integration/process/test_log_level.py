"""The level of the log of a real server and a real controller changes while they run, and adapter hosts follow it."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
from pathlib import Path

import pytest
import yaml

from tests.harness import own_commands
from tests.harness.bad_adapter import entry_of
from tests.harness.cache_engine import eventually
from tests.harness.controller_process import ControllerProcess
from tests.harness.http_read import read
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
DETAIL = "DEBUG kvstrata.storage.host.process plugin-0: host: an_sdk: a detail"


def ctl(*arguments: str) -> str:
    done = own_commands.run("kvstrata", "ctl", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_adapter_host_follows_the_level_of_its_server(tmp_path: Path) -> None:
    orders, settings = tmp_path / "orders", tmp_path / "server.yaml"
    orders.mkdir()
    (orders / "numbers.detail").touch()  # the host asks its adapter for numbers every second
    entry = entry_of(tmp_path / "kv", orders)
    settings.write_text("log_level: info\n")
    with ServerProcess(
        tmp_path / "server",
        l1_mb=16,
        l2="embedded",
        flags=("--config", str(settings), "--l2-adapter", json.dumps(entry)),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:
        server.start()

        def details() -> int:
            return server.log.read_text().count(DETAIL)

        def change(level: str) -> str:
            return ctl("--url", server.url, "log-level", level).split()[-1]

        def host() -> dict[str, object]:
            status = json.loads(ctl("--url", server.url, "--json", "status"))
            return status["l2_adapters"]["plugin-0"]["host"]

        before = host()
        assert ctl("--url", server.url, "log-level").split() == ["level", "info"]
        assert change("DEBUG") == "debug"
        eventually("details of the adapter in the log", details)
        server.signal(signal.SIGHUP)
        assert "changed=log_level" in server.expect("reloaded")
        assert ctl("--url", server.url, "log-level").split() == ["level", "info"]
        assert change("warning") == "warning"
        server.expect("log_level_changed", "level=warning was=info")
        known = details()
        settings.write_text("log_level: debug\n")
        server.signal(signal.SIGHUP)
        eventually("more details", lambda: details() > known)
        assert host()["pid"] == before["pid"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            read(f"{server.url}/v1/log-level", token="wrong")
        assert refused.value.code == 401


def line(log: Path, event: str) -> str:
    return next((line for line in log.read_text().splitlines() if event in line.split()), "")


def test_a_controller_changes_its_level(tmp_path: Path) -> None:
    settings = tmp_path / "controller.yaml"
    settings.write_text(yaml.safe_dump({"log_level": "warning"}))
    flags = ("--config", str(settings))
    with ControllerProcess(tmp_path / "controller", flags=flags) as controller:
        cluster = ("--url", controller.url, "cluster", "log-level")
        assert ctl(*cluster).split() == ["level", "warning"]
        assert ctl(*cluster, "info").split() == ["level", "info"]
        assert "level=info was=warning" in line(controller.log, "log_level_changed")
        controller.signal(signal.SIGHUP)
        eventually("the level of the settings", lambda: ctl(*cluster).split() == ["level", "warning"])
