"""docs/metrics.md against a real controller: all that it serves is on the page, and all on the page is served."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from docs.generate.numbers import CONTROLLER, families_of
from kvstrata.rpc import cluster_wire as wire
from tests.harness.cache_engine import eventually
from tests.harness.cluster_instance import ClusterInstance, key_of
from tests.harness.controller_process import ControllerProcess
from tests.harness.prometheus import Promtool

pytestmark = pytest.mark.integration


def page(controller: ControllerProcess) -> str:
    return controller.text("/metrics")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ControllerProcess]]:
    """Starts a controller that has taken a chunk of an instance and has written a snapshot."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> ControllerProcess:
            environment = {**os.environ, "KVSTRATA_CONTROLLER_DIRECTORY_SNAPSHOT_S": "1"}
            controller = ControllerProcess(tmp_path, flags=flags, environment=environment)
            stack.enter_context(controller)
            instance = ClusterInstance(controller.ports["reply"], "a")
            stack.callback(instance.close)
            instance.join({"l1": wire.tags_of(bytes.fromhex(key_of(1)))})
            eventually(
                "a snapshot is written", lambda: controller.ask("/v1/cluster")["snapshot"]["written_unix_ms"]
            )
            return controller

        yield start


def test_the_page_of_metrics_lists_every_metric_that_is_served(start):
    served = {family.name: family for family in parse_plain(page(start()))}
    assert set(served) == set(families_of(CONTROLLER))
    values = {
        (one.name, *one.labels.values()): one.value for family in served.values() for one in family.samples
    }
    assert (
        values["kvstrata_controller_keys", "a", "l1"] == values["kvstrata_controller_listed_keys_total",] == 1
    )
    assert values["kvstrata_controller_instance_up", "a"] == 1
    assert values["kvstrata_controller_snapshot_seconds_count",] >= 1


def test_promtool_finds_nothing_wrong_with_the_page(start, promtool: Promtool):
    assert not promtool("check", "metrics", text=page(start()))
