"""A real controller that is killed or stopped: what its snapshot and the stored orders of admins restore."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvstrata.controller.orders import Orders
from kvstrata.controller.snapshot import BadSnapshot, read_document
from kvstrata.rpc import cluster_wire as wire
from tests.harness import own_commands
from tests.harness.cache_engine import eventually
from tests.harness.cluster_instance import ClusterInstance, Refused, holders, tags_of
from tests.harness.controller_process import ControllerProcess

pytestmark = pytest.mark.integration
ANY = '{"reply": 0}'
SNAPSHOTS = {**os.environ, "KVSTRATA_CONTROLLER_DIRECTORY_SNAPSHOT_S": "1"}


def written(controller: ControllerProcess) -> None:
    """Wait until a snapshot is written whose writing began after this call."""
    writes = controller.ask("/v1/cluster")["snapshot"]["writes"]
    eventually(
        "two snapshots are written", lambda: controller.ask("/v1/cluster")["snapshot"]["writes"] >= writes + 2
    )


def test_a_killed_controller_serves_its_snapshot_as_unconfirmed_until_each_is_followed(tmp_path):
    with ControllerProcess(tmp_path, environment=SNAPSHOTS) as controller:
        port = controller.ports["reply"]
        with (
            ClusterInstance(port, "a") as a,
            ClusterInstance(port, "b") as b,
            ClusterInstance(port, "c") as c,
        ):
            a.join({"l1": tags_of(range(1000)), "disk-0": tags_of(range(50))})
            b.join({"l1": tags_of(range(500))})
            c.join({})
            written(controller)
            epoch = a.epoch
            controller.kill()
            controller.start()
            c.register()
            owners = c.until_where(
                tags_of(range(1000)), lambda owners: holders(owners) == {"a": 1000, "b": 500}
            )
            assert not any(owner.confirmed for owner in owners)
            assert c.epoch != epoch
            a.evict(tags_of(range(900, 1000)))
            a.register()
            a.until_followed()
            assert [(owner.n_keys, owner.confirmed) for owner in c.where(tags_of(range(1000)))] == [
                (900, True),
                (500, False),
            ]
            assert controller.ask("/v1/instances/a")["following"]["lists"] == 0, "it was followed on"
            b.evict(tags_of(range(100, 500)))
            b.forget_changes()
            b.register()
            b.until_followed()
            assert controller.ask("/v1/instances/b")["following"]["lists"] == 1
            assert holders(c.where(tags_of(range(1000)))) == {"a": 900, "b": 100}
            # Another process registers as `b`: the keys of the old one are forgotten at once.
            with ClusterInstance(port, "b") as later:
                later.register()
                assert holders(c.where(tags_of(range(1000)))) == {"a": 900}


def test_a_snapshot_that_cannot_be_used_is_ignored_counted_and_logged(tmp_path):
    with ControllerProcess(tmp_path, environment=SNAPSHOTS) as controller:
        with ClusterInstance(controller.ports["reply"], "a") as a:
            a.join({"l1": tags_of(range(10))})
            written(controller)
        controller.kill()
        good = controller.snapshot.read_bytes()
        at = good.index(b'{"controller"')
        a_bit, another_version = (
            bytes([*good[:at], good[at] ^ 1, *good[at + 1 :]]),
            good[:7] + b"\x63" + good[8:],
        )
        for content in (good[:-1], a_bit, another_version, b"#!/bin/sh\necho hello to the world\n", b""):
            controller.snapshot.write_bytes(content)
            with pytest.raises(BadSnapshot):
                read_document(controller.snapshot)
        controller.snapshot.unlink()
        controller.snapshot.mkdir()
        controller.start()
        told = controller.ask("/v1/cluster")
        assert told["snapshot"]["ignored"] == 1 and told["snapshot"]["ignored_reason"]
        assert told["instances"]["restored"] == 0 and told["directory"]["placements"] == 0
        controller.expect("snapshot_ignored")
        assert "kvstrata_controller_snapshots_ignored_total 1.0" in controller.text("/metrics")


def test_no_placement_of_a_snapshot_is_served_if_one_is_damaged_and_its_members_are_listed(tmp_path):
    with ControllerProcess(tmp_path) as controller, ClusterInstance(controller.ports["reply"], "a") as a:
        a.join({"l1": tags_of(range(1000))})
        assert controller.stop() == 0, "it writes a last snapshot"
        content = bytearray(controller.snapshot.read_bytes())
        content[content.index(b'{"controller"') - 1] ^= 1  # in the last partition
        controller.snapshot.write_bytes(content)
        controller.start()
        controller.expect("snapshot_ignored")
        assert controller.ask("/v1/cluster")["snapshot"]["ignored"] == 1
        assert controller.ask("/v1/instances/a")["keys"].get("l1", 0) == 0
        assert controller.snapshot.read_bytes() == content, "it is left in place"
        with ClusterInstance(controller.ports["reply"], "c").join({}) as c:
            assert c.where(tags_of(range(1000))) == []
            a.register()
            c.until_where(tags_of(range(1000)), lambda owners: holders(owners) == {"a": 1000})


UNREADABLE = {
    "cannot be read": b'{"version": 1, "drained": [',
    "drained": b'{"version": 1, "drained": [1]}',
    "format version 2": b'{"version": 2, "drained": []}',
}


def test_orders_that_cannot_be_read_are_ignored_counted_and_announced(tmp_path):
    with ControllerProcess(tmp_path / "controller") as controller:
        controller.kill()
        orders = controller.snapshot.with_name("orders.json")
        for says, content in UNREADABLE.items():
            orders.write_bytes(content)
            read = Orders()
            assert says in asyncio.run(read.keep_in(orders.parent, lambda *failed: None))[1]
            assert not read.entries()
        controller.start()
        assert controller.ask("/v1/instances")["drained"] == []
        events = controller.ask("/v1/events")["events"]
        (said,) = [row for row in events if row["kind"] == "snapshot_ignored"]
        assert says in said["facts"]["reason"] and said["facts"]["path"] == str(orders)
        assert controller.ask("/v1/cluster")["snapshot"]["ignored"] == 1
        with ClusterInstance(controller.ports["reply"], "a") as a:
            a.join({})
            controller.ask("/v1/instances/a/drain", {"wait_s": 0})
        controller.kill()
        controller.start()
        assert controller.ask("/v1/instances")["drained"] == ["a"]


def test_orders_survive_a_controller_that_is_killed_right_after_its_answer(tmp_path):
    with ControllerProcess(tmp_path / "controller") as controller:
        port = controller.ports["reply"]
        with (
            ClusterInstance(port, "a") as a,
            ClusterInstance(port, "b") as b,
            ClusterInstance(port, "c") as c,
        ):
            for one in (a, b, c):
                one.join({"l1": tags_of([1])})
            controller.ask("/v1/instances/a/drain", {"wait_s": 0})
            controller.ask("/v1/instances/b", method="DELETE")
            controller.kill()
            controller.start()
            told = controller.ask("/v1/instances")
            assert (told["drained"], told["removed"]) == (["a"], ["b"])
            a.join({"l1": tags_of([1])})
            c.join({})
            assert c.where(tags_of([1])) == []
            for drain in (a.operation(), a.operation()):  # of the first controller, and of the second
                assert drain.operation == wire.Drain(True)
            with pytest.raises(Refused) as refused:
                b.register()
            assert refused.value.code == "not_permitted"
            controller.ask("/v1/instances/a/undrain", {"wait_s": 0})
            controller.ask("/v1/instances/b/allow", {})
            controller.kill()
            controller.start()
            told = controller.ask("/v1/instances")
            assert (told["drained"], told["removed"]) == ([], [])


def test_a_folder_of_snapshots_that_others_can_write_stops_the_start(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o770)
    words = (
        "controller",
        "--no-supervise",
        "--port",
        "0",
        "--monitor-ports",
        ANY,
        "--snapshot-dir",
        str(folder),
    )
    ran = own_commands.run("kvstrata", *words)
    assert (
        ran.returncode == 2
        and "directory.snapshot_dir: directory " in ran.stderr
        and "chmod 700" in ran.stderr
    )
