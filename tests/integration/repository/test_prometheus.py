"""Prometheus reads what a server and a gateway report, by the published rules and the page of metrics."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from docs.generate.numbers import SERVER, families_of
from kvstrata.process.http_local import find_token
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.daemon import free_port
from tests.harness.http_read import read
from tests.harness.prometheus import Prometheus, Promtool
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
RULES = sorted((ROOT / "configs/prometheus").glob("*.yaml"))


def test_promtool_finds_nothing_wrong_with_the_rules(promtool: Promtool) -> None:
    assert not promtool("check", "rules", *RULES)


def test_prometheus_of_the_compose_file_takes_its_settings_with_the_rules(promtool, tmp_path):
    mounts = dict(
        volume.split(":")[:2]
        for volume in yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["prometheus"][
            "volumes"
        ]
    )
    settings = (ROOT / "docker/prometheus/prometheus.yml").read_text()
    rules = next(inside for outside, inside in mounts.items() if outside == "../configs/prometheus")
    settings = settings.replace(f"{rules}/", f"{RULES[0].parent}/")
    file = tmp_path / "prometheus.yml"
    file.write_text(settings)
    assert str(RULES[0].parent) in settings
    assert not promtool("check", "config", file)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with three adapters (one in a process of its own, one shared) that has stored, evicted, and loaded.

    It is in a cluster whose controller is absent, and its collector of traces is absent too.
    """
    folder = tmp_path_factory.mktemp("server")
    adapter = {"type": "fs", "base_path": str(folder / "l2"), "isolation": "process"}
    log = {"type": "disk", "base_path": str(folder / "log"), "capacity_gb": 0.1}
    shared = {"type": "fs", "base_path": str(folder / "shared"), "shared": True}
    flags = tuple(word for entry in (adapter, log, shared) for word in ("--l2-adapter", json.dumps(entry)))
    flags += ("--controller-url", f"tcp://127.0.0.1:{free_port()}")
    flags += ("--otlp-endpoint", f"http://127.0.0.1:{free_port()}")
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


def test_the_page_of_metrics_lists_every_metric_that_is_served(server):
    served = {family.name for family in text_string_to_metric_families(page(server))}
    assert served == set(families_of(SERVER))


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
    fs, log = (at(server.get("/v1/status"), "l2_adapters", name) for name in ("fs-0", "disk-1"))
    assert set(fs) - set(log) == {"host"}


ALERT = "KvstrataTierMediumLost"
FOR_S = 2


class Scene(NamedTuple):
    """A server with one tier, of type fs, in `folder`, and a Prometheus that reads its metrics."""

    server: ServerProcess
    folder: Path
    prometheus: Prometheus


def sooner(path: Path, folder: Path) -> Path:
    """Write a copy of a file of rules into `folder`, in which ALERT fires after FOR_S seconds."""
    rules = yaml.safe_load(path.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == ALERT:
                assert rule["for"] == "1m"
                rule["for"] = f"{FOR_S}s"
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(rules))
    return copy


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The test is skipped on a machine that cannot have Prometheus."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = [sooner(path, folder) for path in RULES]
    with ServerProcess(folder / "server", l1_mb=16, l2="fs").started() as server:
        target = server.url.removeprefix("http://")
        prometheus = Prometheus(folder / "data", "kvstrata", target, find_token(server.url), rules)
        with prometheus:
            eventually("a scrape", lambda: prometheus.query('up{job="kvstrata"} == 1'))
            yield Scene(server, server.folder / "l2", prometheus)


def alerts(prometheus: Prometheus) -> dict[str, dict[str, Any]]:
    return {alert["labels"]["alertname"]: alert for alert in prometheus.get("alerts")["alerts"]}


@pytest.mark.long
def test_every_query_of_the_dashboard_is_valid(scene: Scene) -> None:
    dashboard = json.loads((ROOT / "configs/grafana/kvstrata.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    for query in queries:
        query = query.replace("$__rate_interval", "5s").replace("$instance", ".*")
        assert "$" not in query
        scene.prometheus.query(query)
    (well,) = scene.prometheus.query(
        next(query for query in queries if "medium_well" in query).replace("$instance", ".*")
    )
    assert (well["metric"]["adapter"], well["value"][1]) == ("fs-0", "1")


@pytest.mark.long
def test_an_alert_is_pending_and_then_fires_when_a_tier_s_directory_vanishes(scene: Scene) -> None:
    assert ALERT not in alerts(scene.prometheus)
    shutil.rmtree(scene.folder)

    def firing() -> dict[str, Any] | None:
        alert = alerts(scene.prometheus).get(ALERT)
        return alert if alert is not None and alert["state"] == "firing" else None

    alert = eventually("the alert", firing)
    target = scene.server.url.removeprefix("http://")
    assert alert["labels"].items() >= {
        "adapter": "fs-0", "instance": target, "job": "kvstrata", "severity": "critical",
    }.items()  # fmt: skip
    assert alert["annotations"]["summary"].startswith(f"{target}: the storage of tier fs-0 is away")
    assert "restart the server" in alert["annotations"]["command"]
    assert not re.search(r"[{}]|no value", " ".join(alert["annotations"].values()))
    assert scene.prometheus.query(f'count_over_time(ALERTS{{alertname="{ALERT}",alertstate="pending"}}[5m])')
