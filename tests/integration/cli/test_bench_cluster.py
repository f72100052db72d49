"""`kvstrata bench cluster` against a real controller."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.cli.bench.cluster import main
from tests.harness.controller_process import ControllerProcess
from tests.harness.daemon import free_port

pytestmark = pytest.mark.integration

QUICK = ("--instances", "3", "--chunks", "300", "--seconds", "1", "--batch", "64", "--most-at-a-time", "2")


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path / "controller") as process:
        yield process


def url_of(controller: ControllerProcess) -> str:
    return f"tcp://127.0.0.1:{controller.ports['reply']}"


def test_a_run_reports_what_the_controller_took_and_its_instances_leave(controller, tmp_path, capsys):
    report_file, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    flags = ("--controller", url_of(controller), "--most-keys-per-s", "4000", *QUICK)
    assert main([*flags, "--json-file", str(report_file), "--svg", str(plot)]) == 0
    report = json.loads(report_file.read_text())
    assert report["join"]["keys_per_s"] > 0
    [step] = report["events"]
    assert step["offered_keys_per_s"] == 4000 and step["taken_keys_per_s"] > 0 and step["lookups"] > 0
    assert [one["at_a_time"] for one in report["lookups"]] == [1, 2]
    assert all(0 < one["p50_ms"] <= one["p99_ms"] for one in report["lookups"])
    told = controller.ask("/v1/cluster")
    assert told["directory"]["synced_keys_total"] == 900
    # Every change that the report counts as sent has arrived.
    changes = told["directory"]["admitted_keys_total"] + told["directory"]["evicted_keys_total"]
    assert changes > 0 and changes % 64 == 0
    assert told["instances"]["live"] == 0, "the instances have left"
    assert told["dropped_event_batches"] == {}
    ElementTree.parse(plot)
    shown = capsys.readouterr().out
    assert "3" in shown and "changes/s offered" in shown and "lookups/s" in shown


def test_an_absent_or_refusing_controller_is_named(tmp_path, capsys):
    assert main(["--controller", f"tcp://127.0.0.1:{free_port()}", *QUICK]) == 1
    assert "no answer from tcp://127.0.0.1" in capsys.readouterr().err
    config = tmp_path / "controller.yaml"
    config.write_text("max_instances: 2\n")
    with ControllerProcess(tmp_path / "controller", flags=("--config", str(config))) as controller:
        assert main(["--controller", url_of(controller), *QUICK]) == 1
        assert "max_instances: 2 instances are registered already" in capsys.readouterr().err
        assert controller.ask("/v1/cluster")["instances"]["live"] == 0


def test_wrong_flags_are_refused_with_what_to_write(capsys) -> None:
    for flags, says in (
        (("--controller", "localhost:8400"), "tcp://HOST:PORT"),
        (("--instances", "1"), "2 to 1000"),
        (("--batch", "1"), "8 to"),
    ):
        assert main(flags) == 2
        assert says in capsys.readouterr().err
