"""The pool under every order of calls, deaths and restarts, against a model that knows only its promises.

The machine plays the server, which calls the pool, the attached processes, which write and read bytes as long as they
may, and which die or come back at any time, operations that hold extents, and crashes of the server.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.native.core import ExtentsMap, Hold, IndexReader, Pool, RecordSpec, seal_record
from kvstrata.types import PoolChange, unpack_extents
from tests.harness.validation import validate
from tests.oracles.pool import SERVER_ROW, PoolModel
from tests.oracles.pool_chunk import PAGE, Chunk

IDENTITY = hashlib.sha256(b"identity").digest()
PROMPTS, CHUNKS = 6, 5
SIZES = (2 * PAGE, 2 * PAGE + 100, 9 * PAGE)

prompts = st.integers(0, PROMPTS - 1)
numbers = st.integers(0, 1 << 16)
sessions = st.integers(0, 3)


def key_of(prompt: int, chunk: int) -> bytes:
    """Return the key of a chunk; prompts 2n and 2n + 1 share their first two chunks."""
    return hashlib.sha256(f"{prompt // 2 if chunk < 2 else prompt + 100}.{chunk}".encode()).digest()


def chain(prompt: int, begin: int = 0, end: int = CHUNKS) -> list[bytes]:
    return [key_of(prompt, chunk) for chunk in range(begin, end)]


class PoolMachine(RuleBasedStateMachine):
    policy = "VALUE"

    def __init__(self) -> None:
        super().__init__()
        self.index_fd = os.memfd_create("index", os.MFD_CLOEXEC)
        self.extents_fd = os.memfd_create("extents", os.MFD_CLOEXEC)
        self.options = {"policy": self.policy, "max_session_share": 3}
        self.sizes = {"extents_bytes": 48 * PAGE, "entry_capacity": 18}
        self.pool = Pool.create(self.index_fd, self.extents_fd, **self.sizes, **self.options)
        self.cursor = 0
        self.reader = IndexReader(self.index_fd)
        self.memory = ExtentsMap(self.extents_fd, self.sizes["extents_bytes"])
        self.model = PoolModel(**self.sizes, max_session_share=3)
        self.holds: dict[int, tuple[Hold, Chunk]] = {}
        self.hold_number = 0
        self.fill = 0

    def teardown(self) -> None:
        for hold, _ in self.holds.values():
            hold.drop()
        self.pool.close()
        self.memory.close()
        self.reader.close()
        os.close(self.index_fd)
        os.close(self.extents_fd)

    # helpers

    def row_of(self, session: int) -> int:
        name = bytes([session]) * 16
        for row, info in self.model.rows.items():
            if info.session == name:
                return row
        return 0

    def take_changes(self) -> dict[int, list[bytes]]:
        """What became of chunks since the last call; the model does not know it yet."""
        keys = {key[:8]: key for key in self.model.index}
        told = self.pool.l1_changes(self.cursor, 1 << 20)
        assert told is not None
        self.cursor, changes = told
        found: dict[int, list[bytes]] = {}
        for change, tag in changes:
            found.setdefault(change, []).append(keys.get(tag, tag))
        return found

    def waiting(self, keys: Iterable[bytes], *, sound: bool = False) -> list[bytes]:
        """Those of these keys whose chunks were adopted and are not verified yet; only sound ones, or all."""
        chunks = ((key, self.model.index.get(key)) for key in keys)
        found = [(key, chunk) for key, chunk in chunks if chunk is not None and chunk.state == "unverified"]
        return [key for key, chunk in found if chunk.sound or not sound]

    def read(self, chunk: Chunk) -> bytes:
        return bytes(self.memory.view(chunk.extent.offset_bytes, chunk.extent.length_bytes))

    def scribble(self, chunk: Chunk) -> None:
        """Write bytes that are no record, as any process that may write here can."""
        self.fill += 1
        view = self.memory.view(chunk.extent.offset_bytes, chunk.extent.length_bytes)
        view[:] = bytes([self.fill % 251]) * chunk.extent.length_bytes

    def write(self, chunk: Chunk) -> bytes:
        """Write the complete record of a reserved chunk; return its bytes."""
        self.scribble(chunk)
        spec = RecordSpec(chunk.key, IDENTITY, bytes(32), chunk.parent or b"", 256)
        seal_record(
            self.memory.address + chunk.extent.offset_bytes,
            chunk.extent.length_bytes,
            spec,
            [chunk.extent.length_bytes - PAGE],
        )
        return self.read(chunk)

    # rows

    @initialize()
    def attach_two(self) -> None:
        self.attach(0)
        self.attach(1)

    @rule(session=sessions)
    def attach(self, session: int) -> None:
        name = bytes([session]) * 16
        self.model.claimed(name, self.pool.claim_row(name, b"g" * 16, 1000 + session))

    @rule(session=sessions)
    def die(self, session: int) -> None:
        if row := self.row_of(session):
            self.pool.row_gone(row)
            self.model.gone(row)

    @rule(session=sessions)
    def quiesce(self, session: int) -> None:
        if row := self.row_of(session):
            self.pool.row_quiesced(row)
            self.model.quiesced(row)

    # storing

    @rule(has_l2=st.booleans())
    def an_l2_comes_or_goes(self, has_l2: bool) -> None:
        self.pool.set_has_l2(has_l2)
        self.model.has_l2 = has_l2

    @rule(
        session=sessions,
        prompt=prompts,
        begin=st.integers(0, CHUNKS - 1),
        count=st.integers(1, CHUNKS),
        size=st.sampled_from(SIZES),
        tenant=st.integers(0, 1),
    )
    def reserve(self, session: int, prompt: int, begin: int, count: int, size: int, tenant: int) -> None:
        keys = chain(prompt, begin, min(CHUNKS, begin + count))
        parent = key_of(prompt, begin - 1) if begin else None
        row = self.row_of(session)
        ticket, outcomes, packed = self.pool.reserve(
            b"".join(keys), parent or b"", size, row, IDENTITY, tenant
        )
        evicted = self.take_changes().get(PoolChange.EVICTED, [])
        extents = unpack_extents(packed)
        self.model.reserved(keys, parent, size, row, tenant, evicted, (ticket, outcomes, extents))

    @rule(
        session=sessions,
        prompt=prompts,
        chunk=st.integers(0, CHUNKS),
        blocks=st.integers(1, 3),
        size=st.sampled_from(SIZES),
        tenant=st.integers(0, 1),
    )
    def store_tail(self, session: int, prompt: int, chunk: int, blocks: int, size: int, tenant: int) -> None:
        """Store the first blocks of a chunk, in an extent of a chunk's size."""
        key = hashlib.sha256(key_of(prompt, chunk) + bytes([blocks])).digest()
        parent = key_of(prompt, chunk - 1) if chunk else None
        row, record_bytes = (
            self.row_of(session),
            size - 4 * PAGE // blocks if size > 4 * PAGE else size - PAGE // 2,
        )
        answer = self.pool.reserve(
            key, parent or b"", record_bytes, row, IDENTITY, tenant, tail=True, extent_bytes=size
        )
        evicted = self.take_changes().get(PoolChange.EVICTED, [])
        extents = unpack_extents(answer[2])
        self.model.reserved(
            [key], parent, record_bytes, row, tenant, evicted, (*answer[:2], extents), tail_bytes=size
        )
        for ticket in {answer[0]} - {0}:
            content = self.write(self.model.reservations[ticket].items[0])
            self.model.committed(ticket, [0], [content], self.pool.commit(ticket, [0]))
        self.take_changes()

    @precondition(lambda self: self.model.reservations)
    @rule(
        ticket=numbers,
        items=st.lists(st.integers(0, CHUNKS), min_size=1, max_size=CHUNKS),
        sound=st.lists(st.integers(0, 3), min_size=CHUNKS + 1, max_size=CHUNKS + 1),
    )
    def commit(self, ticket: int, items: list[int], sound: list[int]) -> None:
        ticket = self.some_ticket(ticket)
        reservation = self.model.reservations.get(ticket)
        written: dict[int, bytes | None] = {}
        for index in items:
            if reservation and index in reservation.items and index not in written:
                chunk = reservation.items[index]
                content = self.write(chunk)
                if sound[index] == 0:
                    self.scribble(chunk)
                written[index] = content if sound[index] else None
        outcomes = self.pool.commit(ticket, items)
        self.model.committed(ticket, items, [written.get(index) for index in items], outcomes)
        inserted = self.take_changes().get(PoolChange.CAME, [])
        assert len(inserted) == outcomes.count(0)

    @rule(session=sessions, prompt=prompts, count=st.integers(1, CHUNKS), size=st.sampled_from(SIZES))
    def store(self, session: int, prompt: int, count: int, size: int) -> None:
        """Reserve, write and commit a whole prompt at once, as engines mostly do."""
        before = set(self.model.reservations)
        self.reserve(session, prompt, 0, count, size, 0)
        for ticket in set(self.model.reservations) - before:
            chunks = self.model.reservations[ticket].items
            contents = [self.write(chunk) for chunk in chunks.values()]
            indices = list(chunks)
            self.model.committed(ticket, indices, contents, self.pool.commit(ticket, indices))
        self.take_changes()

    @precondition(lambda self: self.model.reservations)
    @rule(ticket=numbers, items=st.none() | st.lists(st.integers(0, CHUNKS), max_size=CHUNKS))
    def abort(self, ticket: int, items: list[int] | None) -> None:
        ticket = self.some_ticket(ticket)
        self.model.aborted(ticket, items, self.pool.abort(ticket, items))

    def some_ticket(self, number: int) -> int:
        live = sorted(self.model.reservations)
        return live[number % len(live)]

    @rule(ticket=st.integers(0, 100), item=st.integers(0, CHUNKS), session=sessions)
    def use_any_number_as_a_ticket(self, ticket: int, item: int, session: int) -> None:
        """A ticket that has ended or never existed is answered and changes nothing."""
        if ticket not in self.model.reservations:
            self.model.committed(ticket, [item], [None], self.pool.commit(ticket, [item]))
            self.model.aborted(ticket, [item], self.pool.abort(ticket, [item]))
            self.model.aborted(ticket, None, self.pool.abort(ticket))
            if ticket:
                assert self.pool.hold(None, ticket, item) is None
        row = self.row_of(session)
        self.model.released(ticket, row, self.pool.release(ticket, row))

    # reading

    @rule(prompt=prompts, count=st.integers(1, CHUNKS), readers=st.sets(sessions, min_size=1))
    def lease(self, prompt: int, count: int, readers: set[int]) -> None:
        rows = {self.row_of(session) for session in readers}
        keys = chain(prompt, 0, count)
        ticket, n_chunks, packed, unverified, short_bytes = self.pool.lease(b"".join(keys), 1, sorted(rows))
        extents = unpack_extents(packed)
        assert len(extents) == n_chunks
        self.model.leased(keys, rows, ticket, extents, unverified, short_bytes)

    @precondition(lambda self: self.model.leases)
    @rule(number=numbers, session=sessions, everybody=st.booleans())
    def release(self, number: int, session: int, everybody: bool) -> None:
        live = sorted(self.model.leases)
        ticket = live[number % len(live)]
        row = -1 if everybody else self.row_of(session)
        self.model.released(ticket, row, self.pool.release(ticket, row))

    @rule(prompt=prompts, chunk=st.integers(0, CHUNKS - 1))
    def hold(self, prompt: int, chunk: int) -> None:
        key = key_of(prompt, chunk)
        hold = self.pool.hold(key)
        assert (hold is not None) == (self.model.state_of(key) == "ready")
        if hold is not None:
            self.keep(hold, self.model.index[key])

    @precondition(lambda self: self.model.reservations)
    @rule(ticket=numbers, index=st.integers(0, CHUNKS - 1))
    def hold_reserved(self, ticket: int, index: int) -> None:
        ticket = self.some_ticket(ticket)
        items = self.model.reservations[ticket].items
        hold = self.pool.hold(None, ticket, index)
        assert (hold is not None) == (index in items)
        if hold is not None:
            self.keep(hold, items[index])

    def keep(self, hold: Hold, chunk: Chunk) -> None:
        assert (hold.key, hold.offset, hold.length) == (
            chunk.key,
            chunk.extent.offset_bytes,
            chunk.extent.length_bytes,
        )
        self.hold_number += 1
        self.holds[self.hold_number] = (hold, chunk)
        chunk.holds.add(self.hold_number)

    @precondition(lambda self: self.holds)
    @rule(number=numbers, twice=st.booleans())
    def drop_hold(self, number: int, twice: bool) -> None:
        name = sorted(self.holds)[number % len(self.holds)]
        hold, chunk = self.holds.pop(name)
        hold.drop()
        if twice:
            hold.drop()
        self.model.hold_dropped(chunk, name)

    # what processes do with the bytes

    @precondition(lambda self: any(chunk.in_use for chunk in self.model.chunks()))
    @rule(session=sessions)
    def a_writer_goes_on_writing(self, session: int) -> None:
        """A process writes into its reserved extents, also after its server has died."""
        for chunk in self.model.writable(self.row_of(session)):
            self.scribble(chunk)

    @rule(prompt=prompts, chunk=st.integers(0, CHUNKS - 1), told=st.booleans())
    def bytes_rot(self, prompt: int, chunk: int, told: bool) -> None:
        key = key_of(prompt, chunk)
        victim = self.model.index.get(key)
        if victim and victim.content and victim.sound:
            victim.sound = False
            view = self.memory.view(victim.extent.offset_bytes, victim.extent.length_bytes)
            view[PAGE + 17] ^= 0x40
        if told or (victim and not victim.sound and victim.state == "ready"):
            dropped = self.pool.mark_bad(key)
            checked = victim is not None and victim.state in ("ready", "unverified")
            assert dropped == (checked and victim is not None and not victim.sound)
            if dropped:
                self.model.found_bad(key)
            elif checked and victim is not None:
                victim.state = "ready"

    # administration

    @rule(prompt=prompts)
    def remove(self, prompt: int) -> None:
        keys = chain(prompt)
        unused = [key for key in keys if key in self.model.index and not self.model.index[key].in_use]
        assert self.pool.remove(b"".join(keys)) == len(unused)
        assert self.take_changes().get(PoolChange.REMOVED, []) == unused
        self.model.removed(unused)

    @rule(tenant=st.integers(-1, 1))
    def clear(self, tenant: int) -> None:
        chunks = [
            chunk
            for chunk in self.model.index.values()
            if chunk.state != "reserved" and tenant in (-1, chunk.tenant)
        ]
        kept = [chunk for chunk in chunks if chunk.leases and SERVER_ROW in chunk.recorded_rows]
        dropped = [chunk.key for chunk in chunks if chunk not in kept]
        assert self.pool.clear(tenant) == (len(dropped), len(kept))
        assert sorted(self.take_changes().get(PoolChange.CLEARED, [])) == sorted(dropped)
        self.model.cleared(dropped)

    @rule(tenant=st.integers(0, 1), quota=st.sampled_from([-1, 0, 4 * PAGE, 20 * PAGE]))
    def set_quota(self, tenant: int, quota: int) -> None:
        self.pool.set_quota(tenant, quota)
        self.model.quotas[tenant] = quota

    # restarts

    @rule()
    def crash_and_adopt(self) -> None:
        self.pool.close()
        for hold, _ in self.holds.values():
            hold.drop()
        self.holds.clear()
        epoch = self.pool.epoch
        self.pool = Pool.adopt(self.index_fd, self.extents_fd, **self.options)
        self.cursor = 0
        assert self.pool.epoch > epoch
        self.model.crashed_and_adopted()

    @rule(prompt=prompts)
    def verify(self, prompt: int) -> None:
        sound = self.waiting(chain(prompt), sound=True)
        self.model.verified(chain(prompt), *self.pool.verify(b"".join(chain(prompt))))
        assert sorted(self.pool.take_verified()) == sorted(sound)

    @rule()
    def verify_next(self) -> None:
        waiting = self.waiting(self.model.index)
        sound = self.waiting(waiting, sound=True)
        assert self.pool.verify_next(1 << 30) == 0
        self.model.verified(waiting, len(sound), len(waiting) - len(sound))
        assert sorted(self.pool.take_verified()) == sorted(sound)

    # what must hold after every step

    @invariant()
    def the_pool_is_consistent(self) -> None:
        validate(self.pool)

    @invariant()
    def every_key_is_answered_as_promised(self) -> None:
        self.pool.heartbeat()
        for prompt in range(PROMPTS):
            keys = chain(prompt)
            expected = self.model.ready_prefix(keys)
            assert self.pool.peek(b"".join(keys)) == expected
            assert self.reader.peek(b"".join(keys)) == expected

    @invariant()
    def no_foreign_bytes(self) -> None:
        for chunk in self.model.chunks():
            if chunk.content is not None and chunk.sound:
                assert self.read(chunk) == chunk.content, f"foreign bytes in {chunk.extent}"

    @invariant()
    def the_accounts_agree(self) -> None:
        stats = self.pool.stats()
        for state in ("reserved", "ready", "unverified", "quarantined"):
            assert stats["bytes"][state] == self.model.state_bytes(state), state
        assert stats["leased_bytes"] == self.model.leased_bytes()
        assert self.model.tails().items() <= stats.items()
        assert {row["row"]: row["old"] for row in self.pool.rows()} == {
            row: info.old for row, info in self.model.rows.items()
        }


class LruMachine(PoolMachine):
    policy = "LRU"


STEPS = settings(stateful_step_count=50)
PoolMachine.TestCase.settings = STEPS
LruMachine.TestCase.settings = STEPS
TestValue = PoolMachine.TestCase
TestLru = LruMachine.TestCase
