"""The stream of changes of a real controller, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.controller.routes import bodies
from tests.harness.cluster_instance import LOAD, ClusterInstance, tags_of
from tests.harness.controller_process import ControllerProcess
from tests.oracles.live import apply

pytestmark = pytest.mark.integration

PATIENT = ("--heartbeat-s", "600", "--dead-after-s", "1200")
"""No instance dies in these tests, though each sends one heartbeat at most."""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path, flags=PATIENT) as process:
        yield process


def told(controller: ControllerProcess, after: str = "", header: str = "") -> Iterator[dict[str, Any]]:
    """Iterates over the changes of a stream."""
    request = urllib.request.Request(f"{controller.url}/v1/live?after={after}", headers=controller.bearer())
    if header:
        request.add_header("Last-Event-ID", header)
    with urllib.request.urlopen(request, timeout=30) as stream:
        fields: dict[str, str] = {}
        for line in stream:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
                continue
            change = json.loads(fields["data"])
            assert (fields["event"], fields["id"]) == ("change", change["look"])
            bodies.ChangeBody.model_validate(change)
            yield change
            fields = {}


def changes(controller: ControllerProcess, after: str = "") -> list[dict[str, Any]]:
    """Changes since the look `after`."""
    found: list[dict[str, Any]] = controller.ask(f"/v1/changes?after={after}")["changes"]
    return found


def test_the_whole_state_agrees_with_the_lists_of_the_api(controller: ControllerProcess) -> None:
    with ClusterInstance(controller.ports["reply"], "told") as one:
        one.join({"l1": tags_of(range(5)), "disk-0": tags_of(range(9))})
        (whole,) = changes(controller)
        listed = controller.ask("/v1/instances")
        cluster = controller.ask("/v1/cluster")
    assert whole["after"] is None
    (row,) = whole["instances"].values()
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


def test_the_stream_carries_changes_and_nothing_else(controller: ControllerProcess) -> None:
    with (
        ClusterInstance(controller.ports["reply"], "busy") as busy,
        ClusterInstance(controller.ports["reply"], "idle") as idle,
    ):
        for one in (busy, idle):
            one.join({"l1": tags_of(range(5))})
        stream = told(controller)
        shown = apply({}, next(stream))
        assert shown["instances"].keys() == {"busy", "idle"}
        busy.heartbeat(load=LOAD.__class__({}, {"l1": 77}, {"l1": 100}, {"miss": 3}, 0, 0, 0, 4))
        change = next(stream)
        while "busy" not in change["instances"]:
            assert change["instances"] == {}, "no instance has sent anything"
            shown = apply(shown, change)
            change = next(stream)
        assert change["instances"].keys() == {"busy"}
        assert {"used_bytes", "sessions", "hits_total"} <= change["instances"]["busy"].keys()
        assert not {"id", "tiers", "keys", "sync"} & change["instances"]["busy"].keys()
        shown = apply(shown, change)
        controller.ask("/v1/instances/idle", method="DELETE")
        while not change["gone"]:
            change = next(stream)
            shown = apply(shown, change)
        assert change["removed"] == shown["removed"] == ["idle"]
        assert [event["kind"] for event in change["events"]] == ["removed"]
        assert shown["instances"].keys() == {"busy"}
        assert shown["instances"]["busy"]["used_bytes"] == {"l1": 77}
        stream.close()


def test_a_reader_that_comes_back_continues_from_its_last_look(controller: ControllerProcess) -> None:
    with ClusterInstance(controller.ports["reply"], "told") as one:
        one.join({"l1": tags_of(range(5))})
        first = next(told(controller))
        again = next(told(controller, header=first["look"]))
        assert again["after"] == first["look"]
        assert next(told(controller, after=again["look"]))["after"] == again["look"]
        polled = changes(controller, first["look"])
        assert polled[0] == again, "one serialisation for all readers"
        assert next(told(controller, after="1-1"))["after"] is None


def test_a_restarted_controller_sends_the_whole_state_again(controller: ControllerProcess) -> None:
    look = changes(controller)[0]["look"]
    controller.kill()
    controller.start()
    changes(controller)
    (change,) = changes(controller, look)
    assert change["after"] is None


def test_too_long_a_name_of_a_look_is_refused(controller: ControllerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        controller.ask(f"/v1/changes?after={'7' * 65}")
    assert refused.value.code == 400
    assert json.loads(refused.value.read())["field"] == "after"
