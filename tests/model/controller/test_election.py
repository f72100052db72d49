"""Elections over one etcd, on virtual time: the invariants of controller/election.py under every fault.

Controllers are killed, stopped, cut off and lose their rights; etcd is stopped, killed, and loses its data or gets
older ones back; requests and answers arrive late or never.  The tests after the machine are single stories.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller import election as election_module
from kvstrata.controller.election import Candidate, Election
from kvstrata.controller.etcd import EtcdFailed, put
from kvstrata.controller.orders import KeyOfId, Orders
from kvstrata.errors import NotLeading
from tests.harness.amount import amount
from tests.harness.virtual import VirtualLoop, clock, on_virtual_time
from tests.oracles.etcd import Data, EtcdInMemory

pytestmark = pytest.mark.usefixtures("patience_of_production")
TTL_S = 3
CALL_S = TTL_S / election_module.CALLS_PER_TTL
STEP_S = TTL_S / election_module.STEPS_PER_TTL
LATE_S = TTL_S + 1.0
"""The longest way of a request or an answer."""
LEADER, ORDERS = b"kvstrata/leader", b"kvstrata/orders/"
NAMES = ("a", "b", "c")


class Contender(Election):
    """An election with its orders, which can be stopped as SIGSTOP stops a process."""

    def __init__(self, name: str, orders: dict[str, bytes] | None = None) -> None:
        self.target = target(name)
        super().__init__(EtcdSettings(endpoints=[self.target], ttl_s=TTL_S), Candidate(name, ""), clock())
        self.name = name
        self.orders = Orders(self.write)
        self.orders.load(orders or {})
        self.goes = asyncio.Event()
        self.goes.set()
        self.task = asyncio.create_task(self.when_it_goes(self.run(self.orders, lambda: None)))

    @types.coroutine
    def when_it_goes(self, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Run `work`, but no step of it while the contender is stopped; it learns afterwards what happened then."""
        error: BaseException | None = None
        while True:
            while not self.goes.is_set():
                try:
                    yield from self.goes.wait().__await__()
                except asyncio.CancelledError as cancelled:
                    error = cancelled
            try:
                waited_for = work.send(None) if error is None else work.throw(error)
            except StopIteration:
                return
            error = None
            try:
                yield waited_for
            except BaseException as raised:
                error = raised

    async def end(self, *, in_order: bool) -> None:
        """Leave in order, or as SIGKILL ends a process."""
        self.goes.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if in_order:
            await self.close()
        self._sure_until_s = float("-inf")


def target(name: str) -> str:
    """The endpoint under which a controller knows etcd."""
    return f"127.0.0.1:{1 + NAMES.index(name)}"


SECONDS = st.sampled_from([0.0, 0.01, CALL_S * 0.9, STEP_S, TTL_S / 2, TTL_S, TTL_S + CALL_S])
WHICH = st.sampled_from([0, 0, 1, 2])
"""0: the leader."""


class ElectionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.etcd = EtcdInMemory()
        self.patch.setattr(election_module, "Etcd", self.etcd.connect)
        self.loop = VirtualLoop(self.between)
        self.alive: dict[str, Contender] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        """The orders on the disks of controllers that have ended."""
        self.backup: Data | None = None
        self.losses = self.outbids = 0
        self.forgotten_until_s = 0.0
        """etcd may have lost leases that it had granted until then."""
        self.led: set[tuple[int, int]] = set()
        """(Cluster id, token) of all leaderships."""
        self.seen = (0, 0)
        """Greatest of them that an instance has seen."""
        self.may_regress = False
        """A leader may not know the greatest cluster id or token, until the instance has told it."""
        self.denied_since_s: dict[str, float] = {}
        self.possible: dict[str, set[bytes | None]] = {}
        """Values that an order may have, given the answers to all writes."""
        self.number = 0
        self.failures: list[BaseException | None] = []
        """Of writes."""
        self.writing: dict[asyncio.Task[None], str] = {}
        for name in NAMES:
            self.do(self.start(name))
        self.wait(TTL_S)

    def do(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            self.heal()
        finally:
            for one in self.alive.values():
                self.do(one.end(in_order=False))
            for task in self.writing:
                task.cancel()
            self.do(asyncio.sleep(LATE_S))
            self.loop.close()
            self.patch.undo()

    # --- what always holds ----------------------------------------------------------------------------------

    def between(self) -> None:
        """At every moment, and also for elections that are stopped just then."""
        assert not self.failures, self.failures
        now_s, rows = self.loop.clock.now_s, self.etcd.data.rows
        sure = [one for one in self.alive.values() if one.token]
        if now_s > self.forgotten_until_s:
            assert len(sure) <= 1, f"two lead: {[(one.name, one.token) for one in sure]}"
            for one in sure:
                assert LEADER in rows and rows[LEADER].create_revision == one.token, (
                    "a leader that etcd does not know is sure"
                )
        for one in sure:
            led = (one.cluster_id, one.token)
            assert one.cluster_id
            if led not in self.led:
                assert self.may_regress or not self.led or led > max(self.led), f"{led} after {max(self.led)}"
                self.led.add(led)
                self.seen = max(self.seen, led)
        ids = {cluster_id for cluster_id, _ in self.led}
        assert len(ids) <= 1 + 2 * self.losses + self.outbids, f"cluster ids that nothing asked for: {ids}"
        for one in self.alive.values():
            assert one.token or not one._token or one.leader is None, "is not sure that it leads, and says so"
        for name, since_s in self.denied_since_s.items():
            if now_s > since_s + TTL_S and not self.etcd.is_away and self.etcd.frozen is None:
                me = msgspec.json.encode(Candidate(name, ""))
                assert me not in {row.value for row in rows.values()}, f"{name} is a member without rights"

    def orders_changed(self, one: Contender) -> None:
        """A leader knows every order that was acknowledged."""
        if one.token and self.loop.clock.now_s > self.forgotten_until_s and not self.may_regress:
            orders = one.orders.entries()
            for name, values in self.possible.items():
                assert orders.get(name) in values, f"the leader has {orders.get(name)!r}, none of {values}"

    # --- controllers ----------------------------------------------------------------------------------------

    def one(self, which: int) -> str:
        """The leader, or another one."""
        sure = [name for name, one in self.alive.items() if one.token]
        return sorted(self.alive, key=lambda name: (name not in sure, name))[which]

    async def start(self, name: str) -> None:
        one = self.alive[name] = Contender(name, self.files.get(name))
        one.orders.changed = lambda: self.orders_changed(one)

    @rule(which=WHICH, seconds=SECONDS, in_order=st.booleans())
    def ends_and_starts(self, which: int, seconds: float, in_order: bool) -> None:
        name = self.one(which)
        one = self.alive[name]
        self.do(one.end(in_order=in_order))
        self.files[name] = one.orders.entries()
        del self.alive[name]
        self.time_passes(seconds)
        self.do(self.start(name))

    @rule(which=WHICH, seconds=SECONDS)
    def is_stopped(self, which: int, seconds: float) -> None:
        one = self.one(which)
        self.begins_to_write(0, "x", False)
        goes = self.alive[one].goes
        goes.clear()
        self.loop.call_later(seconds, goes.set)

    @rule(which=WHICH, seconds=SECONDS, answers=st.booleans())
    def is_cut_off(self, which: int, seconds: float, answers: bool) -> None:
        lost, who = self.etcd.answers_lost if answers else self.etcd.requests_lost, target(self.one(which))
        lost.add(who)
        self.loop.call_later(seconds, lost.discard, who)

    @rule(which=WHICH)
    def loses_its_rights(self, which: int) -> None:
        name = self.one(which)
        self.etcd.denied.add(target(name))
        self.time_passes(CALL_S + LATE_S)
        since_s = self.loop.clock.now_s
        self.denied_since_s[name] = since_s
        self.time_passes(TTL_S + CALL_S)
        self.etcd.denied.discard(target(name))
        del self.denied_since_s[name]

    # --- etcd -----------------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.03, 0.1, 0.3]))
    def some_ways_are_long(self, seed: int, share: float) -> None:
        draw = random.Random(seed)
        self.etcd.delay_s = lambda: (
            draw.choice([0.1, CALL_S * 0.8, LATE_S]) if draw.random() < share else 0.001
        )

    @rule(seconds=SECONDS)
    def etcd_is_stopped(self, seconds: float) -> None:
        self.etcd.freeze()
        self.loop.call_later(seconds, self.etcd.thaw)

    @rule(seconds=SECONDS, loss=st.sampled_from(["nothing", "all", "all since the backup"]))
    def etcd_is_killed(self, seconds: float, loss: str) -> None:
        self.time_passes(STEP_S)
        self.etcd.kill()
        # Nobody reads after the loss what etcd answered before it.
        self.time_passes(seconds if loss == "nothing" else max(seconds, CALL_S * 1.1))
        data = {"all": Data(), "all since the backup": self.backup}.get(loss)
        if data is not None:
            self.losses += 1
            self.forgotten_until_s = self.loop.clock.now_s + TTL_S + LATE_S
            self.may_regress |= data is self.backup or self.seen[0] > self.loop.clock.unix_ms()
            known = [one.orders.entries() for one in self.alive.values()] + list(self.files.values())
            for name, values in self.possible.items():
                row = data.rows.get(ORDERS + name.encode())
                if name in self.writing.values() or data is self.backup:
                    known.append(dict.fromkeys([name], row.value if row else None))
                else:
                    values.clear()
                values.update(one.get(name) for one in known)
        self.loop.call_soon(self.etcd.start, data)

    @rule()
    def a_backup_is_made(self) -> None:
        self.backup = copy.deepcopy(self.etcd.data)

    # --- orders ---------------------------------------------------------------------------------------------

    def begins_to_write(self, which: int, instance: str, on: bool) -> None:
        """Begin to write an order, unless it is being written: such writes may overtake each other."""
        if f"keys/{instance}" in self.writing.values():
            return
        one = self.alive[self.one(which)]
        task = self.loop.create_task(one.when_it_goes(self.write(one, instance, on)))
        self.writing[task] = f"keys/{instance}"
        task.add_done_callback(self.written)

    def written(self, task: asyncio.Task[None]) -> None:
        del self.writing[task]
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())

    async def write(self, one: Contender, instance: str, on: bool) -> None:
        name = f"keys/{instance}"
        self.number += 1
        losses = self.losses
        values = self.possible.setdefault(name, {None})
        if not one.token:
            row = self.etcd.data.rows.get(LEADER)
            if row is None or row.value != msgspec.json.encode(one._me):
                # A greater token of lost data may be that of the next leader.
                passed = self.etcd.data.revision
                stale = max((token for _, token in self.led if token <= passed), default=1)
                with pytest.raises((NotLeading, EtcdFailed)):
                    await one._write_orders(
                        one._connected(), stale, {name: b"of a controller that does not lead"}
                    )
            return
        if not on and instance not in one.orders.keys:
            return
        value = msgspec.json.encode(KeyOfId("key", self.number)) if on else None
        values.add(value)
        try:
            await one.orders._change({name: value})
        except NotLeading:
            return
        if losses == self.losses:
            values &= {value}

    # --- time -----------------------------------------------------------------------------------------------

    @rule(seconds=SECONDS, which=WHICH, name=st.sampled_from("xy"), on=st.sampled_from([True, True, False]))
    def time_passes(self, seconds: float, which: int = 0, name: str = "x", on: bool = True) -> None:
        """A controller begins to write orders meanwhile."""
        for one in (name, "z", name):
            self.begins_to_write(which, one, on)
            self.wait(seconds / 3)

    def wait(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))
        for one in self.alive.values():  # the instance's heartbeat
            if one.token and self.seen > (one.cluster_id, one.token):
                one.outbid(self.seen[0])

    @rule()
    def an_instance_has_seen_more(self) -> None:
        self.seen = (self.seen[0] + 10**6, 1)
        self.outbids += 1

    @rule()
    def heal(self) -> None:
        """After all faults, one leads; all know it, and the orders are those that were acknowledged."""
        etcd = self.etcd
        etcd.requests_lost, etcd.answers_lost, etcd.denied, self.denied_since_s = set(), set(), set(), {}
        etcd.delay_s = lambda: 0.001
        self.wait(LATE_S)
        for _ in range(2 * election_module.STEPS_PER_TTL):
            self.wait(STEP_S)
        [leader] = [one for one in self.alive.values() if one.token]
        assert {one.leader.member.name for one in self.alive.values() if one.leader} == {leader.name}
        assert (leader.cluster_id, leader.token) >= self.seen, "an instance does not obey it"
        assert all([peer.name for peer in one.members] == list(NAMES) for one in self.alive.values())
        orders = leader.orders.entries()
        assert all(one.orders.entries() == orders for one in self.alive.values())
        assert {row: kept.value for row, kept in etcd.data.rows.items() if row.startswith(ORDERS)} == {
            ORDERS + name.encode(): value for name, value in orders.items()
        }
        for name, values in self.possible.items():
            assert orders.get(name) in values, f"{name}: {orders.get(name)!r} is none of {values}"
            values &= {orders.get(name)}
        self.may_regress, self.backup = False, None


ElectionMachine.TestCase.settings = settings(
    max_examples=amount(30, 1_000), stateful_step_count=amount(40, 60), phases=(Phase.generate,)
)
TestElections = ElectionMachine.TestCase


@contextlib.asynccontextmanager
async def taking_part(*names: str) -> AsyncIterator[tuple[EtcdInMemory, list[Contender]]]:
    """An etcd, and elections over it."""
    with pytest.MonkeyPatch.context() as patch:
        etcd = EtcdInMemory()
        patch.setattr(election_module, "Etcd", etcd.connect)
        contenders = [Contender(name) for name in names]
        yield etcd, contenders
        for one in contenders:
            await one.end(in_order=True)


async def one_leads(contenders: list[Contender], within_s: float = 2.5 * TTL_S) -> Contender:
    """Let time pass until one leads, and the others know it."""
    for _ in range(round(within_s / STEP_S)):
        await asyncio.sleep(STEP_S)
    [leader] = [one for one in contenders if one.token]
    assert {one.leader.member.name for one in contenders if one.leader} == {leader.name}
    return leader


@on_virtual_time
async def test_a_leader_that_leaves_is_replaced_at_once() -> None:
    async with taking_part("a", "b", "c") as (_, contenders):
        leader = await one_leads(contenders)
        await leader.end(in_order=True)
        contenders.remove(leader)
        assert await one_leads(contenders, 2 * STEP_S)


@on_virtual_time
async def test_while_etcd_is_away_nobody_leads_or_is_said_to_and_orders_are_refused() -> None:
    async with taking_part("a", "b") as (etcd, contenders):
        token = (await one_leads(contenders)).token
        etcd.kill()
        await asyncio.sleep(TTL_S + STEP_S)
        for one in contenders:
            assert (one.token, one.leader) == (0, None) and "failed to connect" in one.problem
            with pytest.raises(NotLeading):
                await one.orders.drain("x", True)
        assert contenders[0].no_leader_s > 0 and contenders[0].failures > 1
        etcd.start()
        leader = await one_leads(contenders)
        assert leader.token >= token and not leader.orders.drained and leader.no_leader_s == 0


@on_virtual_time
@pytest.mark.parametrize("leased", [False, True])
async def test_the_key_of_a_leader_that_no_longer_lives_is_taken_over(leased: bool) -> None:
    async with taking_part("a") as (etcd, contenders):
        lease = etcd.grant(600)[0] if leased else 0
        etcd.transact("", [], [put(LEADER, b'{"name": "nobody", "http_url": ""}', lease)], [])
        stale = etcd.data.revision
        leader = await one_leads(contenders, 3 * STEP_S)
        assert leader.token > stale and not leader.problem


@on_virtual_time
async def test_a_controller_that_cannot_take_part_says_why_and_for_how_long(caplog: Any) -> None:
    logging.getLogger("kvstrata").propagate = True
    async with taking_part("a") as (etcd, [one]):
        etcd.denied.add(one.target)
        await asyncio.sleep(2 * TTL_S)
        assert one.leader is None and not one.token and one.failures > 1
        assert one.no_leader_s == 2 * TTL_S and one.problem == "permission denied"
        assert f'no_leader for_s={TTL_S} reason="permission denied"' in caplog.text


@on_virtual_time
@pytest.mark.parametrize("restored", [False, True])
async def test_after_etcd_lost_its_data_or_was_restored_the_cluster_id_is_greater(restored: bool) -> None:
    async with taking_part("a", "b") as (etcd, contenders):
        leader = await one_leads(contenders)
        await leader.orders.drain("x", True)
        backup = copy.deepcopy(etcd.data) if restored else Data()
        await leader.orders.drain("y", True)
        etcd.data.revision += 20
        before = (await one_leads(contenders)).cluster_id
        etcd.kill()
        etcd.start(backup)
        await one_leads(contenders)
        assert {one.cluster_id > before for one in contenders} == {True}
        orders = {"drained/x": b"1"} if restored else {"drained/x": b"1", "drained/y": b"1"}
        assert [one.orders.entries() for one in contenders] == [orders, orders]
        assert {row for row in etcd.data.rows if row.startswith(ORDERS)} == {
            ORDERS + name.encode() for name in orders
        }


@on_virtual_time
@pytest.mark.parametrize("ahead", range(1, 9))
async def test_after_a_loss_no_revision_from_before_hides_an_order(ahead: int) -> None:
    async with taking_part("a", "b") as (etcd, contenders):
        etcd.data.revision = 20
        leader = await one_leads(contenders)
        await leader.orders.drain("x", True)
        await asyncio.sleep(2 * STEP_S)
        known = etcd.data.revision
        await leader.orders.drain("y", True)
        etcd.kill()
        etcd.start(Data(known - ahead))
        [follower] = set(contenders) - {leader}
        etcd.requests_lost.add(follower.target)
        await asyncio.sleep(2 * STEP_S)
        etcd.requests_lost.clear()
        assert await one_leads(contenders) is leader
        orders = {"drained/x": b"1", "drained/y": b"1"}
        assert [one.orders.entries() for one in contenders] == [orders, orders]


@on_virtual_time
async def test_a_backup_of_another_history_with_the_same_revision_is_read_by_all() -> None:
    async with taking_part("a", "b") as (etcd, contenders):
        leader = await one_leads(contenders)
        await leader.orders.drain("x", True)
        before = copy.deepcopy(etcd.data)
        await leader.orders.drain("y", True)
        await asyncio.sleep(2 * STEP_S)
        after = copy.deepcopy(etcd.data)
        etcd.kill()
        etcd.start(before)
        await leader.orders.drain("z", True)  # before a step shows that the revision went back
        assert etcd.data.revision == after.revision
        await asyncio.sleep(2 * STEP_S)
        etcd.kill()
        etcd.start(after)
        await one_leads(contenders)
        assert [one.orders.entries() for one in contenders] == [{"drained/x": b"1", "drained/y": b"1"}] * 2


@on_virtual_time
async def test_orders_are_read_by_all_controllers_and_more_of_them_than_one_transaction_holds() -> None:
    async with taking_part("a", "b") as (etcd, contenders):
        leader = await one_leads(contenders)
        [follower] = set(contenders) - {leader}
        keys = {f"{number:04}": KeyOfId("key", number) for number in range(250)}
        await leader.orders.drain("a", True)
        await leader.orders.remove("b", bar=True)
        await leader.write({f"keys/{name}": msgspec.json.encode(key) for name, key in keys.items()})
        await asyncio.sleep(2 * STEP_S)
        assert follower.orders.entries() == leader.orders.entries() and follower.orders.keys == keys
        with pytest.raises(NotLeading):
            await follower.orders.drain("c", True)
        assert "c" not in follower.orders.drained
        await leader.write({"keys/0001": None})
        await leader.orders.drain("a", False)
        etcd.transact("", [], [put(ORDERS + b"keys/bad", b"no key")], [])
        await asyncio.sleep(2 * STEP_S)
        assert (len(follower.orders.keys), *follower.orders.drained, *follower.orders.removed) == (249, "b")
