"""The state that a real controller gives its dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.controller.routes import bodies
from tests.harness.cluster_instance import ClusterInstance, tags_of
from tests.harness.controller_process import ControllerProcess

pytestmark = pytest.mark.integration

PATIENT = ("--heartbeat-s", "600", "--dead-after-s", "1200")
"""No instance dies in these tests, though each sends one heartbeat at most."""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path, flags=PATIENT) as process:
        yield process


def test_the_whole_state_agrees_with_the_lists_of_the_api(controller: ControllerProcess) -> None:
    with ClusterInstance(controller.ports["reply"], "told") as one:
        one.join({"l1": tags_of(range(5)), "disk-0": tags_of(range(9))})
        whole = controller.ask("/v1/state")
        listed = controller.ask("/v1/instances")
        cluster = controller.ask("/v1/cluster")
    (row,) = whole["instances"]
    assert row.keys() == bodies.LiveRow.model_fields.keys()
    assert row["sync"].keys() == bodies.LiveSync.model_fields.keys()
    assert row["keys"] == {"l1": 5, "disk-0": 9}
    shared = bodies.InstanceFacts.model_fields.keys()
    assert {name: row[name] for name in shared} == {name: listed["instances"][0][name] for name in shared}
    for name, ago in (("heard", "heard_ago_s"), ("joined", "joined_ago_s")):
        seen_ms = cluster["unix_ms"] - 1000 * listed["instances"][0][ago]
        assert abs(row[f"{name}_unix_ms"] - seen_ms) < 2_000
    assert whole["cluster"].keys() == cluster.keys()
    assert whole["cluster"]["keys"] == cluster["keys"] == {"l1": 5, "disk-0": 9}
