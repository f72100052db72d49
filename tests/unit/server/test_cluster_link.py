"""An instance against controllers whose answers the test chooses, on virtual time: registrations and operations."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstrata.errors import ClusterFailure, NotPermitted, Refused, Unavailable
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire
from kvstrata.rpc.cluster_wire import Clear, Do, Freeze, Goodbye, Operation, Register
from kvstrata.server.cluster import membership
from kvstrata.server.cluster.commands import MAX_DOING, Actions
from kvstrata.server.cluster.membership import Membership
from tests.harness.instance_in_process import InstanceInProcess
from tests.harness.virtual import VirtualLoop
from tests.unit.controller.member_messages import register

pytestmark = pytest.mark.usefixtures("patience_of_production")

EPOCH = 5
BEAT_S = 10.0


class Controller:
    """Answers registrations, except while it is `silent`."""

    def __init__(self) -> None:
        self.silent = False
        self.failures: list[str] = []
        self.asked: list[Any] = []
        self.connections = 0
        self.changed: Callable[[bool], None] = lambda up: None

    def links(self) -> Any:
        numbers = itertools.count(1)

        async def ask(request: Any, kind: type[Any], timeout_s: float) -> Any:
            request = cluster_wire.TO_CONTROLLER.decode(
                cluster_wire.encode(msgspec.structs.replace(request, seq=next(numbers)))
            )
            self.asked.append(request)
            if self.silent:
                await asyncio.sleep(timeout_s)
                raise Unavailable("no answer")
            if self.failures:
                raise ClusterFailure(self.failures.pop(0), "no", field="", retryable=True, retry_after_ms=0)
            if isinstance(request, Register):
                return cluster_wire.Registered(request.seq, EPOCH, "double", round(1000 * BEAT_S))
            return cluster_wire.Done(request.seq, EPOCH)

        def link(url: str, *, changed: Callable[[bool], None], **_: Any) -> Any:
            self.connections += 1
            self.changed = changed
            return SimpleNamespace(ask=ask, close=lambda: None)

        return SimpleNamespace(ask=link, close=lambda: None)

    def asked_for(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.asked if isinstance(one, kind)]


class Member:
    """An instance that registers with one controller."""

    def __init__(self, controller: Controller, patch: pytest.MonkeyPatch) -> None:
        self.loop = VirtualLoop()
        self.instance = InstanceInProcess(16 << 20, loop=self.loop)
        self.supervisor = Supervisor(self.loop)
        patch.setattr(membership, "Links", lambda loop: controller.links())
        self.tiers = ["l1"]
        parts: Any = SimpleNamespace(loop=self.loop, supervisor=self.supervisor)
        keys: Any = SimpleNamespace(own=None, refused_why="")
        held: Any = SimpleNamespace(
            tiers=lambda: list(self.tiers), media=dict, start=lambda: None, stop=lambda: asyncio.sleep(0)
        )
        others: Any = SimpleNamespace(drain=lambda on: None, thaw=lambda: None)

        async def made() -> Membership:
            return Membership(register(), keys, ["tcp://c:1"], parts, held, others, others)

        self.membership = self.loop.run_until_complete(made())
        self.start, self.stop = self.membership.start, self.membership.stop
        [self.link] = self.membership._links

    def passes(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def close(self) -> None:
        self.loop.run_until_complete(self.stop())
        self.loop.run_until_complete(self.supervisor.stop())
        self.instance.close()


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def member(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    made = Member(controller, monkeypatch)
    made.loop.run_until_complete(asyncio.sleep(0))
    made.loop.call_soon(made.start)
    made.passes(0.1)
    yield made
    made.close()


def test_an_instance_registers_again_every_beat_with_the_tiers_that_it_has_then(controller, member):
    member.tiers.append("disk-0")
    member.passes(3 * BEAT_S)
    told = controller.asked_for(Register)
    assert len(told) == 4 and member.link.member
    assert told[0].protocol == cluster_wire.CLUSTER_PROTOCOL_VERSION
    assert (told[0].tiers, told[-1].tiers) == (["l1"], ["l1", "disk-0"])


def test_a_new_connection_is_registered_on_at_once(controller, member):
    controller.changed(True)
    member.passes(0.1)
    assert len(controller.asked_for(Register)) == 2


def test_after_three_silent_beats_the_link_is_made_anew_and_the_log_says_so_once(
    controller, member, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvstrata")

    def said(event: str) -> int:
        return sum(text.split()[0] == event for text in caplog.messages)

    controller.silent = True
    member.passes(2 * BEAT_S)
    assert controller.connections == 1
    member.passes(6 * BEAT_S)
    assert controller.connections > 1 and not member.link.member
    controller.silent = False
    member.passes(3 * BEAT_S)
    assert member.link.member
    assert (said("controller_lost"), said("controller_back")) == (1, 1)


def test_a_refused_registration_is_tried_again(controller, monkeypatch):
    controller.failures = ["instance_id_taken", "unreachable_instance"]
    made = Member(controller, monkeypatch)
    made.loop.call_soon(made.start)
    made.passes(5.0)
    assert made.link.member and len(controller.asked_for(Register)) == 3
    made.close()


def test_a_member_that_stops_says_goodbye_first(controller, member):
    member.loop.run_until_complete(member.stop())
    [told] = controller.asked_for(Goodbye)
    assert told.instance == controller.asked_for(Register)[0].instance


# --- operations ---------------------------------------------------------------------------------------------------


class Lane:
    """Work that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.going_on = asyncio.Event()

    async def clear(self, tier: str, tenant: str | None) -> Any:
        await self.going_on.wait()
        return SimpleNamespace(n_chunks=1, held=0, leased=0, kept=0, tiers={})


@pytest.fixture
def actions(member: Member) -> Actions:
    import copy

    parts = copy.copy(member.instance.parts)
    member.loop.run_until_complete(asyncio.sleep(0))
    lane = Lane()
    vars(parts).update(clearing=SimpleNamespace(clear=lane.clear))
    made = Actions(parts, cast(Any, SimpleNamespace(leases=SimpleNamespace(draining=False))))
    made.lane = lane  # type: ignore[attr-defined]
    return made


def do(operation: Operation, deadline_ms: int = 1_000, leader: tuple[int, int] = (0, 0)) -> Do:
    return Do(1, operation, deadline_ms, leader[1], leader[0])


def test_only_the_latest_leader_is_obeyed(member, actions):
    def obeys(cluster_id: int, token: int) -> bool:
        try:
            member.loop.run_until_complete(actions.carry_out(do(Freeze(), leader=(cluster_id, token))))
        except NotPermitted as denied:
            assert f"token: {token} of cluster {cluster_id}" in denied.message and denied.field == "token"
            return False
        return True

    assert obeys(0, 7) and obeys(0, 9) and not obeys(0, 7) and obeys(0, 9)
    assert actions.leader == (0, 9)
    assert obeys(5, 2), "etcd has lost its data: tokens start again, under a greater cluster id"
    assert not obeys(0, 9) and not obeys(0, 0)


def test_an_operation_ends_at_its_deadline_for_its_asker(member, actions):
    began_s = member.loop.time()
    with pytest.raises(Unavailable, match="clear has not ended within 1000 ms"):
        member.loop.run_until_complete(actions.carry_out(do(Clear("l1"))))
    assert member.loop.time() - began_s == pytest.approx(1.0, abs=0.01)


def test_operations_under_way_are_bounded(member, actions):
    async def many() -> None:
        running = [asyncio.create_task(actions.carry_out(do(Clear("l1"), 60_000))) for _ in range(MAX_DOING)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="64 operations are under way"):
            await actions.carry_out(do(Clear("l1")))
        actions.lane.going_on.set()
        assert {done.body["count"] for done in await asyncio.gather(*running)} == {1}
        assert (await actions.carry_out(do(Clear("l1")))).body["count"] == 1

    member.loop.run_until_complete(many())


def test_a_freeze_is_bounded_in_time_and_ends_when_it_is_over(member, actions):
    frozen_by = member.instance.parts.frozen_by
    with pytest.raises(msgspec.ValidationError, match="freeze_ms"):
        cluster_wire.TO_INSTANCE.decode(cluster_wire.encode(do(Freeze(60_001))))
    member.loop.run_until_complete(actions.carry_out(do(Freeze(60_000))))
    assert frozen_by
    member.passes(59.9)
    assert frozen_by
    member.passes(0.2)
    assert not frozen_by
