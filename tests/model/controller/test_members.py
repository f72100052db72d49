"""Instances, a lossy channel and controller/members.py: the placements of a confirmed member are exact.

The model knows which tags each instance really held at each event number.  The channel drops, repeats and reorders
batches; syncs begin, lose parts and end; processes die and come back; time passes.  Whenever the controller calls a
member confirmed, it knows exactly the tags that the instance held at the last applied event.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.controller.member import Member, MemberState, Sync
from kvstrata.errors import KvstrataError
from kvstrata.native.core import crc32c
from kvstrata.rpc import cluster_wire as wire
from tests.harness.amount import amount
from tests.harness.cluster_instance import LOAD
from tests.harness.known_members import KnownMembers

NAMES = ("a", "b")
TAGS = st.integers(0, 7)


def packed(tags: list[int]) -> bytes:
    return b"".join(tag.to_bytes(8, "little") for tag in tags)


def unpacked(tags: bytes) -> list[int]:
    return [int.from_bytes(tags[at : at + 8], "little") for at in range(0, len(tags), 8)]


class Instance:
    """The truth about one instance, which the controller only learns from messages."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.held: frozenset[int] = frozenset()
        self.after: list[frozenset[int]] = [frozenset()]
        """The tags that it held after each event; index 0: before the first event."""
        self.sync_number = 0
        self.events_seq = 0
        self.parts: list[list[int]] = []
        """The parts of the present sync; any of them may arrive never, once or repeatedly."""


class ClusterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.known_members = KnownMembers(first_command=1)
        self.members = self.known_members.members
        self.next_incarnation = 1
        self.instances: dict[str, Instance] = {}
        self.wire: list[wire.Events] = []
        self.known: dict[int, set[int]] = {}
        """The tags that the directory would serve, by group."""
        self.filling: dict[int, set[int]] = {}
        """The tags of syncs that have not ended, by group."""
        self.publishing: list[tuple[Member, Sync]] = []
        """The syncs that have ended but whose tags are not published yet."""

    def settle(self) -> None:
        for member in self.known_members.outbox.forgotten:
            self.known.pop(member.group, None)
            self.filling.pop(member.group, None)
        self.known_members.outbox.clear()

    # --- instances ------------------------------------------------------------------------------------------

    @initialize()
    def all_live(self) -> None:
        for name in NAMES:
            self.start(name)
            self.register(self.instances[name])

    def start(self, name: str) -> None:
        self.instances[name] = Instance(name, self.next_incarnation)
        self.next_incarnation += 1

    def register(self, one: Instance) -> None:
        told = wire.Register(
            1, wire.CLUSTER_PROTOCOL_VERSION, one.name, one.incarnation, "", ["l1"], 1, 1, "", "", "", "here", 1,
            len(one.after) - 1,
        )  # fmt: skip
        member, _ = self.known_members.register(told, self.now_s)
        self.filling.pop(member.group, None)
        self.settle()

    @rule(
        data=st.data(),
        admit=st.booleans(),
        tags=st.lists(TAGS, min_size=1, max_size=3),
        lost=st.sampled_from([False] * 7 + [True]),
    )
    def tags_change(self, data: st.DataObject, admit: bool, tags: list[int], lost: bool) -> None:
        one = self.pick(data)
        one.held = one.held | set(tags) if admit else one.held - set(tags)
        one.after.append(one.held)
        change = wire.Change.ADMIT if admit else wire.Change.EVICT
        if not lost:
            runs = [wire.Run(change, "l1", packed(tags))]
            self.wire.append(wire.Events(one.name, one.incarnation, len(one.after) - 1, runs))

    @precondition(lambda self: self.wire)
    @rule()
    def a_batch_arrives(self) -> None:
        self.arrive(0, again=False)

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), again=st.booleans())
    def a_batch_arrives_out_of_order(self, data: st.DataObject, again: bool) -> None:
        self.arrive(data.draw(st.integers(0, len(self.wire) - 1)), again=again)

    def arrive(self, at: int, *, again: bool) -> None:
        told = self.wire[at] if again else self.wire.pop(at)
        member = self.known_members.events(told)
        if member is not None:
            known = self.known.setdefault(member.group, set())
            for run in told.runs:
                (known.update if run.change is wire.Change.ADMIT else known.difference_update)(
                    unpacked(run.tags)
                )

    # --- syncs ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), cut=st.integers(1, 3))
    def sync_begins(self, data: st.DataObject, cut: int) -> None:
        self.begin(self.pick(data), cut)

    @precondition(lambda self: any(one.parts for one in self.instances.values()))
    @rule(data=st.data())
    def a_part_arrives(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.instances.values() if one.parts]))
        self.part(one, data.draw(st.integers(0, len(one.parts) - 1)))

    @rule(data=st.data())
    def sync_ends(self, data: st.DataObject) -> None:
        self.end(self.pick(data))

    @rule(data=st.data(), end=st.booleans())
    def whole_sync(self, data: st.DataObject, end: bool) -> None:
        """Run a sync without faults, because random parts alone would rarely confirm a member."""
        one = self.pick(data)
        self.begin(one, 2)
        for index in range(len(one.parts)):
            self.part(one, index)
        if end:
            self.end(one)
            while self.publishing:
                self.publishing_ends()

    def begin(self, one: Instance, cut: int) -> None:
        one.sync_number += 1
        one.events_seq = len(one.after) - 1
        held = sorted(one.held)
        one.parts = [held[at : at + cut] for at in range(0, len(held), cut)]
        try:
            member, sync = self.known_members.sync_begin(
                wire.SyncBegin(1, one.name, one.incarnation, one.sync_number, one.events_seq), self.now_s
            )
        except KvstrataError:
            return
        if sync is not None:
            self.filling[member.group] = set()

    def part(self, one: Instance, index: int) -> None:
        tags = packed(one.parts[index])
        told = wire.SyncPart(1, one.name, one.incarnation, one.sync_number, index, "l1", tags, crc32c(tags))
        try:
            member, _, fresh = self.known_members.sync_part(told, self.now_s)
        except KvstrataError:
            return
        if fresh:
            self.filling[member.group].update(one.parts[index])

    def end(self, one: Instance) -> None:
        counts = {"l1": sum(map(len, one.parts))}
        try:
            told = wire.SyncEnd(1, one.name, one.incarnation, one.sync_number, len(one.parts), counts)
            member, sync = self.known_members.sync_end(told, self.now_s)
        except KvstrataError:
            return
        if sync is not None:
            self.known[member.group] = self.filling.pop(member.group)
            self.publishing.append((member, sync))

    @precondition(lambda self: self.publishing)
    @rule()
    def publishing_ends(self) -> None:
        member, sync = self.publishing.pop(0)
        if not self.known_members.syncs.done(member, sync, self.now_s):
            self.known_members.syncs.failed(member, sync, "late")
        self.settle()

    # --- time -----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def beats(self, data: st.DataObject) -> None:
        one = self.pick(data)
        told = wire.Heartbeat(1, one.name, one.incarnation, len(one.after) - 1, "ready", LOAD, [], [])
        try:
            commands = self.known_members.heartbeat(told, self.now_s)
        except KvstrataError:
            return
        member = self.members.get(one.name)
        assert member is not None and len(commands) == len(member.waiting)
        self.settle()

    @rule(seconds=st.sampled_from([0.5, 3.0, 4.9, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.members.tick(self.now_s)
        self.settle()

    @rule(data=st.data(), what=st.sampled_from(["register", "register", "restart", "start", "leave"]))
    def instance_comes_or_goes(self, data: st.DataObject, what: str) -> None:
        one = self.pick(data)
        if what in ("restart", "start"):
            self.start(one.name)
        if what in ("restart", "register"):
            self.register(self.instances[one.name])
        if what == "leave":
            try:
                self.known_members.goodbye(wire.Goodbye(1, one.name, one.incarnation), self.now_s)
            except KvstrataError:
                return
            self.settle()

    # --- promises -------------------------------------------------------------------------------------------

    @invariant()
    def confirmed_members_are_exact(self) -> None:
        publishing = {member.group for member, _ in self.publishing}
        for member in self.members:
            if not member.confirmed or member.group in publishing:
                continue
            one = self.instances[member.id]
            if one.incarnation == member.incarnation:
                assert self.known.get(member.group, set()) == one.after[member.applied_seq]

    @invariant()
    def live_members_have_distinct_groups_and_known_groups_have_members(self) -> None:
        groups = [member.group for member in self.members if member.state is not MemberState.DEAD]
        assert len(groups) == len(set(groups))
        assert all(self.members.of_group(group) is not None for group in self.known)

    def pick(self, data: st.DataObject) -> Instance:
        return data.draw(st.sampled_from(list(self.instances.values())))


TestClusterMachine = ClusterMachine.TestCase
TestClusterMachine.settings = settings(max_examples=amount(70, 150), stateful_step_count=60)
