"""configs/prometheus against the real promtool: each rule on series for which it gives a value, and on others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.harness.promtool import Promtool

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
RULES = sorted((ROOT / "configs/prometheus").glob("*.yaml"))
MB = 1 << 20
ALWAYS = "+0x60"
"""Behind a number: the value of a series at each minute of an hour."""
BIRTH = "_x21 1+0x39"
"""A counter that is absent until its first event, at minute 21, and then stays 1."""
LATE = "0+0x20 1+0x40"
"""A counter that is 0, and 1 from minute 21 on."""


def read_rules() -> dict[str, dict[str, Any]]:
    found = {}
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            found |= {rule.get("alert") or rule["record"]: rule for rule in group["rules"]}
    return found


ALL = read_rules()


def of(name: str, *labels: str, at: str = "bad", job: str = "kvstrata") -> str:
    """A series of one server or controller."""
    selector = ",".join([f'job="{job}"', f'instance="{at}"', *labels])
    return f"{name}{{{selector}}}"


class Case(NamedTuple):
    """Series on which an alert fires for `bad` and for nothing else, at `fires`, and not yet at `quiet`."""

    bad: Mapping[str, str]
    """Series → values at minutes 0, 1, 2, …, of the instance `bad`."""
    well: Mapping[str, str]
    """The same of others, for which it never fires."""
    fires: str
    quiet: str
    value: str = ""
    """What the texts say in place of `$value`."""
    labels: Mapping[str, str] = {}
    """Labels of the alert besides job, instance and severity; an empty value: it lacks that label."""


def counted(name: str, *labels: str, job: str = "kvstrata", value: str = "", **more: str) -> Case:
    """An alert on a counter that is 0 and then rises by 1."""
    bad = {of(name, *labels, job=job): LATE}
    well = {of(name, *labels, at="well", job=job): "1" + ALWAYS}
    return Case(bad, well, "22m", "20m", value, {"job": job} | more)


def held(
    name: str, bad: float, well: float, fires: str, quiet: str, *labels: str, value: str = "", **more: str
) -> Case:
    """An alert on a gauge that has the value `bad` for some time."""
    series = {of(name, *labels): f"{bad}{ALWAYS}"}
    return Case(series, {of(name, *labels, at="well"): f"{well}{ALWAYS}"}, fires, quiet, value, more)


def histogram(name: str, *labels: str, at: str = "bad", within: str = "2.5") -> dict[str, str]:
    """Buckets of a histogram: 60 times a minute, all in the bucket that ends at `within` seconds."""
    bounds = ["0.5", "1.0", "2.5", "+Inf"]
    first = bounds.index(within)
    return {
        of(f"{name}_bucket", *labels, f'le="{bound}"', at=at): "0" + ("+60x60" if i >= first else ALWAYS)
        for i, bound in enumerate(bounds)
    }


CONTROLLER = "kvstrata-controller"
ONE_MB = {
    of("kvstrata_pool_limit_bytes"): f"{MB}{ALWAYS}",
    of("kvstrata_pool_limit_bytes", at="well"): f"{MB}{ALWAYS}",
}
CASES: dict[str, Case] = {  # by name of the alert, and what else tells its cases apart
    "KvstrataServerDown": Case(
        {of("up"): "1+0x5 0+0x40"},
        {of("up", at="well"): "1" + ALWAYS, of("up", job="node"): "0" + ALWAYS},
        "9m",
        "7m",
    ),
    "KvstrataServerRestarted": counted("kvstrata_process_restarts_total"),
    "KvstrataInternalErrors": Case(
        {of("kvstrata_errors_total", 'code="internal"'): BIRTH},
        {
            of("kvstrata_errors_total", 'code="refused"'): BIRTH,
            of("kvstrata_errors_total", 'code="internal"', at="old"): "3" + ALWAYS,
        },
        "22m",
        "20m",
        labels={"code": "internal"},
    ),
    "KvstrataServerSlow": held("scrape_duration_seconds", 0.5, 0.02, "6m", "2m", value="500ms"),
    "KvstrataMemoryMissing": held("kvstrata_pool_missing_bytes", 64 * MB, 0, "3m", "1m", value="64Mi"),
    "KvstrataCorruptChunks of L1": counted("kvstrata_pool_corrupt_entries_total"),
    "KvstrataCorruptChunks of a tier": Case(
        {of("kvstrata_l2_items_total", 'adapter="fs-0"', 'operation="load"', 'outcome="corrupt"'): BIRTH},
        {of("kvstrata_l2_items_total", 'adapter="fs-0"', 'operation="load"', 'outcome="absent"'): BIRTH},
        "22m",
        "20m",
        labels={"adapter": "fs-0", "operation": "load", "outcome": "corrupt"},
    ),
    "KvstrataWrongProofs": counted("kvstrata_wrong_proofs_total"),
    "KvstrataSessionsNearlyFull": Case(
        {
            of("kvstrata_pool_rows_claimed"): "1000" + ALWAYS,
            of("kvstrata_pool_rows_capacity"): "1024" + ALWAYS,
        },
        {
            of("kvstrata_pool_rows_claimed", at="well"): "900" + ALWAYS,
            of("kvstrata_pool_rows_capacity", at="well"): "1024" + ALWAYS,
        },
        "6m",
        "4m",
        "97.66%",
    ),
    "KvstrataLogLinesDropped": counted("kvstrata_log_dropped_lines_total"),
    "KvstrataAdminRequestsRefused": counted(
        "kvstrata_controller_http_refused_requests_total", job=CONTROLLER
    ),
    "KvstrataLookupsTrimmed": Case(
        {
            of("kvstrata_pool_trimmed_leases_total"): "0+6x60",
            of("kvstrata_requests_total", 'op="lookup"'): "0+60x60",
        },
        {
            of("kvstrata_pool_trimmed_leases_total", at="well"): "0+1x60",
            of("kvstrata_requests_total", 'op="lookup"', at="well"): "0+60x60",
        },
        "15m",
        "9m",
        "10%",
    ),
    "KvstrataLeasesNotReturned": held("kvstrata_sessions_leases_revoked", 3, 0, "11m", "9m", value="3"),
    "KvstrataMemoryQuarantined": Case(
        {**ONE_MB, of("kvstrata_pool_quarantined_bytes"): f"{MB // 4}{ALWAYS}"},
        {of("kvstrata_pool_quarantined_bytes", at="well"): f"{MB // 16}{ALWAYS}"},
        "16m",
        "14m",
        "25%",
    ),
    "KvstrataMemoryTooSmall": Case(
        {**ONE_MB, of("kvstrata_pool_evicted_bytes_total"): f"0+{MB // 2}x60"},
        {of("kvstrata_pool_evicted_bytes_total", at="well"): f"0+{MB // 60}x60"},
        "50m",
        "30m",
        "30",
    ),
    "KvstrataLookupsSlow": Case(
        histogram("kvstrata_lookup_seconds"),
        histogram("kvstrata_lookup_seconds", at="well", within="0.5"),
        "13m",
        "9m",
        "2.485s",
    ),
    "KvstrataTierDown": Case(
        {
            of("kvstrata_l2_breaker_open", 'adapter="fs-0"', 'operation="load"'): "1" + ALWAYS,
            of("kvstrata_l2_breaker_open", 'adapter="fs-0"', 'operation="put"'): "0" + ALWAYS,
        },
        {of("kvstrata_l2_breaker_open", 'adapter="disk-1"', 'operation="load"'): "0" + ALWAYS},
        "3m",
        "1m",
        labels={"adapter": "fs-0"},
    ),
    "KvstrataTierMediumLost": held(
        "kvstrata_l2_medium_well", 0, 1, "2m", "0m", 'adapter="fs-0"', adapter="fs-0"
    ),
    "KvstrataTierReadOnly": Case(
        {of("kvstrata_l2_read_only", 'adapter="disk-0"'): LATE},
        {of("kvstrata_l2_read_only", 'adapter="disk-0"', at="well"): "0" + ALWAYS},
        "22m",
        "20m",
        labels={"adapter": "disk-0"},
    ),
    "KvstrataTierStuck": held(
        "kvstrata_l2_stuck_bytes", 2 * MB, 0, "6m", "4m", 'adapter="fs-0"', value="2Mi", adapter="fs-0"
    ),
    "KvstrataPutsSkipped": Case(
        {
            of("kvstrata_put_skipped_total", 'reason="backlog"'): "0+15x60",
            of("kvstrata_put_skipped_total", 'reason="queue_full"'): "0+15x60",
            of("kvstrata_committed_chunks_total"): "0+60x60",
        },
        {
            of("kvstrata_put_skipped_total", 'reason="cleared"', at="well"): "0+30x60",
            of("kvstrata_committed_chunks_total", at="well"): "0+60x60",
        },
        "20m",
        "14m",
        "50%",
    ),
    "KvstrataAdapterHostRestarts": Case(
        {of("kvstrata_l2_host_restarts_total", 'adapter="fs-0"'): "0+0x20 0+1x40"},
        {of("kvstrata_l2_host_restarts_total", 'adapter="fs-0"', at="well"): LATE},
        "30m",
        "21m",
        labels={"adapter": "fs-0"},
    ),
    "KvstrataNotInCluster": held("kvstrata_cluster_member", 0, 1, "3m", "1m"),
    "KvstrataControllerDown": Case(
        {of("up", job=CONTROLLER): "0" + ALWAYS},
        {of("up", job=CONTROLLER, at="well"): "1" + ALWAYS},
        "3m",
        "1m",
        labels={"job": CONTROLLER},
    ),
    "KvstrataControllerRestarted": counted("kvstrata_controller_restarts_total", job=CONTROLLER),
    "KvstrataNoLeader": Case(
        {
            of("kvstrata_controller_leads", job=CONTROLLER): "0" + ALWAYS,
            of("kvstrata_controller_leads", job=CONTROLLER, at="second"): "0" + ALWAYS,
        },
        {
            of("kvstrata_controller_leads", job="other"): "0" + ALWAYS,
            of("kvstrata_controller_leads", job="other", at="second"): "1" + ALWAYS,
        },
        "2m",
        "0m",
        labels={"job": CONTROLLER, "instance": ""},
    ),
    "KvstrataInstanceLost": Case(
        {of("kvstrata_controller_instance_up", 'exported_instance="a"', job=CONTROLLER): "0" + ALWAYS},
        {of("kvstrata_controller_instance_up", 'exported_instance="b"', job=CONTROLLER): "1" + ALWAYS},
        "3m",
        "1m",
        labels={"job": CONTROLLER, "exported_instance": "a"},
    ),
    "KvstrataDirectoryInexact": Case(
        {
            of("kvstrata_controller_instance_confirmed", 'exported_instance="a"', job=CONTROLLER): "0"
            + ALWAYS,
            of("kvstrata_controller_instance_up", 'exported_instance="a"', job=CONTROLLER): "1" + ALWAYS,
        },
        {
            of("kvstrata_controller_instance_confirmed", 'exported_instance="dead"', job=CONTROLLER): "0"
            + ALWAYS,
            of("kvstrata_controller_instance_up", 'exported_instance="dead"', job=CONTROLLER): "0" + ALWAYS,
        },
        "11m",
        "9m",
        labels={"job": CONTROLLER, "exported_instance": "a"},
    ),
    "KvstrataSnapshotsFail": counted("kvstrata_controller_snapshot_failures_total", job=CONTROLLER),
    "KvstrataWrongClusterKey": Case(
        {of("kvstrata_controller_refused_requests_total", 'code="wrong_key"', job=CONTROLLER): BIRTH},
        {of("kvstrata_controller_refused_requests_total", 'code="refused"', job=CONTROLLER): BIRTH},
        "22m",
        "20m",
        labels={"job": CONTROLLER, "code": "wrong_key"},
    ),
}
P99 = 2.485
"""What `histogram` gives as its 99th percentile: 1 s and 99 % of the way to 2.5 s."""
HITS = {
    of("kvstrata_l1_hit_chunks_total"): "0+30x60",
    of("kvstrata_l2_hit_chunks_total"): "0+15x60",
    of("kvstrata_lookup_chunks_total"): "0+60x60",
    **{
        of(f"kvstrata_{name}_chunks_total", at="idle"): "7" + ALWAYS
        for name in ("l1_hit", "l2_hit", "lookup")
    },
}
"""Of one server that is asked and one that is not."""
TRIMMED, SKIPPED = CASES["KvstrataLookupsTrimmed"], CASES["KvstrataPutsSkipped"]
RECORDED: dict[str, tuple[Mapping[str, str], Mapping[str, float]]] = {
    "instance:kvstrata_hits:ratio_rate5m": (HITS, {"": 0.75}),
    "instance:kvstrata_l1_hits:ratio_rate5m": (HITS, {"": 0.5}),
    "job:kvstrata_hits:ratio_rate5m": (HITS, {'job="kvstrata"': 0.75}),
    "instance:kvstrata_lookup_seconds:p99_rate5m": (histogram("kvstrata_lookup_seconds"), {"": P99}),
    "instance:kvstrata_store_seconds:p99_rate5m": (histogram("kvstrata_store_seconds"), {"": P99}),
    "instance_op:kvstrata_request_seconds:p99_rate5m": (
        histogram("kvstrata_request_seconds", 'op="lookup"'), {',op="lookup"': P99},
    ),
    "instance_adapter_operation:kvstrata_l2_seconds:p99_rate5m": (
        histogram("kvstrata_l2_seconds", 'adapter="fs-0"', 'operation="put"'),
        {',adapter="fs-0",operation="put"': P99},
    ),
    "instance:kvstrata_controller_lookup_seconds:p99_rate5m": (
        histogram("kvstrata_controller_lookup_seconds"), {"": P99},
    ),
    "instance:kvstrata_pool_used:ratio": (
        {of("kvstrata_pool_limit_bytes"): "8" + ALWAYS, of("kvstrata_pool_used_bytes"): "2" + ALWAYS}, {"": 0.25},
    ),
    "instance:kvstrata_pool_blocked:ratio": (
        {of("kvstrata_pool_limit_bytes"): "8" + ALWAYS, of("kvstrata_pool_blocked_bytes"): "6" + ALWAYS}, {"": 0.75},
    ),
    "instance:kvstrata_pool_replacements:per_hour_rate30m": (CASES["KvstrataMemoryTooSmall"].bad, {"": 30}),
    "instance:kvstrata_trimmed_lookups:ratio_rate10m": (TRIMMED.bad, {"": 0.1}),
    "instance:kvstrata_puts_skipped:ratio_rate10m": (SKIPPED.bad, {"": 0.5}),
}  # fmt: skip
"""By name: series, and labels → value that is recorded of them. Labels that begin with a comma, or none, follow those
of the instance `bad`."""


def rendered(text: str, labels: Mapping[str, str], value: str) -> str:
    """A text of an alert with its templates replaced."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
    text = re.sub(
        r'\{\{ or \$labels\.(\w+) "(\w+)" \}\}', lambda found: labels.get(found[1]) or found[2], text
    )
    return re.sub(r"\{\{ \$value[^}]*\}\}", lambda _: value, text)


def unit_test(name: str, series: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """A test for `promtool test rules`, which names it where it fails."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        **more,
    }


def of_alert(name: str) -> dict[str, Any]:
    """The alert fires for the bad one alone, and not before its time."""
    case, alert = CASES[name], name.split()[0]
    rule = ALL[alert]
    labels = {"job": "kvstrata", "instance": "bad"} | dict(case.labels)
    labels = {label: value for label, value in labels.items() if value}
    told = {key: rendered(text, labels, case.value) for key, text in rule["annotations"].items()}
    fired = {"exp_labels": labels | rule["labels"], "exp_annotations": told}
    checks = [
        {"eval_time": case.quiet, "alertname": alert, "exp_alerts": []},
        {"eval_time": case.fires, "alertname": alert, "exp_alerts": [fired]},
    ]
    return unit_test(name, {**case.bad, **case.well}, alert_rule_test=checks)


def of_recorded(name: str) -> dict[str, Any]:
    """The recorded series has the value of its series."""
    series, expected = RECORDED[name]
    target = 'instance="bad",job="kvstrata"'
    samples = [
        {"labels": f"{name}{{{labels if labels.startswith('job') else target + labels}}}", "value": value}
        for labels, value in expected.items()
    ]
    return unit_test(
        name, series, promql_expr_test=[{"expr": name, "eval_time": "50m", "exp_samples": samples}]
    )


def test_each_rule_gives_its_value_on_its_series_and_on_no_other(promtool: Promtool, tmp_path: Path) -> None:
    assert set(ALL) == {name.split()[0] for name in CASES} | set(RECORDED)
    tests = [*map(of_alert, CASES), *map(of_recorded, RECORDED)]
    file = tmp_path / "test.yaml"
    rules = [str(path) for path in RULES]
    file.write_text(json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": tests}))
    assert not promtool("check", "rules", *RULES)
    assert not promtool("test", "rules", file)


def test_prometheus_of_the_compose_file_takes_its_settings_with_the_rules(
    promtool: Promtool, tmp_path: Path
) -> None:
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


def test_a_wrong_rule_is_refused(promtool: Promtool, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(RULES[0].read_text().replace("== 0", "=="))
    assert "parse error" in promtool("check", "rules", file)
