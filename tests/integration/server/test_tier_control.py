"""A tier of a real server is paused and resumed by ctl, while an engine stores and looks up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.cli import asking
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


def test_an_adapter_paused_by_ctl_is_not_used_until_it_is_resumed(tmp_path: Path) -> None:
    entry = {"type": "fs", "base_path": str(tmp_path / "l2"), "capacity_gb": 1}
    with ServerProcess(
        tmp_path / "server",
        l1_mb=64,
        l2="embedded",
        chunk_tokens=CHUNK_TOKENS,
        flags=("--l2-adapter", json.dumps(entry)),
    ) as server:
        server.start()

        def ctl(*arguments: str) -> str:
            command = [sys.executable, "-m", "kvstrata", "ctl", "--url", server.url, *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

        def outcomes() -> dict[str, int]:
            [row] = server.get("/v1/l2/adapters")["adapters"]
            return row["puts"]["outcomes"]

        def clear_l1() -> None:
            def emptied() -> bool:
                asking.ask(server.url, asking.Ask("/v1/clear", {"tier": "l1"}))
                return server.get("/v1/status")["pool"]["entries"]["ready"] == 0

            eventually("L1 is empty; leases may be on their way back", emptied)

        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(4, seed=1))
            eventually("they are put", lambda: outcomes() == {"stored": 4})
            shown = ctl("l2", "list").splitlines()
            assert shown[0].split() == [
                "name", "state", "policy", "asked", "waiting", "under_way", "stored", "records", "used_bytes",
                "stuck_bytes", "breakers",
            ]  # fmt: skip
            assert shown[1].split()[:8] == ["fs-0", "active", "through", "yes", "0", "0", "4", "4"]

            assert "paused" in ctl("l2", "pause", "fs-0")
            engine.stored(prompt(2, seed=2))
            eventually("they are skipped", lambda: outcomes().get("skipped:paused") == 2)
            clear_l1()
            assert not engine.client.has_l2, "clients know at once"
            assert engine.looked_up(prompt(4, seed=1)).n_chunks == 0

            assert "active" in ctl("l2", "resume", "fs-0")
            assert engine.hit(prompt(4, seed=1)) == 4
