"""docs/metrics.md against a real server: every metric that it serves is on the page, and every row is served."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.observability.metrics import FAMILIES, STATUS_NUMBERS, numbers_in
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.daemon import free_port
from tests.harness.http_read import read
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

ONLY_AFTER_A_FAULT = {"attach.refused.WORD"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with three adapters (one in a process of its own, one shared) that has stored, evicted, and loaded.

    It is in a cluster whose controller is absent.
    """
    folder = tmp_path_factory.mktemp("server")
    adapter = {"type": "fs", "base_path": str(folder / "l2"), "isolation": "process"}
    log = {"type": "disk", "base_path": str(folder / "log"), "capacity_gb": 0.1}
    shared = {"type": "object_store", "url": f"file://{folder}/shared"}
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


def test_every_metric_served_is_on_the_page_with_type_labels_and_meaning(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ready['http_port']}/metrics") as reply:
        served = list(text_string_to_metric_families(reply.read().decode()))
    counted = {family.name: family for family in served if family.name in FAMILIES}
    assert set(counted) == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert (counted[name].type, counted[name].documentation) == (family.kind, family.meaning)
        labels = {label for sample in counted[name].samples for label in sample.labels} - {"le"}
        assert labels in (set(), set(family.labels)), name
    gauges = {family.name: family.documentation for family in served if family.name not in FAMILIES}
    unknown = [name for name, text in gauges.items() if text not in STATUS_NUMBERS.values()]
    assert not unknown, "give them a meaning in STATUS_NUMBERS"


def test_an_adapter_in_a_process_of_its_own_serves_the_numbers_that_one_in_the_server_does(server):
    eventually(
        "the host has reported its numbers",
        lambda: at(server.get("/v1/status"), "l2_adapters", "fs-0", "codec"),
    )
    fs, log = (at(server.get("/v1/status"), "l2_adapters", name) for name in ("fs-0", "disk-1"))
    assert set(fs) - set(log) == {"host"}
    assert fs["codec"]["staging_used_bytes"] == log["codec"]["staging_used_bytes"] == 0


def test_every_number_on_the_page_is_in_the_status_document(server):
    sections = {pattern.split(".")[0] for pattern in STATUS_NUMBERS}
    status = server.get("/v1/status")
    paths = [path for path, _ in numbers_in({name: status[name] for name in sections})]
    for pattern in set(STATUS_NUMBERS) - ONLY_AFTER_A_FAULT:
        known = pattern.split(".")
        assert any(
            len(parts := path.split(".")) == len(known)
            and all(k in ("ADAPTER", "WORD", p) for p, k in zip(parts, known, strict=True))
            for path in paths
        ), f"{pattern} is not served"
