"""docs/metrics.md against a real server: every metric that it serves is on the page, and every row is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.observability.exposition import numbers_in
from kvstrata.observability.families import COUNTED, FAMILIES, PATHS, place_of
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.daemon import free_port
from tests.harness.http_read import read
from tests.harness.promtool import Promtool
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

NOT_HERE = {
    "attach.refused.WORD",
    "l2_adapters.ADAPTER.codec.WORD",
    "l2_adapters.ADAPTER.codec.encoded_from_bytes",
    "l2_adapters.ADAPTER.codec.encoded_to_bytes",
    "l2_adapters.ADAPTER.numbers.owners",
    "l2_adapters.ADAPTER.numbers.owners_skipped",
    "recuts.ended.WORD",
}
"""Numbers that this server may lack: no attach was refused, nothing was recut, no adapter has a codec, and without the
library of a transfer engine no peers are read."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with three adapters (one in a process of its own, one shared) that has stored, evicted, and loaded.

    It is in a cluster whose controller is absent.
    """
    folder = tmp_path_factory.mktemp("server")
    adapter = {"type": "fs", "base_path": str(folder / "l2"), "isolation": "process"}
    log = {"type": "disk", "base_path": str(folder / "log"), "capacity_gb": 0.1}
    shared = {"type": "fs", "base_path": str(folder / "shared"), "shared": True}
    flags = tuple(word for entry in (adapter, log, shared) for word in ("--l2-adapter", json.dumps(entry)))
    flags += ("--controller-url", f"tcp://127.0.0.1:{free_port()}")
    with ServerProcess(folder, l1_mb=16, l2="embedded", chunk_tokens=CHUNK_TOKENS, flags=flags) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(4))
            put = ("l2_store", "adapters", "fs-0", "outcomes", "stored")
            eventually("all is in L2", lambda: at(server.get("/v1/status"), *put) == 4)
            read(f"{server.url}/v1/clear", body={"tier": "l1"})
            assert engine.hit(prompt(5)) == 4
            yield server


def at(document: Any, *path: str) -> Any:
    for key in path:
        document = document.get(key, {})
    return document


def page(server: ServerProcess) -> str:
    return read(f"{server.url}/metrics").decode()


def test_every_metric_served_is_on_the_page_with_type_labels_and_meaning(server):
    served = {family.name: family for family in text_string_to_metric_families(page(server))}
    assert set(COUNTED) <= set(served) <= set(FAMILIES)
    for name, family in served.items():
        assert (family.type, family.documentation) == (FAMILIES[name].kind, FAMILIES[name].meaning)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels in (set(), set(FAMILIES[name].labels)), name


def test_promtool_finds_nothing_wrong_with_the_page(server: ServerProcess, promtool: Promtool) -> None:
    assert not promtool("check", "metrics", text=page(server))


def test_durations_of_what_the_server_did_are_counted(server):
    times = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page(server))
        for sample in family.samples
        if sample.labels.get("op", "lookup") == "lookup"
    }
    for name in ("request", "lookup", "store", "l2_prefetch"):
        assert times[f"kvstrata_{name}_seconds_count"] > 0, name
        assert 0 < times[f"kvstrata_{name}_seconds_sum"] < 60, name


def test_an_adapter_in_a_process_of_its_own_serves_the_numbers_that_one_in_the_server_does(server):
    eventually(
        "the host has reported its numbers",
        lambda: at(server.get("/v1/status"), "l2_adapters", "fs-0", "codec"),
    )
    fs, log = (at(server.get("/v1/status"), "l2_adapters", name) for name in ("fs-0", "disk-1"))
    assert set(fs) - set(log) == {"host"}
    assert fs["codec"]["staging_used_bytes"] == log["codec"]["staging_used_bytes"] == 0


def test_every_number_of_the_status_document_has_its_metric_and_the_other_way_round(server):
    status = server.get("/v1/status")
    sections = {pattern.split(".")[0] for pattern in PATHS}
    places = {path: place_of(path) for path, _ in numbers_in({name: status[name] for name in sections})}
    assert not [path for path, place in places.items() if place is None], "give them a row in STATUS_NUMBERS"
    served = {place[0] for place in places.values() if place}
    missing = {pattern for pattern, name in PATHS.items() if name not in served}
    assert missing <= NOT_HERE
