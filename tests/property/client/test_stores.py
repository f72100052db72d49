"""Stores in any order of answers, copies, cancels, silences and restarts: each ends once and not too early."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.client.batches import StoreRequest
from kvstrata.client.handles import StoreJob, StoreOutcome
from kvstrata.client.identities import Declared
from kvstrata.client.requests import Kind
from kvstrata.client.stores import BATCHES_IN_FLIGHT, StoreQueue
from kvstrata.errors import Unavailable
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, KEY_BYTES
from tests.harness.amount import amount

RECORD_BYTES = 1000
SESSION = bytes(16)


def chain_of(name: int, n: int) -> bytes:
    return b"".join(hashlib.sha256(b"%d.%d" % (name, i)).digest() for i in range(n))


class Identity:
    root = bytes(KEY_BYTES)
    error = ""
    declared = None


class Ledger:
    """Counts copies as CopyLedger does, and lets them begin in open epochs only."""

    def __init__(self) -> None:
        self.running = 0
        self.open = {1}

    def begin_gather(self, epoch):
        if epoch not in self.open:
            return None
        self.running += 1
        return self

    def end_gather(self, epoch):
        self.running -= 1

    def address(self, offset_bytes, length_bytes):
        return offset_bytes


class Copier:
    def __init__(self) -> None:
        self.jobs: dict[int, tuple[list, object]] = {}
        self.last = 0

    def begin(self, kind, plan, items, ended):
        assert kind == "gather"
        self.last += 1
        self.jobs[self.last] = (list(items), ended)
        return self.last

    def cancel(self, job):
        assert job in self.jobs, "cancelled a copy that does not run"


class Link:
    """Stands for the link and its table of requests, without timers: each request ends once."""

    def __init__(self) -> None:
        self.session = SESSION
        self.usable = True
        self.epoch = 1
        self.pending: dict[int, tuple[object, object]] = {}
        self.seq = 0
        self.table = self
        self.withdrawn: list[tuple[int, object]] = []
        """Requests that the client has given up; the server may have carried them out."""

    def ask(self, pending):
        if pending.kind is Kind.ASK and not self.usable:
            pending.failed(Unavailable("silent"))
            return
        self.seq += 1
        self.pending[self.seq] = (pending, pending.message(self.seq, 1000))

    def remove(self, pending):
        for seq, (kept, message) in list(self.pending.items()):
            if kept is pending:
                del self.pending[seq]
                self.withdrawn.append((seq, message))

    def fail(self, kind):
        for seq in [s for s, (p, _) in self.pending.items() if p.kind is kind]:
            pending, _ = self.pending.pop(seq)
            pending.failed(Unavailable("gone"))


class Stores(RuleBasedStateMachine):
    """The model knows of each extent who reserved it, whether a copy runs, and whether its job was cancelled."""

    @initialize(limit=st.integers(1, 20), backlog=st.integers(5, 40))
    def begin(self, limit, backlog):
        self.limit = limit * RECORD_BYTES
        self.backlog = backlog * RECORD_BYTES
        self.link, self.ledger, self.copier = Link(), Ledger(), Copier()
        self.identity = Identity()
        self.queue = StoreQueue(
            self.link,
            self.ledger,
            self.copier,
            slice_digest=bytes(KEY_BYTES),
            chunk_tokens=16,
            backlog_bytes=self.backlog,
            declared=lambda identity: Declared(self.link.epoch, 1),
        )
        self.queue.ready(self.limit)
        self.jobs: list[tuple[StoreJob, list]] = []
        self.reserved: dict[
            int, dict[int, str]
        ] = {}  # reserve's seq → index → reserved | copying | copied | torn
        self.cancelled_first: set[tuple[int, int]] = set()
        self.committed: set[tuple[int, int]] = set()

    # What the caller does.

    @rule(n=st.integers(1, 12))
    def store(self, n):
        calls = []
        job = StoreJob(n, self.queue.cancel, calls.append)
        name = len(self.jobs)
        request = StoreRequest(
            job, self.identity, b"", chain_of(name, n), None, [[i] for i in range(n)], RECORD_BYTES, 900, b""
        )
        self.jobs.append((job, calls))
        if self.queue.admit(request):
            self.queue.add(request)
        else:
            assert self.queue.waiting_bytes + n * RECORD_BYTES > self.backlog
            job.refuse(StoreOutcome.BACKLOG)

    @precondition(lambda self: not all(job.done.is_set() for job, _ in self.jobs))
    @rule(data=st.data())
    def cancel(self, data):
        job = data.draw(st.sampled_from([job for job, _ in self.jobs if not job.done.is_set()]))
        for number, (items, ended) in self.copier.jobs.items():
            if ended.args[0].request.job is job:
                self.cancelled_first |= {(ended.args[0].seq, i) for i in ended.args[0].reserved}
                assert items and number
        job.cancel()
        for seq, message in self.link.withdrawn:
            assert isinstance(message, wire.Reserve)
            self.reserved[seq] = dict.fromkeys(range(len(message.keys) // KEY_BYTES), "reserved")
        self.link.withdrawn.clear()

    # What the server does.

    @precondition(lambda self: self.link.usable and self.link.pending)
    @rule(data=st.data(), count=st.integers(1, 4))
    def answer(self, data, count):
        for _ in range(count):
            if self.link.pending:
                self.answer_one(data, data.draw(st.sampled_from(sorted(self.link.pending))))

    def answer_one(self, data, seq):
        pending, message = self.link.pending.pop(seq)
        if isinstance(message, wire.Reserve):
            n = len(message.keys) // KEY_BYTES
            outcomes = bytes(
                data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 4, 6]), min_size=n, max_size=n))
            )
            self.reserved[seq] = {i: "reserved" for i, outcome in enumerate(outcomes) if outcome == 0}
            running = set(self.copier.jobs)
            pending.replied(
                wire.ReserveReply(seq, self.link.epoch, outcomes, EXTENT.pack(8, RECORD_BYTES, 1, 1, 0) * n)
            )
            for number in set(self.copier.jobs) - running:
                batch = self.copier.jobs[number][1].args[0]
                self.reserved[batch.seq].update(dict.fromkeys(batch.reserved, "copying"))
        elif isinstance(message, wire.Commit):
            for index in message.indices:
                self.committed.add((message.reservation, index))
                del self.reserved[message.reservation][index]
            bad = data.draw(st.booleans())
            pending.replied(wire.CommitReply(seq, self.link.epoch, bytes([2 * bad]) * len(message.indices)))
        else:
            if isinstance(message, wire.Cancel):
                self.reserved.pop(message.target, None)
            if isinstance(message, wire.Abort):
                for index in message.indices:
                    del self.reserved[message.reservation][index]
            pending.replied(wire.Ok(seq, self.link.epoch, 1))

    @precondition(lambda self: self.link.usable and self.link.pending)
    @rule(really=st.sampled_from([False, False, True]))
    def may_fall_silent(self, really):
        if really:
            self.falls_silent()

    def falls_silent(self):
        self.link.usable = False
        self.link.fail(Kind.ASK)
        self.queue.give_up()

    @precondition(lambda self: not self.link.usable)
    @rule()
    def speaks_again(self):
        self.link.usable = True

    @precondition(lambda self: not self.link.usable)
    @rule(quiesced=st.booleans())
    def restarts(self, quiesced):
        if quiesced and not self.ledger.running:
            self.ledger.open.clear()
        self.link.epoch += 1
        self.ledger.open.add(self.link.epoch)
        self.reserved = {
            seq: {i: s for i, s in items.items() if s == "copying"} for seq, items in self.reserved.items()
        }
        self.link.fail(Kind.TELL)

    @precondition(lambda self: self.copier.jobs)
    @rule(data=st.data(), good=st.booleans())
    def copy_ends(self, data, good):
        number = data.draw(st.sampled_from(sorted(self.copier.jobs)))
        items, ended = self.copier.jobs.pop(number)
        batch = ended.args[0]
        if batch.epoch == self.link.epoch:
            self.reserved[batch.seq].update(dict.fromkeys(batch.reserved, "copied"))
        else:
            del self.reserved[batch.seq]  # the next server quarantines these extents until `quiesced`
        ended([0 if good else 2] * len(items))

    # What must hold.

    @invariant()
    def extents_of_running_copies_are_never_given_back(self):
        for _, message in self.link.pending.values():
            if isinstance(message, wire.Abort | wire.Commit):
                states = {self.reserved[message.reservation][i] for i in message.indices}
                assert "copying" not in states
            if isinstance(message, wire.Cancel):
                assert "copying" not in self.reserved.get(message.target, {}).values()

    @invariant()
    def chunks_cancelled_during_their_copy_are_never_committed(self):
        offered = {
            (m.reservation, i)
            for _, m in self.link.pending.values()
            if isinstance(m, wire.Commit)
            for i in m.indices
        }
        assert not (offered | self.committed) & self.cancelled_first

    @invariant()
    def reserved_bytes_stay_below_the_limit(self):
        held = sum(len(items) for items in self.reserved.values())
        asked = [m for _, m in self.link.pending.values() if isinstance(m, wire.Reserve)]
        held += sum(len(m.keys) // KEY_BYTES for m in asked)
        assert held * RECORD_BYTES <= max(self.limit, RECORD_BYTES)
        assert len(asked) <= BATCHES_IN_FLIGHT

    @invariant()
    def done_comes_once_and_not_before_gathered(self):
        for job, calls in self.jobs:
            assert not job.done.is_set() or job.gathered.is_set()
            assert calls == ([job] if job.done.is_set() else [])

    @invariant()
    def no_job_waits_for_a_silent_server(self):
        if not self.link.usable:
            copying = {ended.args[0].request.job for _, ended in self.copier.jobs.values()}
            assert all(job.done.is_set() or job in copying for job, _ in self.jobs)

    @invariant()
    def every_waiting_job_has_a_cause(self):
        if not self.link.pending and not self.copier.jobs:
            assert all(job.done.is_set() for job, _ in self.jobs)

    def teardown(self):
        if not hasattr(self, "queue"):
            return
        while self.copier.jobs:
            items, ended = self.copier.jobs.pop(next(iter(self.copier.jobs)))
            batch = ended.args[0]
            self.reserved[batch.seq].update(dict.fromkeys(batch.reserved, "copied"))
            ended([0] * len(items))
        self.falls_silent()
        self.link.epoch += 1
        self.link.fail(Kind.TELL)
        assert all(job.done.is_set() for job, _ in self.jobs)
        assert self.queue.idle
        assert self.queue.waiting_bytes == 0
        assert self.queue._reserved_bytes == 0, "reserved bytes leak"
        assert sum(self.queue.counts.values()) == sum(
            len(job.outcomes) for job, _ in self.jobs if StoreOutcome.BACKLOG not in job.outcomes
        )


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=amount(100, 300), stateful_step_count=40, deadline=None)
