"""Instances whose processes come, go, move and die, and controller/members.py: who is a member, and what is forgotten.

The model knows which process of each id registered last, on which host, and when each was heard.  Placements belong to
a group; a member's group is new each time that it becomes one, and is forgotten exactly once.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.controller.member import Member, MemberState
from kvstrata.errors import KvstrataError
from kvstrata.rpc import cluster_wire as wire
from tests.harness.amount import amount
from tests.harness.cluster_instance import LOAD
from tests.harness.known_members import KnownMembers
from tests.unit.controller.member_messages import register

NAMES = ("a", "b")
HOSTS = ("one", "two")


class Process:
    """One run of an instance's process."""

    def __init__(self, name: str, incarnation: int, host: str) -> None:
        self.name, self.incarnation, self.host = name, incarnation, host
        self.answers = True


class ClusterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.known_members = KnownMembers()
        self.members = self.known_members.members
        self.processes: list[Process] = []
        self.placed: dict[int, Member] = {}
        """Members whose placements the directory has, by group."""
        self.heard: dict[int, float] = {}
        """When the process with an incarnation was last heard."""

    def settle(self) -> None:
        for member in self.known_members.outbox.forgotten:
            assert self.placed.pop(member.group) is member, "placements are forgotten once"
        self.known_members.outbox.clear()

    @initialize()
    def all_live(self) -> None:
        for name in NAMES:
            self.start(name, HOSTS[0])

    @rule(name=st.sampled_from(NAMES), host=st.sampled_from(HOSTS))
    def start(self, name: str, host: str) -> None:
        self.processes.append(Process(name, len(self.processes) + 1, host))
        self.register(self.processes[-1])

    @rule(data=st.data())
    def registers_again(self, data: st.DataObject) -> None:
        self.register(self.pick(data))

    def register(self, one: Process) -> None:
        before = self.members.get(one.name)
        lives = before is not None and before.state is MemberState.LIVE
        try:
            told = register(one.incarnation, one.name, host=one.host)
            member = self.known_members.register(told, self.now_s)
        except KvstrataError as denied:
            assert self.members.get(one.name) is before and before is not None
            assert denied.code in ("superseded", "instance_id_taken")
            if denied.code == "instance_id_taken":
                assert lives and before.told.host != one.host
            return
        assert (member.incarnation, member.state) == (one.incarnation, MemberState.LIVE)
        if lives and before is not None and before.incarnation == one.incarnation:
            assert member is before, "a registration that is repeated changes nothing"
        else:
            assert member.group not in self.placed or self.placed[member.group] is before
            self.settle()
            self.placed[member.group] = member
            self.heard[one.incarnation] = self.now_s
        self.settle()

    @rule(data=st.data(), draining=st.booleans())
    def answers(self, data: st.DataObject, draining: bool) -> None:
        one = self.pick(data)
        member = self.members.get(one.name)
        if member is None or member.incarnation != one.incarnation or member.state is not MemberState.LIVE:
            return
        self.members.heard(member, wire.Condition("ready", LOAD, [], draining=draining), self.now_s)
        self.heard[one.incarnation] = self.now_s

    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        one = self.pick(data)
        try:
            self.known_members.goodbye(wire.Goodbye(1, one.name, one.incarnation))
        except KvstrataError:
            return
        self.settle()

    @rule(seconds=st.sampled_from([0.5, 3.0, 4.9, 60.0]))
    def time_passes(self, seconds: float) -> None:
        stood_still = seconds > 5.0
        self.now_s += seconds
        if stood_still:
            self.heard = {which: at_s + seconds for which, at_s in self.heard.items()}
        self.members.tick(self.now_s)
        self.settle()

    @invariant()
    def exactly_the_members_that_live_have_placements(self) -> None:
        living = {one.group: one for one in self.members if one.state is MemberState.LIVE}
        assert living == self.placed
        assert all(self.members.of_group(group) is one for group, one in living.items())

    @invariant()
    def who_lives_was_heard_and_who_was_heard_is_not_dead(self) -> None:
        for member in self.members:
            silent_s = self.now_s - self.heard[member.incarnation]
            if member.state is MemberState.LIVE:
                assert silent_s < 30.0 + 5.0
            elif member.state is MemberState.DEAD:
                assert silent_s >= 25.0

    def pick(self, data: st.DataObject) -> Process:
        return data.draw(st.sampled_from(self.processes[-6:]))


TestClusterMachine = ClusterMachine.TestCase
TestClusterMachine.settings = settings(max_examples=amount(70, 150), stateful_step_count=60)
