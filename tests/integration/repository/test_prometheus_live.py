"""A real Prometheus reads a real server's metrics with the rules of configs/prometheus, and an alert fires."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kvstrata.process.http_token import find_token
from tests.harness.cache_engine import eventually
from tests.harness.daemon import Unavailable
from tests.harness.prometheus import Prometheus
from tests.harness.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
RULES = sorted((ROOT / "configs/prometheus").glob("*.yaml"))
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
    with ServerProcess(folder / "server", l1_mb=16, l2="fs") as server:
        server.start()
        target = server.url.removeprefix("http://")
        try:
            prometheus = Prometheus(folder / "data", "kvstrata", target, find_token(server.url), rules)
        except Unavailable as unavailable:
            pytest.skip(str(unavailable))
        with prometheus:
            eventually("a scrape", lambda: prometheus.query('up{job="kvstrata"} == 1'))
            yield Scene(server, server.folder / "l2", prometheus)


def alerts(prometheus: Prometheus) -> dict[str, dict[str, Any]]:
    """The pending and firing alerts, by name."""
    return {alert["labels"]["alertname"]: alert for alert in prometheus.get("alerts")["alerts"]}


def test_every_rule_is_evaluated_without_an_error(scene: Scene) -> None:
    written = [
        rule
        for path in RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]

    def evaluated() -> list[dict[str, Any]] | None:
        rules = [rule for group in scene.prometheus.get("rules")["groups"] for rule in group["rules"]]
        return None if any(rule["health"] == "unknown" for rule in rules) else rules

    rules = eventually("an evaluation of each rule", evaluated)
    assert {rule["name"] for rule in rules} == {rule.get("alert") or rule["record"] for rule in written}
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    sample = eventually(
        "a recorded series", lambda: scene.prometheus.query("instance:kvstrata_pool_used:ratio")
    )
    assert [(one["metric"]["job"], one["value"][1]) for one in sample] == [("kvstrata", "0")]


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
    assert alert["annotations"]["summary"].startswith(f"{target}: the directory of tier fs-0 is gone")
    assert "restart the server" in alert["annotations"]["command"]
    assert not re.search(r"[{}]|no value", " ".join(alert["annotations"].values()))
    assert scene.prometheus.query(f'count_over_time(ALERTS{{alertname="{ALERT}",alertstate="pending"}}[5m])')
