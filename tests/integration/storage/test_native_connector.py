"""What a connector in C++ is told of the pool, and what becomes of one whose calls do not come back."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvstrata.storage.base import Found, LoadOutcome, LoadStatus, Presence
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.testing.adapter_contract import SIZE, STORED
from kvstrata.testing.strategies import WAIT_S, key_of, lent_context, load_item, put_item, watched
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.http_read import read
from tests.harness.server_process import ServerProcess
from tests.integration.storage.probe_adapter import compile_probe, entry_of, probe_adapter

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
NAME = "plugin-0"


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_probe(tmp_path_factory.mktemp("probe"))


def server_with(folder: Path, entry: dict[str, Any]) -> ServerProcess:
    return ServerProcess(
        folder / "server",
        l1_mb=64,
        l2="embedded",
        chunk_tokens=CHUNK_TOKENS,
        flags=("--l2-adapter", json.dumps(entry)),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def clear_l1(server: ServerProcess) -> None:
    """Until nothing is in L1."""

    def emptied() -> bool:
        read(f"{server.url}/v1/clear", body={"tier": "l1"})
        return server.get("/v1/status")["pool"]["entries"]["ready"] == 0

    eventually("L1 is empty", emptied)


def of_adapter(server: ServerProcess) -> dict[str, Any]:
    return server.get("/v1/status")["l2_adapters"][NAME]


@pytest.mark.parametrize("isolation", ["in_process", pytest.param("process", marks=pytest.mark.long)])
def test_a_connector_learns_where_the_pool_lies_and_every_record_lies_in_it(probe, tmp_path, isolation):
    with server_with(tmp_path, entry_of(probe, tmp_path / "hang", isolation=isolation)) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(5))
            eventually("all is put", lambda: of_adapter(server)["numbers"].get("inside") == 5)
            clear_l1(server)
            assert engine.hit(prompt(5)) == 5
            eventually("all is loaded", lambda: of_adapter(server)["numbers"].get("inside") == 10)
        assert of_adapter(server)["numbers"] == {
            "region_bytes": server.ready["l1_bytes"], "inside": 10, "outside": 0,
        }  # fmt: skip
    warned = "l2_adapter_may_hang" in server.log.read_text()
    assert warned == (isolation == "in_process")


@pytest.mark.silence
@pytest.mark.long
async def test_a_call_that_never_ends_is_ended_by_its_host_although_others_are_answered(probe, tmp_path):
    hang = tmp_path / "hang"
    entry = entry_of(probe, hang, isolation="process")
    adapter = HostedAdapter(configure_tier(entry, 0).recipe, kill_ms=300, max_pause_s=0.1)
    await adapter.open(lent_context(lambda key: None))
    assert adapter.capabilities.quiesce == "never"
    assert adapter.capabilities.wants_registered_memory
    assert await adapter.put([put_item(key_of(1), SIZE)]) == [STORED]
    hang.touch()
    item = load_item(key_of(1), SIZE)
    load = asyncio.create_task(adapter.load([item]))
    answered = 0
    async with asyncio.timeout(WAIT_S):
        while not load.done():
            answered += await adapter.exists([key_of(2)]) == [Found(Presence.ABSENT)]
            await asyncio.sleep(0)  # once there is no child it is answered at once
    assert answered
    assert await load == [LoadOutcome(LoadStatus.FAILED, "host_died")]
    watched(item).check()
    hang.unlink()
    await adapter.close()


@pytest.mark.parametrize("drains", [False, True])
async def test_an_adapter_reports_what_its_connector_reports_about_its_calls(probe, drains):
    adapter = probe_adapter(str(probe), "", drains)
    assert adapter.capabilities.quiesce == ("drain" if drains else "never")
    await adapter.close()


@pytest.mark.long
def test_in_the_server_a_call_that_never_ends_keeps_its_bytes_and_not_the_server(probe, tmp_path):
    hang = tmp_path / "hang"
    with server_with(tmp_path, entry_of(probe, hang, deadline_ms=200)) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(3))
            eventually("all is put", lambda: of_adapter(server)["numbers"].get("inside") == 3)
            clear_l1(server)
            hang.touch()
            assert engine.looked_up(prompt(3)).n_chunks == 0
            eventually("it has hold of them", lambda: of_adapter(server)["stuck_bytes"])
            assert server.get("/v1/status")["pool"]["pinned_bytes"] >= of_adapter(server)["stuck_bytes"]
            engine.stored(prompt(3, seed=1))
            assert engine.hit(prompt(3, seed=1)) == 3, "L1 serves"
        assert server.stop() == 0, server.log_tail()
