"""A real controller process and instances that speak its protocol without KV bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.rpc import cluster_wire as wire
from tests.harness.cluster_instance import ClusterInstance, tags_of
from tests.harness.controller_process import ControllerProcess

pytestmark = pytest.mark.integration

QUICK = ("--heartbeat-s", "0.2", "--dead-after-s", "1")
WAIT_S = 30.0


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path) as process:
        yield process


@pytest.fixture
def instance(controller: ControllerProcess) -> Iterator[Callable[..., ClusterInstance]]:
    """Makes instances, closed in the end."""
    made: list[ClusterInstance] = []

    def make(name: str, **more: Any) -> ClusterInstance:
        made.append(ClusterInstance(controller.ports["reply"], name, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Look until it holds."""
    end_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end_s, f"{what}: not within {WAIT_S} s"
        time.sleep(0.01)
    return found


def holders(owners: list[wire.Owner]) -> dict[str, int]:
    return {owner.instance: owner.n_keys for owner in owners}


def test_who_holds_the_longest_beginning_is_told_and_never_the_asker(controller, instance):
    a = instance("a").join({"l1": tags_of(range(100))})
    b = instance("b").join({"l1": tags_of(range(60)), "disk-0": tags_of(range(100))})
    c = instance("c").join({})
    assert holders(c.where(tags_of(range(200)))) == {"a": 100, "b": 60}
    assert [owner.instance for owner in c.where(tags_of(range(200)))] == ["a", "b"]
    assert holders(a.where(tags_of(range(200)))) == {"b": 60}
    assert holders(b.where(tags_of(range(10)))) == {"a": 10}
    assert holders(c.where(tags_of(range(7)), n_slices=7)) == {"a": 7, "b": 7}
    assert c.where(tags_of([1000])) == []


def test_events_are_seen_and_a_goodbye_is_forgotten_at_once(controller, instance):
    a, b = instance("a").join({}), instance("b").join({})
    a.admit(tags_of(range(10)))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 10})
    a.evict(tags_of([5]))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 5})
    a.tell(wire.Run(wire.Change.CLEAR, "l1", b""), wire.Run(wire.Change.ADMIT, "l1", tags_of([0])))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 1})
    a.goodbye()
    assert b.where(tags_of(range(10))) == []
    assert controller.ask("/v1/cluster")["instances"]["live"] == 1
