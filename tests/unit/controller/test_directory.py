"""The directory of a controller or a gateway: what its loop is spared, and what it does when the registry refuses."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstrata.cluster import follow
from kvstrata.cluster.directory import Directory
from kvstrata.cluster.follow import Follower, Listener
from kvstrata.cluster.lookups import Found, Lookups, Place
from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller import etcd
from kvstrata.controller.snapshot import Snapshots
from kvstrata.native.core import Registry, RegistryError
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_wire import Change, Run
from tests.harness.cluster_instance import tags_of
from tests.harness.known_members import KEY
from tests.harness.waiting import until
from tests.unit.controller.member_messages import register


class Refusing:
    """A registry that publishes nothing once `refuses` is set."""

    def __init__(self) -> None:
        self.real = Registry(max_bytes=64 << 20)
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def publish(self, slot: int, **more: Any) -> None:
        if self.refuses:
            raise RegistryError("no room", reason="no_room")
        self.real.publish(slot, **more)


@pytest.fixture
async def scene() -> AsyncIterator[tuple[Directory, Refusing, list[tuple[int, str]]]]:
    registry, failures = Refusing(), list[tuple[int, str]]()
    loop = asyncio.get_running_loop()
    lookups = Lookups(loop, cast(Registry, registry))
    made = Directory(
        loop, cast(Registry, registry), lookups, failed=lambda group, why: failures.append((group, why))
    )
    yield made, registry, failures
    made.close()
    lookups.close()


async def test_a_clear_that_cannot_be_published_is_reported(scene) -> None:
    directory, registry, failures = scene
    directory.apply(7, ["l1"], [Run(Change.ADMIT, "l1", tags_of(range(5)))])
    registry.refuses = True
    directory.apply(7, ["l1"], [Run(Change.CLEAR, "l1", b"")])
    await directory.idle()
    assert failures == [(7, "no_room")]


async def test_pages_of_lists_under_way_are_bounded(scene) -> None:
    directory, _, _ = scene
    under_way, most = 0, 0

    async def ask(request: Any, answer: Any, timeout_s: float) -> Any:
        nonlocal under_way, most
        if isinstance(request, wire.Changes):
            if request.wait_ms:
                await asyncio.Event().wait()
            return wire.Changed(1, 1, 0, [])
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return wire.Listed(1, 1, (request.cursor + 1) % 3, tags_of([request.cursor]))

    link: Any = SimpleNamespace(ask=ask, endpoint="tcp://x:1")
    gate = asyncio.Semaphore(4)
    followers = [
        Follower(link, directory, group, Listener(), gate, incarnation=1, tiers=["l1"], beat_s=10.0)
        for group in range(20)
    ]
    tasks = [asyncio.create_task(one.run()) for one in followers]
    await until(lambda: all(one.confirmed for one in followers))
    assert most == 4 < follow.LISTS
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_certificates_and_the_password_of_etcd_are_not_read_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, str] = {}

    def noted(name: str, answer: Any) -> Any:
        def read(settings: EtcdSettings) -> Any:
            threads[name] = threading.current_thread().name
            return answer

        return read

    monkeypatch.setattr(etcd, "_read_certificates", noted("certificates", {}))
    monkeypatch.setattr(etcd, "read_password", noted("password", "x"))
    settings = EtcdSettings(endpoints=["https://127.0.0.1:9"], user="u", password_file="p")
    made = etcd.Etcd(etcd.Endpoint("127.0.0.1", 9, True), settings, 0.5)
    with pytest.raises(etcd.EtcdFailed):
        await made.grant(1)
    await made.close()
    assert set(threads) == {"certificates", "password"}
    assert threading.current_thread().name not in threads.values()


async def test_what_an_instance_computes_is_named_only_to_those_who_ask_for_that(scene) -> None:
    directory, _, _ = scene
    lookups, promised, tiers = directory._lookups, tags_of(range(3)), ["l1", "promised"]
    directory.apply(
        7, tiers, [Run(Change.ADMIT, "promised", promised), Run(Change.ADMIT, "l1", tags_of([9]))]
    )
    directory.apply(8, ["l1"], [Run(Change.ADMIT, "promised", promised)])
    for group in (7, 8):
        lookups.set_readable(group, True)
    asked = tags_of([5, 2, 1])
    assert await lookups.nearest(asked, None, 8, promised=True) == [Found(7, 2)]
    assert not await lookups.nearest(asked, None, 8) and not await lookups.nearest(asked, 7, 8, promised=True)
    assert not await lookups.longest(promised, 1, None, 8) and not await lookups.held(promised, 1)
    assert not await lookups.longest(promised, 1, None, 8, on_disks=True)
    assert await lookups.holders(promised) == [[], [], []]
    assert {place.tier for place in lookups.places().values()} == {"l1"}
    lookups.set_readable(7, False)
    assert not await lookups.nearest(asked, None, 8, promised=True)
    lookups.set_readable(7, True)
    directory.apply(7, tiers, [Run(Change.EVICT, "promised", tags_of([2]))])
    assert await lookups.nearest(asked, None, 8, promised=True) == [Found(7, 1)]
    directory.forget(7)
    lookups.set_readable(7, True)
    assert not await lookups.nearest(asked, None, 8, promised=True)


async def test_a_member_that_registers_again_at_once_is_still_followed_on_from_the_snapshot(cluster) -> None:
    member = cluster.members.restore(register(), KEY, now_s=0.0)
    cluster.resume(member.id, 41)
    for _ in range(2):
        cluster._follow(member, cast(Any, SimpleNamespace(close=lambda: None)))
    assert member.follower.cursor == 41


@pytest.mark.parametrize("wrong", [None, RegistryError("damaged", reason="damaged")])
async def test_a_snapshot_is_found_whole_or_not_at_all_and_what_comes_meanwhile_is_applied_after_it(
    scene, wrong: Exception | None
) -> None:
    directory, registry, _ = scene
    lookups, loading = directory._lookups, Future[int]()

    def load(slot_of: array[int]) -> Future[int]:
        for number in (9, 10):  # of a tier, and of one that no member has any more
            registry.admit(slot_of[number], tags_of(range(3)))
        return loading

    left_out = directory.open_left_out()
    slot = directory.restore_slots(7, ["l1"])["l1"]
    restored = directory.restore(load, {9: slot}, left_out)
    directory.apply(7, ["l1"], [Run(Change.EVICT, "l1", tags_of([0]))])
    directory.apply(8, ["l1"], [Run(Change.ADMIT, "l1", tags_of([1]))])
    before = await lookups.holders(tags_of(range(3)))
    loading.set_result(3) if wrong is None else loading.set_exception(wrong)
    assert await restored == ((3, "") if wrong is None else (0, str(wrong)))
    await directory.idle()
    assert before == [[], [], []]
    found = [{place.group for place in places} for places in await lookups.holders(tags_of(range(3)))]
    assert found == ([set(), {7, 8}, {7}] if wrong is None else [set(), {8}, set()])
    sweeping = asyncio.create_task(directory.keep_swept())
    await until(lambda: not registry.usage().retired)
    sweeping.cancel()
    assert registry.usage().placements == sum(map(len, found))


async def test_a_snapshot_whose_members_need_every_slot_is_restored_as_far_as_there_are_slots(
    cluster, tmp_path: Path
) -> None:
    directory, loop = cluster.directory, asyncio.get_running_loop()
    for name in "abc":
        member = cluster.members.restore(register(name=name, tiers=["l1"]), KEY, now_s=0.0)
        directory.apply(member.group, ["l1"], [Run(Change.ADMIT, "l1", tags_of([ord(name)]))])
    written = Snapshots(loop, cluster, tmp_path, 60)
    await written.open()
    await written.write()
    await written.close()
    for member in cluster.members:
        cluster.members.remove(member)
    directory.registry = directory._lookups._registry = Registry(max_bytes=64 << 20, max_slots=3)
    read = Snapshots(loop, cluster, tmp_path, 60)
    await read.open()
    assert await read._restored == (3, "")
    assert await cluster.lookups.holders(tags_of(map(ord, "ab"))) == [
        [Place(cluster.members.get(name).group, "l1")] for name in "ab"
    ]
    assert len(cluster.members) == 3 and not cluster.lookups.tiers(cluster.members.get("c").group)
    await read.close()
