"""Adapters are added and removed on a real server under load, by ctl and by HTTP: no acknowledged chunk is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess
from tests.harness.shelf import entry

pytestmark = pytest.mark.integration

TOKEN = "secret-of-the-admin-0123"
MAX_PROMPTS = 300
"""Of three chunks: all of them fit into L1."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server without L2 whose admin port asks for a token."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    environment = {
        **os.environ,
        "KVSTRATA_HTTP_TOKEN_FILE": str(token),
        "KVSTRATA_L2_RUNTIME_ROOTS": json.dumps([str(tmp_path)]),
        "KVSTRATA_L2_RUNTIME_TYPES": json.dumps(["fs", "fault_inject"]),
    }
    with ServerProcess(
        tmp_path / "server", l1_mb=64, chunk_tokens=CHUNK_TOKENS, environment=environment
    ) as server:
        server.start()
        yield server


def flags_without_adapters(server: ServerProcess) -> list[str]:
    flags = list(server._flags)
    while "--l2-adapter" in flags:
        at = flags.index("--l2-adapter")
        del flags[at : at + 2]
    return flags


def restart_with(server: ServerProcess, *entries: dict[str, Any]) -> None:
    """Start the server again with these adapters in its settings."""
    assert server.stop() == 0
    server._flags = flags_without_adapters(server)
    for one in entries:
        server._flags += ["--l2-adapter", json.dumps(one)]
    server.start()


def ctl(server: ServerProcess, *arguments: str, token: bool = True) -> subprocess.CompletedProcess[str]:
    where = ["--url", f"http://127.0.0.1:{server.ready['http_port']}"]
    if token:
        where += ["--token-file", str(server.folder.parent / "token")]
    return subprocess.run(
        [sys.executable, "-m", "kvstrata", "ctl", *where, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def http(
    server: ServerProcess, method: str, path: str, body: Any = None, token: str = TOKEN
) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.ready['http_port']}{path}", method=method)
    request.add_header("Authorization", f"Bearer {token}")
    if body is not None:
        request.data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def rows(server: ServerProcess) -> list[dict[str, Any]]:
    status, answer = http(server, "GET", "/v1/l2/adapters")
    assert status == 200
    return answer["adapters"]


def add(server: ServerProcess, adapter: dict[str, Any], **more: Any) -> dict[str, Any]:
    status, row = http(server, "POST", "/v1/l2/adapters", {"adapter": adapter, **more})
    assert status == 201, row
    return row


def fs(folder: Path, **more: Any) -> dict[str, Any]:
    return {"type": "fs", "base_path": str(folder), "capacity_gb": 1, **more}


def records_in(folder: Path) -> int:
    return sum(1 for _ in folder.glob("??/??/*"))


def test_an_adapter_added_by_ctl_is_used_drained_and_removed(server, tmp_path):
    assert ctl(server, "l2", "list").stdout == "no adapter\n"
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        engine.stored(prompt(3, seed=1))
        added = ctl(server, "--json", "l2", "add", json.dumps(fs(tmp_path / "l2")), "--backfill")
        assert (added.returncode, added.stderr) == (0, "")
        name = json.loads(added.stdout)["name"]
        assert name == "fs-0"
        engine.stored(prompt(4, seed=2))
        assert engine.client.has_l2, "clients know at once"
        eventually("L1's chunks and the new ones are put", lambda: acknowledged(server, name) == 7)
        assert records_in(tmp_path / "l2") == 7
        layers = json.loads(ctl(server, "--json", "l2", "show", name).stdout)
        assert [row["layer"] for row in layers] == ["medium", "codec", "deadline", "metrics"]
        assert {row["process"] for row in layers} == {"server"}
        shown = ctl(server, "l2", "list").stdout.splitlines()
        assert shown[0].split() == [
            "name", "position", "state", "policy", "asked", "waiting", "stored", "records", "used_bytes", "stuck_bytes",
            "after_restart", "breakers",
        ]  # fmt: skip
        assert shown[1].split()[10] == "gone"
        assert shown[1].split()[:8] == ["fs-0", "0", "active", "through", "yes", "0", "7", "7"]
        clear_l1(server)
        assert engine.hit(prompt(3, seed=1)) == 3 and engine.hit(prompt(4, seed=2)) == 4, "out of the adapter"

        drained = ctl(server, "l2", "drain", name)
        assert drained.returncode == 0 and "drained" in drained.stdout
        engine.stored(prompt(2, seed=3))
        eventually(
            "they are skipped", lambda: rows(server)[0]["puts"]["outcomes"].get("skipped:draining") == 2
        )

        resumed = ctl(server, "l2", "resume", name, "--backfill")
        assert resumed.returncode == 0 and "active" in resumed.stdout
        eventually("what was skipped is put after all", lambda: records_in(tmp_path / "l2") == 9)
        engine.stored(prompt(2, seed=4))
        eventually("and so is what comes", lambda: records_in(tmp_path / "l2") == 11)

        removed = ctl(server, "l2", "remove", name)
        assert not engine.client.has_l2
        assert removed.returncode == 0 and "removed" in removed.stdout
        assert rows(server) == []
        assert name not in metrics(server), "no metric names a removed adapter"
        clear_l1(server)
        assert engine.looked_up(prompt(3, seed=1)).n_chunks == 0
        again = add(server, fs(tmp_path / "l2"))
        assert again["name"] == "fs-1", "the removed adapter has released its directory"
        assert engine.hit(prompt(3, seed=1)) == 3, "its records stayed"


@pytest.mark.long
def test_exported_entries_start_a_server_with_the_same_adapters(server, tmp_path):
    secret = tmp_path / "key"
    secret.touch(mode=0o600)
    secret.write_text("k" * 64)
    codec = ["zstd", {"name": "aes-gcm", "key_file": str(secret)}]
    shelf = entry("any")
    shelf["adapter_params"] |= {"hangs": []}
    restart_with(server, fs(tmp_path / "second", codec=codec, policy="on_evict"), shelf)
    add(server, fs(tmp_path / "first"), position=0)
    http(server, "DELETE", "/v1/l2/adapters/plugin-1")
    exported = ctl(server, "l2", "export")
    assert (exported.returncode, exported.stderr) == (0, "")
    assert json.loads(ctl(server, "--json", "l2", "export").stdout) == yaml.safe_load(exported.stdout)
    before = [row["entry"] for row in rows(server)]
    assert server.stop() == 0
    config = tmp_path / "kvstrata.yaml"
    config.write_text(exported.stdout)
    server._flags = [*flags_without_adapters(server), "--config", str(config)]
    server.start()
    assert [row["entry"] for row in rows(server)] == before
    assert [row["in_settings"] for row in rows(server)] == [True, True]
    http(server, "DELETE", "/v1/l2/adapters/fs-0")
    last = ctl(server, "l2", "list").stdout.splitlines()[-1]
    assert last.split()[0] == "fs-0" and "removed" in last and "back" in last


def status(server: ServerProcess) -> dict[str, Any]:
    return http(server, "GET", "/v1/status")[1]


def clear_l1(server: ServerProcess) -> None:
    """Clear L1 until it is empty; leases of earlier lookups may still be on their way back."""

    def emptied() -> bool:
        assert http(server, "POST", "/v1/clear", {"tier": "l1"})[0] == 200
        entries = status(server)["pool"][
            "entries"
        ]  # reservations from before a restart stay until their owner is gone
        return entries["ready"] == entries["unverified"] == 0

    eventually("L1 is empty", emptied)


def metrics(server: ServerProcess) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{server.ready['http_port']}/metrics")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def acknowledged(server: ServerProcess, name: str) -> int:
    """Chunks that an adapter said it has."""
    outcomes = by_name(server, name)["puts"]["outcomes"]
    return outcomes.get("stored", 0) + outcomes.get("exists", 0)


def by_name(server: ServerProcess, name: str) -> dict[str, Any]:
    return next(row for row in rows(server) if row["name"] == name)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_acknowledged_chunk_is_lost_while_adapters_come_and_go(server, tmp_path, killed):
    """One adapter stays; the others are added, drained and removed under stores and lookups."""
    keep = fs(tmp_path / "keep")
    add(server, keep)
    done: list[int] = []
    stop = threading.Event()

    def load() -> None:
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            for seed in range(MAX_PROMPTS):
                if stop.is_set():
                    return
                if engine.stored(prompt(3, seed)) == ["stored"] * 3:
                    done.append(seed)
                if seed % 3 == 2 and not killed:  # what is leased when the server dies stays in L1 with us
                    engine.hit(prompt(3, done[seed % len(done)]))  # asserts that the bytes are right

    def change() -> None:
        n = 0
        with contextlib.suppress(OSError):  # when the server is killed
            while not stop.is_set():
                n += 1
                name = add(server, fs(tmp_path / f"other{n % 2}"), position=n % 2, backfill=n % 3 == 0)[
                    "name"
                ]
                if n % 2:
                    assert (
                        http(server, "POST", f"/v1/l2/adapters/{name}/drain", {"loads": n % 4 == 1})[0] == 200
                    )
                if n % 3 == 1:
                    again = {"backfill": n % 2 == 0}
                    code, row = http(server, "POST", f"/v1/l2/adapters/{name}/resume", again)
                    assert (code, row["state"], row["takes_loads"]) == (200, "active", True), row
                code, outcome = http(server, "DELETE", f"/v1/l2/adapters/{name}?wait_s={n % 3}")
                assert (code, outcome["state"]) == (200, "removed"), outcome
                turns.append(n)

    turns: list[int] = []
    threads = [Guarded(load), Guarded(change)]
    eventually(
        "some were stored while adapters came and went",
        lambda: (len(done) >= 60 and (len(turns) >= 2 or killed)) or any(one.error for one in threads),
    )
    if killed:
        server.kill()
    stop.set()
    for thread in threads:
        thread.join()
        assert thread.error is None or killed, thread.error
    if killed:
        server._flags[server._flags.index("--l2-adapter") + 1] = json.dumps(keep)
        server.start()
    else:
        assert len(turns) >= 2
    eventually("all of it is acknowledged", lambda: acknowledged(server, "fs-0") >= 3 * len(done))
    assert records_in(tmp_path / "keep") >= 3 * len(done)
    clear_l1(server)
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        assert [seed for seed in done if engine.hit(prompt(3, seed)) != 3] == []


class Guarded(threading.Thread):
    """Runs `body`, and keeps what it raised."""

    def __init__(self, body: Callable[[], None]) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._body = body
        self.start()

    def run(self) -> None:
        try:
            self._body()
        except BaseException as error:
            self.error = error
