"""Names on pages and in alerts are the product's: metrics, lines of the log, ports, revisions."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from docs.generate.monitoring import RULES
from kvstrata.client.handles import StoreOutcome
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.model import DEFAULT_PORT, ServerSettings
from kvstrata.controller.metrics import CONTROLLER_FAMILIES
from kvstrata.gateway.metrics import GATEWAY_FAMILIES
from kvstrata.observability.families import FAMILIES, sample_names
from kvstrata.types import MissReason
from tests.harness.cases import case
from tests.unit.repository.test_pages import DOCS, PAGES, ROOT, name

METRIC = re.compile(r"\b(?:vllm:)?kvstrata_\w*[a-z]\b(…|_…)?")
NO_METRICS = {"kvstrata_sockets", "kvstrata_cuda", "kvstrata_sqlite"}
"""A volume, a library and a package."""
REVISION = re.compile(
    r"(?<![\w-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])(?:[0-9a-f]{7,12}|[0-9a-f]{40})(?![\w-])"
)
ROW = re.compile(r"^\| ([\d, ]+) \| (.*?) \| (.*?) \|", re.MULTILINE)


def metrics() -> set[str]:
    """The samples of all processes, and the names of histograms."""
    families = FAMILIES | CONTROLLER_FAMILIES | GATEWAY_FAMILIES
    # The connector's counters stand beside vLLM's, which this Python lacks.
    text = (ROOT / "src/kvstrata/connectors/vllm/statistics.py").read_text()
    counters = re.findall(r'^    "(\w+)": ', text, re.MULTILINE)
    counters += [f"miss_{reason}" for reason in MissReason]
    counters += [f"store_{outcome}_chunks" for outcome in StoreOutcome]
    histograms = {name for name, family in families.items() if family.kind == "histogram"}
    return sample_names(families) | histograms | {f"vllm:kvstrata_{counter}_total" for counter in counters}


def test_metrics_of_a_page_are_served() -> None:
    known = metrics()
    unknown = []
    for page in set(PAGES) - {DOCS / "metrics.md"}:  # which also lists former names
        for found in METRIC.finditer(page.read_text()):
            text = found[0].rstrip("…")
            is_served = any(each.startswith(text) for each in known) if found[1] else text in known
            if not is_served and text not in NO_METRICS:
                unknown.append(f"{name(page)}: {text}")
    assert unknown == []


def test_lines_of_the_log_that_an_alert_names_are_written() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for rule in yaml.safe_load((RULES / "kvstrata-alerts.yaml").read_text())["groups"]:
        for alert in rule["rules"]:
            text = alert["annotations"]["command"]
            for word in re.findall(r"`(?:grep )?'?([a-z_ ]+?)'?`", text):
                with case(alert["alert"], word):
                    assert "_" not in word or re.search(rf"\b{word}\b", source)


def test_revisions_that_a_page_names_are_in_the_history() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout != "false\n":
        pytest.skip("no git repository with its whole history")
    missing = [
        f"{name(page)}: {revision}"
        for page in PAGES
        for revision in REVISION.findall(page.read_text())
        if git("cat-file", "-e", f"{revision}^{{commit}}").returncode
    ]
    assert missing == []


def test_the_table_of_ports_has_each_default_once() -> None:
    """A port that two programs of one host take by default stops the second one."""
    rows = {
        setting.replace("`", ""): [int(port) for port in ports.split(",")]
        for ports, _, setting in ROW.findall((DOCS / "deploy.md").read_text())
    }
    controller = ControllerSettings()
    monitor = controller.monitor_ports
    for setting, ports in {
        "port": [DEFAULT_PORT],
        "http.port": [ServerSettings().http.port],
        "monitor_ports": [monitor.pull, monitor.reply, monitor.heartbeat],
        "http.port of the controller": [controller.http.port],
        "http.port of the gateway": [GatewaySettings().http.port],
        "picker.port": [GatewaySettings().picker.port],
    }.items():
        with case(setting):
            assert rows[setting] == ports
    every = [port for ports in rows.values() for port in ports]
    assert len(every) == len(set(every))
    for page in set(PAGES) - {DOCS / "changelog.md"}:
        for port in re.findall(r"--http_metadata_server_port=(\d+)", page.read_text()):
            assert [int(port)] == rows["Mooncake's metadata server"], name(page)
