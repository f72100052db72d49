"""The parts of a client with a link whose other end the test plays: what they send and keep, when they give up."""

from __future__ import annotations

import gc
import math
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.client import CacheClient, copies, identities, link
from kvstrata.client.copies import Copier, CopyLedger
from kvstrata.client.handles import LookupCall, StoreJob, StoreOutcome
from kvstrata.client.identities import Declared, Identity, IdentityTable
from kvstrata.client.link import (
    LATE_S,
    MAX_ASKS,
    PING_PATIENCE_S,
    SECOND_LOOK_S,
    Kind,
    Pending,
    RequestTable,
    Silence,
)
from kvstrata.client.lookups import LEASES_PER_MESSAGE, Lookups, ReleaseQueue
from kvstrata.client.pinning import SLAB_BYTES
from kvstrata.client.stores import StoreQueue, StoreRequest
from kvstrata.client.warmup import STEP_BYTES, PageWarmer, present_steps
from kvstrata.config.client_model import ClientSettings
from kvstrata.errors import Refused, Unavailable
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.memory.linux import HUGE_PAGE_BYTES
from kvstrata.native.core import (
    CopyEngine,
    ExtentsMap,
    RecordSpec,
    buffer_address,
    map_present_pages,
    record_bytes,
)
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, KEY_BYTES, LayoutIdentity, LeaseName, MissReason, RequestIdentity, Role
from tests.harness.cache_engine import CacheEngine, eventually
from tests.harness.open_files import open_files
from tests.harness.rpc_client import layout

EPOCH = 7
SESSION = bytes(16)


class Link:
    """`runs_posted`: whether it runs at once what it should run later; else it never does."""

    def __init__(self, *, runs_posted: bool = False) -> None:
        self.table = RequestTable()
        self.session, self.epoch = SESSION, EPOCH
        self.connected = self.accepts = self.usable = True
        self.settled: list[wire.Cancel] = []
        self._runs_posted = runs_posted

    def ask(self, pending: Pending) -> None:
        self.table.add(pending)

    def post(self, call: Callable[[], object]) -> None:
        if self._runs_posted:
            call()

    def tell(self, message: Callable[[int, int], wire.Cancel]) -> None:
        self.settled.append(message(0, 0))

    def said(self, now_s: float = 0.0) -> list[wire.AnyRequest]:
        """Send the requests that are due; return them."""
        return [wire.decode_request(frame) for frame in self.table.to_send(now_s)]

    def send_due(self, now_s: float = 0.0) -> list[int]:
        """Send the requests that are due; return their numbers."""
        return [message.seq for message in self.said(now_s)]


ABSENT = "no cache server answers"


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """(Level, text) of the lines about an absent server."""
    return [
        (record.levelname, record.getMessage()) for record in caplog.records if ABSENT in record.getMessage()
    ]


def test_the_workers_of_an_engine_leave_the_warning_to_its_scheduler(tmp_path, caplog):
    caplog.set_level("DEBUG", logger="kvstrata")
    for role, level in ((Role.WORKER, "INFO"), (Role.SCHEDULER, "WARNING")):
        caplog.clear()
        with CacheEngine(tmp_path / "none", role=role):
            eventually("it has looked", lambda: said(caplog))
        assert said(caplog)[0][0] == level


def test_an_absence_that_lasts_is_summed_up(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(link, "REPEATED_S", 0.3)
    with CacheEngine(tmp_path / "none"):
        eventually("a summary", lambda: len(said(caplog)) > 1)
    assert "more like this were left out" in said(caplog)[1][1]


def test_a_mistake_of_ours_does_not_end_the_tries_to_attach(tmp_path, monkeypatch):
    tries: list[object] = []

    def fails(*arguments: object) -> None:
        tries.append(arguments)
        raise ZeroDivisionError

    monkeypatch.setattr(link, "attach_in", fails)
    monkeypatch.setattr(link, "ATTACH_REFUSED_RETRY_S", 0.0)
    with CacheEngine(tmp_path / "none") as engine:
        eventually("it goes on", lambda: len(tries) > 2)
        assert "ZeroDivisionError" in engine.client.error


def client_of(place: Path) -> CacheClient:
    settings = ClientSettings(socket_dir=str(place))
    return CacheClient(settings, layout=layout(), role=Role.SCHEDULER, group=os.urandom(16), engine_slices=1)


@pytest.mark.parametrize("started", [True, False])
def test_closed_clients_leave_no_descriptor_open(tmp_path: Path, started: bool) -> None:
    client_of(tmp_path).close()  # opens what a process opens once
    gc.collect()
    before = sorted(open_files())
    for _ in range(3):
        client = client_of(tmp_path)
        if started:
            client.start()
        client.close()
        client.close()
        client.identity(RequestIdentity())  # late calls find it closed
        del client
    gc.collect()
    assert sorted(open_files()) == before


QUEUE = 256
"""So many jobs the native copy engine takes before their results are read."""


class Gathers:
    """Gathers, each of one block into one extent, both in memory of the test."""

    def __init__(self) -> None:
        self.copier = Copier(CopyEngine(threads=1))
        self.blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=64)
        self.blocks.fill([0], "written")
        self.length = record_bytes(1, self.blocks.plan.payload_bytes(1))
        self.memory = mmap.mmap(-1, (QUEUE + 8) * self.length)
        self.codes: dict[int, list[int]] = {}

    def begin(self, *, may_wait: bool = True) -> int:
        at = len(self.codes)
        self.codes[at] = []
        spec = RecordSpec(bytes(32), bytes(32), bytes(32), bytes(32), 16)
        item = ([0], buffer_address(self.memory) + at * self.length, self.length, spec)
        return self.copier.begin("gather", self.blocks.plan, [item], self.codes[at].extend, may_wait=may_wait)

    def written(self, at: int) -> bool:
        return any(self.memory[at * self.length : (at + 1) * self.length])

    def collect(self) -> None:
        """Read results of jobs, as the I/O thread does, until every job has one."""
        while self.copier._ended:
            assert select.select([self.copier.event_fd], [], [], 120)[0], "nothing woke the I/O thread"
            self.copier.collect()


@pytest.fixture
def gathers() -> Iterator[Gathers]:
    gathers = Gathers()
    yield gathers
    gathers.copier.close()


def test_a_job_that_waits_for_room_copies_nothing_once_it_is_cancelled(gathers):
    jobs = [gathers.begin() for _ in range(QUEUE + 3)]
    gathers.copier.cancel(jobs[QUEUE + 1])
    gathers.collect()
    assert gathers.codes == {at: [0] if at != QUEUE + 1 else [copies.REFUSED] for at in range(QUEUE + 3)}
    assert [at for at in range(QUEUE + 3) if not gathers.written(at)] == [QUEUE + 1]


def test_the_end_of_a_cancelled_waiting_job_is_reported_while_the_queue_stays_full(gathers, monkeypatch):
    monkeypatch.setattr(gathers.copier, "_engine", FullEngine())
    first, second = gathers.begin(), gathers.begin()
    gathers.copier.cancel(first)
    assert select.select([gathers.copier.event_fd], [], [], 0)[0]
    gathers.copier.collect()
    assert gathers.codes == {0: [copies.REFUSED], 1: []}
    gathers.copier.cancel(first)
    gathers.copier.cancel(second)
    gathers.collect()
    assert gathers.codes == {0: [copies.REFUSED], 1: [copies.REFUSED]}


class FullEngine:
    """A copy engine whose queue is full and which ends no job."""

    def submit(self, *job: object) -> bool:
        return False

    def cancel(self, job: int) -> bool:
        return False

    def completions(self) -> list[tuple[int, list[int]]]:
        return []


LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16)


class Asking:
    """A lookup that needs its identity declared."""

    def __init__(self, table: IdentityTable, identity: Identity, asked_link: Link) -> None:
        self.ends: list[object] = []

        def message(seq: int, remaining_ms: int) -> wire.Ping | None:
            return wire.Ping(seq) if table.declared(identity) else None

        asked_link.ask(Pending(Kind.ASK, message, self.ends.append, self.ends.append))


@pytest.fixture
def asked_link() -> Link:
    return Link()


@pytest.fixture
def table(asked_link) -> IdentityTable:
    return IdentityTable(asked_link, LAYOUT, (bytes(32),))


@pytest.fixture
def identity(table) -> Identity:
    return table.identity(RequestIdentity())


def refuse(asked_link: Link, seq: int, code: str) -> None:
    asked_link.table.reply(wire.Error(seq, EPOCH, code, f"it says {code}", "", False))


def accept(asked_link: Link, seq: int, identity: Identity) -> None:
    asked_link.table.reply(wire.IdentifyReply(seq, EPOCH, 5, identity.root, [bytes(32)], True))


@pytest.mark.parametrize("code", ["not_permitted", "layout_refused"])
def test_a_refused_identity_is_not_declared_to_the_same_server_again(asked_link, table, identity, code):
    asking = Asking(table, identity, asked_link)
    assert asked_link.send_due() == []
    [seq] = asked_link.send_due()
    refuse(asked_link, seq, code)
    assert asked_link.send_due() == []
    assert isinstance(asking.ends[0], Refused)
    assert identity.refused_until_s == math.inf
    with pytest.raises(Refused, match=f"it says {code}"):
        table.declared(identity)
    assert asked_link.send_due() == []
    asked_link.epoch += 1
    assert table.declared(identity) is None
    assert len(asked_link.send_due()) == 1, "the identity is declared to another server"


@pytest.mark.parametrize("code", ["internal", "refused", "deadline"])
def test_after_an_error_that_may_pass_the_identity_is_declared_again_but_not_at_once(
    asked_link, table, identity, monkeypatch, code
):
    monkeypatch.setattr(identities, "MISTAKE_RETRY_S", 3600.0)
    asking = Asking(table, identity, asked_link)
    asked_link.send_due()
    [seq] = asked_link.send_due()
    refuse(asked_link, seq, code)
    assert asked_link.send_due() == []
    assert isinstance(asking.ends[0], Refused), "the lookup does not wait for the next declaration"
    with pytest.raises(Refused, match=f"it says {code}"):
        table.declared(identity)
    identity.refused_until_s = time.monotonic()
    assert table.declared(identity) is None
    [seq] = asked_link.send_due()
    accept(asked_link, seq, identity)
    assert table.declared(identity) == Declared(EPOCH, 5)
    assert identity.error == ""


def test_a_lost_connection_refuses_no_identity(asked_link, table, identity):
    assert table.declared(identity) is None
    asked_link.send_due()
    asked_link.table.fail_all(Unavailable("gone"), Kind.TELL)
    assert identity.error == ""
    assert table.declared(identity) is None
    assert len(asked_link.send_due()) == 1


@pytest.mark.parametrize("code", ["bad_request", "internal"])
def test_a_refused_identity_used_last_does_not_keep_the_slices_unknown(asked_link, code, monkeypatch):
    monkeypatch.setattr(identities, "MISTAKE_RETRY_S", 3600.0)
    table = IdentityTable(asked_link, LAYOUT, ())
    good = table.identity(RequestIdentity(tenant="t"))
    bad = table.identity(RequestIdentity(tenant="t", salt="too long"))
    table.declare(good)
    [seq] = asked_link.send_due()
    # The engine's workers have not attached yet, so the server knows no slices.
    asked_link.table.reply(wire.IdentifyReply(seq, EPOCH, 5, good.root, [], False))
    table.declare(bad)
    [seq] = asked_link.send_due()
    refuse(asked_link, seq, code)
    assert table.due_s() < math.inf
    table.tick(table.due_s())
    [seq] = asked_link.send_due()
    accept(asked_link, seq, good)
    assert table.slices == (bytes(32),)


def test_the_log_never_shows_a_salt(asked_link, table, caplog):
    secret = table.identity(RequestIdentity(tenant="blue", salt="s3cret"))
    table.declare(secret)
    [seq] = asked_link.send_due()
    refuse(asked_link, seq, "not_permitted")
    assert "'blue'" in caplog.text and "it says not_permitted" in caplog.text
    assert "s3cret" not in caplog.text


N_CHUNKS = 4


class Server:
    """Answers the identity and then the lookup of one client."""

    def __init__(self) -> None:
        self.link = Link(runs_posted=True)
        self.identities = IdentityTable(
            self.link, LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16), (bytes(32),)
        )
        self.identity = self.identities.identity(RequestIdentity())
        self.lookups = Lookups(self.link, self.identities, 60_000)

    def answers(self, n_chunks: int, extents: bytes, reason: str) -> LookupCall:
        """A lookup of N_CHUNKS chunks that gets this answer."""
        asked = wire.Lookup(0, 1, 0, "request", bytes(N_CHUNKS * KEY_BYTES))
        call = self.lookups.begin(self.identity, asked, None)
        (asked,) = self.link.said()
        if isinstance(asked, wire.Identify):
            self.link.table.reply(
                wire.IdentifyReply(asked.seq, EPOCH, 5, self.identity.root, [bytes(32)], True)
            )
            (asked,) = self.link.said()
        assert isinstance(asked, wire.Lookup)
        self.link.table.reply(wire.LookupReply(asked.seq, EPOCH, n_chunks, extents, n_chunks, 0, reason))
        return call


@pytest.fixture
def server() -> Server:
    return Server()


def extents(n: int) -> bytes:
    return bytes(n * EXTENT.size)


def test_hits_are_kept_whatever_word_the_server_has_for_the_rest(server, caplog):
    found = [server.answers(3, extents(3), word) for word in ("of a newer server", "x" * 10_000)]
    for call in found:
        lease = LeaseName(SESSION, call.seq, EPOCH)
        assert call.result[:5] == (3, lease, extents(3), 1, MissReason.FORGOTTEN)
        assert server.lookups.live.get(call.seq) is call
    assert server.link.settled == [], "the leases stand"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"
    assert "'of a newer server'" in caplog.text


def test_a_reason_of_the_list_arrives_as_it_was_given_and_one_of_a_newer_server_as_forgotten(server):
    for n_chunks in (0, 2):
        call = server.answers(n_chunks, extents(n_chunks), MissReason.EVICTED)
        assert call.result.reason is MissReason.EVICTED
    call = server.answers(0, b"", "of a newer server")
    assert (call.result.n_chunks, call.result.reason) == (0, MissReason.FORGOTTEN)
    assert server.link.settled == []


@pytest.mark.parametrize(
    ("n_chunks", "n_bytes", "reason"),
    [
        (0, 0, ""),  # nothing found, and no reason
        (N_CHUNKS + 1, (N_CHUNKS + 1) * EXTENT.size, ""),  # more than was asked for
        (-1, 0, "evicted"),
        (2, 0, "evicted"),  # hits without extents
        (2, 2 * EXTENT.size - 1, "of a newer server"),
        (2, 3 * EXTENT.size, "evicted"),  # extents of one and a half slices
    ],
)
def test_an_answer_that_cannot_be_true_is_a_miss_and_its_lease_is_given_back(
    server, n_chunks, n_bytes, reason, caplog
):
    call = server.answers(n_chunks, bytes(n_bytes), reason)
    assert (call.result.n_chunks, call.result.lease, call.result.reason) == (0, None, MissReason.REFUSED)
    assert server.lookups.live == {} and [cancel.target for cancel in server.link.settled] == [call.seq]
    assert "invalid reply to a lookup" in caplog.text


class EagerLink(Link):
    """It makes each message at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list = []

    def ask(self, pending):
        self.asked.append((pending, pending.message(len(self.asked) + 1, 0)))


@pytest.fixture
def eager() -> EagerLink:
    return EagerLink()


@pytest.fixture
def releases(eager) -> ReleaseQueue:
    return ReleaseQueue(eager, CopyLedger(), Lookups(eager, None, 0))


def give(releases: ReleaseQueue, leases: list[LeaseName]) -> None:
    """Release leases in a pass of the link without awaited requests."""
    releases.add(leases, group=False)
    releases.tick(0.0)


def lease(seq: int, epoch: int = 7) -> LeaseName:
    return LeaseName(b"s" * 16, seq, epoch)


def answer(eager: EagerLink) -> None:
    pending, message = eager.asked.pop(0)
    pending.replied(wire.Ok(message.seq, eager.epoch, len(message.leases)))


def test_a_release_message_names_a_bounded_number_of_leases(releases, eager):
    give(releases, [lease(seq) for seq in range(LEASES_PER_MESSAGE + 5)])
    assert len(eager.asked[0][1].leases) == LEASES_PER_MESSAGE
    answer(eager)
    assert len(eager.asked[0][1].leases) == 5


def test_leases_of_an_older_epoch_are_not_sent_to_the_next_server(releases, eager):
    give(releases, [lease(1)])
    give(releases, [lease(2)])
    releases.restarted(7, 8)
    eager.epoch = 8
    pending, _ = eager.asked.pop()
    pending.failed(Unavailable("restarted"))
    assert eager.asked == []
    give(releases, [lease(3)])
    assert eager.asked == []
    give(releases, [lease(4, epoch=8)])
    assert eager.asked[0][1].leases == [(b"s" * 16, 4)]


def test_leases_of_a_newer_epoch_wait_until_the_client_has_attached_to_it(releases, eager):
    give(releases, [lease(1, epoch=8)])
    assert eager.asked == []
    releases.restarted(7, 8)
    eager.epoch = 8
    releases.pump()
    assert eager.asked[0][1].leases == [(b"s" * 16, 1)]


class Recorded:
    """A request that writes down how it ended."""

    def __init__(self, kind: Kind = Kind.ASK) -> None:
        self.ends: list[object] = []
        self.pending = Pending(kind, lambda seq, ms: wire.Cancel(seq, 77), self.ends.append, self.ends.append)


def send_all(table: RequestTable, now_s: float) -> list[int]:
    """Send what is due; returns the numbers of the requests."""
    return [wire.decode_request(frame).seq for frame in table.to_send(now_s)]


def test_what_the_caller_does_not_take_is_sent_later_in_its_order():
    table, requests = RequestTable(), [Recorded(Kind.TELL), Recorded(Kind.TELL), Recorded()]
    for request in requests:
        table.add(request.pending)
    first = next(table.to_send(0.0))
    assert wire.decode_request(first).seq == requests[2].pending.seq == 1, "a caller waits for it"
    assert table.due_s() == -math.inf
    assert send_all(table, 0.0) == [2, 3]


def test_a_message_that_cannot_be_made_fails_its_request_alone():
    table, fine = RequestTable(), Recorded()
    ends = []

    def message(seq, remaining_ms):
        raise Refused("this identity is refused")

    table.add(Pending(Kind.ASK, message, ends.append, ends.append))
    table.add(fine.pending)
    assert send_all(table, 0.0) == [1]
    assert isinstance(ends[0], Refused)
    assert fine.ends == []


def test_asks_are_bounded_and_what_is_told_is_not():
    table = RequestTable()
    asks = [Recorded() for _ in range(MAX_ASKS)]
    assert all(table.add(ask.pending) for ask in asks)
    assert not table.add(Recorded().pending)
    assert table.add(Recorded(Kind.TELL).pending)
    table.remove(asks[0].pending)
    table.remove(asks[0].pending)
    assert table.n_asks == MAX_ASKS - 1
    assert table.add(Recorded().pending)


@pytest.fixture
def answering() -> Silence:
    silence = Silence()
    silence.heard()
    return silence


@pytest.mark.usefixtures("patience_of_production")
def test_a_process_that_looks_late_looks_again_before_it_calls_the_server_silent(answering):
    late_s = 10.0 + PING_PATIENCE_S + 2 * LATE_S
    answering.pinged(10.0)
    assert not answering.check(late_s), "the answer may have come while this process did not run"
    assert answering.check_due_s() == late_s + SECOND_LOOK_S
    answering.heard()
    answering.pinged(20.0)
    assert not answering.check(30.0), "the same holds after each answer"


@pytest.mark.usefixtures("patience_of_production")
def test_a_process_that_is_always_late_notices_a_silent_server_at_its_second_look(answering):
    answering.pinged(10.0)
    assert not answering.check(15.0)
    answering.pinged(15.0)
    assert not answering.check(15.0 + SECOND_LOOK_S / 2)
    assert answering.check(20.0)
    assert answering.spells == 1


CHUNKS = 2


class Stores:
    """A store queue over a link without a server, and an engine that stores."""

    def __init__(self) -> None:
        self.link = Link()
        self.copier = Copier(CopyEngine(threads=1))
        self.blocks = PagedBlocks(layers=1, num_blocks=CHUNKS, block_bytes=4096)
        self.identity = Identity(
            None, LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16), RequestIdentity()
        )
        self.identity.declared = Declared(EPOCH, 1)
        self.queue = StoreQueue(self.link, CopyLedger(), self.copier, self, bytes(32), 16)
        self.queue.ready(1 << 30)

    def declared(self, identity: Identity) -> Declared | None:
        return identity.declared

    def store(self, number: int = 0, chunks: int = CHUNKS) -> StoreJob:
        """Begin a store of `chunks` chunks."""
        job = StoreJob(chunks, lambda job: self.queue.cancel(job))
        payload = self.blocks.plan.payload_bytes(1)
        request = StoreRequest(
            job,
            self.identity,
            b"",
            bytes([number]) * chunks * KEY_BYTES,
            self.blocks.plan,
            [[chunk % CHUNKS] for chunk in range(chunks)],
            record_bytes(1, payload),
            payload,
            b"",
        )
        assert self.queue.admit(request)
        self.queue.add(request)
        return job

    def answer(self, seq: int, outcomes: bytes) -> None:
        """Answer a reserve with outcomes, whose extents are empty."""
        self.link.table.reply(wire.ReserveReply(seq, EPOCH, outcomes, bytes(len(outcomes) * EXTENT.size)))

    def ok(self, *messages: wire.AnyRequest) -> None:
        """Answer messages that give something back."""
        for message in messages:
            self.link.table.reply(wire.Ok(message.seq, EPOCH, 1))


@pytest.fixture
def stores() -> Iterator[Stores]:
    stores = Stores()
    yield stores
    stores.copier.close()
    stores.blocks.close()


def nothing_is_held(stores: Stores) -> bool:
    queue = stores.queue
    return queue.idle and queue.waiting_bytes == queue._reserved_bytes == len(stores.link.table) == 0


@pytest.mark.parametrize("outcomes", [b"\x01\x63", b"\x01", b"\x01\x01\x01"])
def test_an_invalid_reply_to_a_reserve_settles_every_chunk_and_cancels_the_reserve(stores, outcomes):
    job = stores.store()
    [reserve] = stores.link.said()
    stores.answer(reserve.seq, outcomes)
    assert job.gathered.is_set() and job.done.is_set()
    assert job.outcomes == [StoreOutcome.UNAVAILABLE] * CHUNKS
    undone = stores.link.said()
    assert [(type(message), message.target) for message in undone] == [(wire.Cancel, reserve.seq)]
    stores.ok(*undone)
    assert nothing_is_held(stores)


@pytest.mark.parametrize("present", [0, 1])
def test_after_a_refused_chunk_the_rest_of_its_job_is_skipped_and_the_next_job_is_sent(stores, present):
    payload = stores.blocks.plan.payload_bytes(1)
    stores.queue.ready(4 * record_bytes(1, payload))  # two batches of two chunks at a time
    job, following = stores.store(chunks=12), stores.store(1)
    first, second = stores.link.said()
    refused = wire.ReserveOutcome.CHAIN_EXCEEDS_POOL
    stores.answer(first.seq, bytes([wire.ReserveOutcome.PRESENT if present else refused, refused]))
    assert not job.done.is_set()  # the second batch is not answered
    stores.answer(second.seq, bytes([wire.ReserveOutcome.PARENT_ABSENT]) * 2)
    outcomes = ["chain_exceeds_pool"] * 2 + ["parent_absent"] * 2 + ["chain_exceeds_pool"] * 8
    outcomes[:present] = ["present"] * present
    assert job.done.is_set() and job.outcomes == outcomes
    [reserve] = stores.link.said()
    assert reserve.keys == bytes([1]) * CHUNKS * KEY_BYTES
    stores.answer(reserve.seq, bytes([wire.ReserveOutcome.PRESENT]) * CHUNKS)
    assert following.done.is_set() and nothing_is_held(stores)


BYTES = 2 * STEP_BYTES + (8 << 20)


class Mapped:
    """The part of a `Mapping` that a warmer uses."""

    def __init__(self, fd: int) -> None:
        self.extents = ExtentsMap(fd, BYTES)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("extents")
    os.ftruncate(fd, BYTES)
    yield fd
    os.close(fd)


def test_pages_allocated_later_are_mapped_later_and_warming_allocates_none(file):
    os.pwrite(file, bytes(STEP_BYTES), 0)
    mapping, warmer = Mapped(file), PageWarmer()
    warmer.warm(mapping)
    eventually("the first part is mapped", lambda: warmer.mapped_bytes == STEP_BYTES)
    assert os.fstat(file).st_blocks * 512 == STEP_BYTES
    os.pwrite(file, bytes(BYTES - STEP_BYTES), STEP_BYTES)
    eventually("the rest is mapped", lambda: warmer.mapped_bytes == BYTES)
    warmer.close(10)


def test_a_warmer_keeps_no_mapping_alive(file):
    mapping, warmer = Mapped(file), PageWarmer()
    gone = weakref.ref(mapping)
    warmer.warm(mapping)  # nothing exists, so it goes on looking
    del mapping
    gc.collect()
    eventually("the mapping is gone", lambda: gone() is None)
    warmer.close(10)


def test_a_pool_of_huge_pages_is_registered_in_whole_huge_pages(file):
    os.write(file, bytes(BYTES))
    assert BYTES % HUGE_PAGE_BYTES == 0 and BYTES % SLAB_BYTES
    mapping = Mapped(file)
    slabs = list(present_steps(lambda: mapping, threading.Event(), SLAB_BYTES))
    assert sum(size for _, size in slabs) == BYTES
    assert all(offset % HUGE_PAGE_BYTES == size % HUGE_PAGE_BYTES == 0 for offset, size in slabs)


def test_impossible_ranges_are_refused(file):
    mapping = Mapped(file)
    with pytest.raises(ValueError, match="must begin a page"):
        map_present_pages(mapping.extents.address + 1, 4096)
    with pytest.raises(OSError):
        map_present_pages(0, 4096)
