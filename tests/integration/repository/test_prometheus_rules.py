"""configs/prometheus against the real promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.harness.promtool import Promtool

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


def test_a_wrong_rule_is_refused(promtool: Promtool, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(RULES[0].read_text().replace("== 0", "=="))
    assert "parse error" in promtool("check", "rules", file)
