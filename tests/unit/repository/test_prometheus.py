"""configs/prometheus: rules and alerts name what exists, and operators can act on each alert."""

from __future__ import annotations

import re
import shlex
from typing import Any, get_args

import yaml

from docs.generate.monitoring import RULES
from docs.generate.numbers import CONTROLLER, SERVER, families_of
from kvstrata.errors import WIRE_ERRORS, WrongKey
from kvstrata.observability.numbers import Family
from kvstrata.server.claims import State
from kvstrata.server.requests.requests import OPERATIONS
from kvstrata.tiers.base import Outcome
from kvstrata.tiers.puts import Skip
from tests.harness.cases import case
from tests.unit.repository.test_pages import ROOT, anchors, commands_of, refusal_of_text

ALL: dict[str, Family] = families_of(SERVER) | families_of(CONTROLLER)
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SAMPLES = {name + ending for name, family in ALL.items() for ending in ENDINGS[family.kind]}
SELECTOR = re.compile(r"\b(kvstrata_\w+)(?:\{([^}]*)\})?")
RECORDED = re.compile(r"\b\w+:kvstrata_\w+:\w+")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
TEMPLATE = re.compile(r"\{\{.*?\}\}")
WORDS = {
    "op": OPERATIONS,
    "code": frozenset(WIRE_ERRORS) | {WrongKey.code},
    "reason": frozenset(Skip),
    "state": frozenset(get_args(State)),
    "outcome": frozenset(status.name.lower() for status in Outcome),
}
"""Values that a selector may ask for, by label."""


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / f"kvstrata-{file}.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = rules("alerts")


def family_of(sample: str) -> Family:
    name = re.sub("_(total|bucket|count|sum)$", "", sample)
    return ALL.get(sample) or ALL[name]


def test_a_rule_asks_for_metrics_labels_and_words_that_exist() -> None:
    for rule in [*rules("recording"), *ALERTS]:
        expression = rule["expr"]
        asked = SELECTOR.findall(RECORDED.sub("", expression))
        recorded = set(RECORDED.findall(expression))
        assert recorded <= {one["record"] for one in rules("recording")}
        assert asked or recorded or re.match(r"(up|avg_over_time\(scrape_duration_seconds)\b", expression)
        for sample, matchers in asked:
            assert sample in SAMPLES, sample
            for label, how, value in MATCHER.findall(matchers):
                assert label in family_of(sample).labels, f"{sample} has no label {label}"
                assert set(value.split("|") if how == "=~" else [value]) <= WORDS[label], value


def test_an_alert_says_what_it_means_what_to_run_and_where_to_read_on() -> None:
    for alert in ALERTS:
        with case(alert["alert"]):
            assert alert["labels"]["severity"] in ("critical", "warning") and len(alert["labels"]) == 1
            told = alert["annotations"]
            assert set(told) == {"summary", "description", "command", "page"}
            page, _, anchor = told["page"].partition("#")
            assert (ROOT / page).exists() and (not anchor or anchor in anchors(ROOT / page))
            _, commands = commands_of(TEMPLATE.sub("NAME", told["command"]))
            for command in commands:
                assert not refusal_of_text(command), shlex.split(command)


def test_kubernetes_gets_the_same_rules_and_a_target_with_the_job_that_they_name() -> None:
    documents = list(yaml.safe_load_all((ROOT / "configs/kubernetes/prometheus.yaml").read_text()))
    shipped = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "PrometheusRule"}
    assert shipped == {path.stem: yaml.safe_load(path.read_text()) for path in RULES.glob("*.yaml")}
    (monitor,) = [one["spec"] for one in documents if one["kind"] == "PodMonitor"]
    (server, *_) = yaml.safe_load_all((ROOT / "configs/kubernetes/server.yaml").read_text())
    pod = server["spec"]["template"]
    assert monitor["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert pod["metadata"]["labels"][monitor["jobLabel"]] == "kvstrata"
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    secret = endpoint["authorization"]["credentials"]
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "http-token"]
    assert secret["name"] == volume["secret"]["secretName"] and secret["key"] == "token"
