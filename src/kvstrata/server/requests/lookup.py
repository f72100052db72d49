"""Lookup: how many leading chunks are there, leased for the caller's whole group, in one reply.

    lease ──all there──▶ reply
      │ the prefix goes on in chunks adopted at restart      verify them on a lane, lease again
      │ the prefix goes on beyond L1 and there is an L2      load until the deadline, lease again
      ▼
    reply with what is leased by then

Rules:

1. One reply, at the latest `REPLY_MARGIN_S` before the deadline, with leases for exactly the chunks it names.
2. What arrives later stays in L1 without a lease.
3. While more is waited for, the first lease is held, so that what was there does not leave meanwhile.
4. A ticket is always owned: by this coroutine, by the call's effect, or by a callback on a lane's future.
5. Where leases may cover no more of L1, older ones that wait for their use are asked back; this lookup is
   answered without them, a later one may have what they give back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.errors import BadRequest, Refused
from kvstrata.native.hashing import storage_keys
from kvstrata.policy.misses import Explained, split_keys, with_advice
from kvstrata.rpc.session import Call, Effect
from kvstrata.rpc.wire import Lookup, LookupReply, Reply, key_count
from kvstrata.server.requests.effects import Lease, nth_key
from kvstrata.types import KEY_BYTES, MissReason

if TYPE_CHECKING:
    from kvstrata.policy.processes import Identity, Member
    from kvstrata.server.engine import Engine

REPLY_MARGIN_S = 0.003
"""Left of the deadline for the last lease, the reply and its way back."""
KEYS_ON_LOOP = 1_024
"""Storage keys of one lookup that the loop handles itself (about 0.2 ms); more go to a lane."""

Outcome = tuple[Reply, Effect | None]


class Granted(NamedTuple):
    """A lease of leading chunks. `ticket` 0: none."""

    ticket: int
    n_chunks: int
    extents: bytes
    unverified: int
    short_bytes: int
    """What other leases would have to give back for the rest of the prefix."""
    rows: list[int]
    """The pool rows that got a share."""


def _granted(leased: tuple[int, int, bytes, int, int], rows: list[int]) -> Granted:
    return Granted(*leased, rows)


NOTHING = Granted(0, 0, b"", 0, 0, [])


class Asked(NamedTuple):
    """One lookup, as it came and as it is known here."""

    call: Call
    member: Member
    identity: Identity
    request: Lookup
    n_chunks: int
    slices: bytes
    n_slices: int
    started_s: float
    deadline_s: float


class Lookups:
    """Answers lookups for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start(self, call: Call, member: Member, request: Lookup) -> Outcome | Coroutine[Any, Any, Outcome]:
        """The outcome at once, or the coroutine that gets it. Raises BadRequest or UnknownIdentity."""
        engine = self._engine
        identity = engine.peers.identity(member, request.identity_id)
        keys = request.groups[0].keys
        n_chunks = key_count(keys)
        if n_chunks < 1:
            raise BadRequest(
                f"groups[0].keys: {len(keys)} bytes are not one or more {KEY_BYTES}-byte keys",
                field="groups[0].keys",
            )
        if len(request.probe) not in (0, 8):
            raise BadRequest(f"probe: must be 0 or 8 bytes, found {len(request.probe)}", field="probe")
        group = member.group
        now_s = engine.clock.monotonic_s()
        asked = Asked(
            call, member, identity, request, n_chunks, group.packed_slices, len(group.slices), now_s,
            now_s + request.deadline_ms / 1000 - REPLY_MARGIN_S,
        )  # fmt: skip
        if not group.complete:
            known = f"{len(group.slices)} of {group.engine_slices} slices of this engine are attached"
            return self._outcome(asked, b"", NOTHING, 0, MissReason.REFUSED, known)
        if n_chunks * asked.n_slices > KEYS_ON_LOOP:
            return self._on_lane(asked)
        all_keys = storage_keys(keys, asked.slices)
        granted = _granted(engine.pool.lease(all_keys, asked.n_slices, group.rows), group.rows)
        if granted.n_chunks == n_chunks or not (granted.unverified or engine.has_l2):
            return self._answer(asked, all_keys, granted, granted.n_chunks)
        return self._more(asked, all_keys, granted)

    async def _on_lane(self, asked: Asked) -> Outcome:
        """A lookup too long for the loop."""
        engine, chain = self._engine, asked.request.groups[0].keys
        rows = list(asked.member.group.rows)

        def work() -> tuple[bytes, Granted]:
            all_keys = storage_keys(chain, asked.slices)
            return all_keys, _granted(engine.pool.lease(all_keys, asked.n_slices, rows), rows)

        future = engine.lane.run(work)
        try:
            all_keys, granted = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._give_up(done.result()[1]))
            raise
        return await self._more(asked, all_keys, granted)

    async def _more(self, asked: Asked, all_keys: bytes, granted: Granted) -> Outcome:
        """Lengthen the lease while the deadline allows."""
        engine = self._engine
        held = granted
        reason = detail = ""
        try:
            if held.unverified and not self._late(asked):
                beyond = all_keys[held.n_chunks * asked.n_slices * KEY_BYTES :]
                with contextlib.suppress(Refused):
                    await self._until_deadline(asked, engine.lane.run(engine.pool.verify, beyond))
                held = await self._lease(asked, all_keys, held)
            l1_chunks = held.n_chunks
            beyond_l1 = engine.has_l2 and held.n_chunks < asked.n_chunks and not self._late(asked)
            if engine.prefetch is not None and beyond_l1:
                start = held.n_chunks * asked.n_slices
                parent = all_keys[(start - asked.n_slices) * KEY_BYTES : start * KEY_BYTES] if start else b""
                fetched = await engine.prefetch.fetch(
                    all_keys[start * KEY_BYTES :],
                    asked.n_slices,
                    identity=asked.identity.root,
                    tenant=asked.identity.tenant,
                    parent=parent,
                    deadline_s=asked.deadline_s,
                )
                reason, detail = fetched.reason, fetched.detail
                if fetched.n_chunks:
                    held = await self._lease(asked, all_keys, held)
        except BaseException:
            self._give_up(held)
            raise
        return self._answer(asked, all_keys, held, l1_chunks, reason, detail)

    async def _lease(self, asked: Asked, all_keys: bytes, held: Granted) -> Granted:
        """Lease again from the start, then end `held`; where too much waits on the lane, `held` stays as it is.

        On cancellation nothing stays leased.
        """
        engine = self._engine
        rows = list(asked.member.group.rows)
        if asked.n_chunks * asked.n_slices <= KEYS_ON_LOOP:
            again = _granted(engine.pool.lease(all_keys, asked.n_slices, rows), rows)
        else:
            try:
                future = engine.lane.run(engine.pool.lease, all_keys, asked.n_slices, rows)
            except Refused:
                return held
            try:
                again = _granted(await asyncio.shield(future), rows)
            except asyncio.CancelledError:
                future.add_done_callback(lambda done: self._give_up(_granted(done.result(), rows)))
                raise
        self._give_up(held)
        return again

    def _give_up(self, granted: Granted) -> None:
        if granted.ticket:
            self._engine.pool.release(granted.ticket, -1)

    async def _until_deadline(self, asked: Asked, future: asyncio.Future[Any]) -> None:
        """Wait for work on a lane, at most until the deadline; the work goes on after it."""
        left_s = asked.deadline_s - self._engine.clock.monotonic_s()
        done, _ = await asyncio.wait([future], timeout=max(left_s, 0.0))
        for finished in done:
            finished.result()

    def _late(self, asked: Asked) -> bool:
        return self._engine.clock.monotonic_s() >= asked.deadline_s

    def _answer(
        self,
        asked: Asked,
        all_keys: bytes,
        granted: Granted,
        l1_chunks: int,
        load_reason: str = "",
        load_detail: str = "",
    ) -> Outcome:
        """The outcome for what is leased now; `load_reason` is why the load from L2 went no further."""
        if granted.n_chunks == asked.n_chunks:
            return self._outcome(asked, all_keys, granted, l1_chunks, "", "")
        asked_back = self._engine.revoke(granted.short_bytes) if granted.short_bytes else 0
        reason, detail = self._why(asked, all_keys, granted, asked_back)
        if load_reason not in ("", MissReason.NEVER_STORED):
            reason, detail = load_reason, f"while loading from L2: {with_advice(load_detail or load_reason)}"
        return self._outcome(asked, all_keys, granted, l1_chunks, reason, detail)

    def _why(self, asked: Asked, all_keys: bytes, granted: Granted, asked_back: int) -> tuple[str, str]:
        engine = self._engine
        first = granted.n_chunks * asked.n_slices
        keys = [nth_key(all_keys, index) for index in range(first, first + asked.n_slices)]
        if engine.pool.peek(b"".join(keys), asked.n_slices):
            detail = (
                f"present, but leases may cover no more of L1 now; {asked_back} older ones are asked back"
            )
            return MissReason.REFUSED, detail
        if granted.unverified and self._late(asked):
            return MissReason.DEADLINE, "present, but not verified since the restart"
        key = next((k for k in keys if k in engine.in_flight or engine.explainer.keys.get(k)), keys[0])
        reason, detail = engine.explainer.why(
            key,
            first=granted.n_chunks == 0,
            probe=asked.request.probe,
            root=asked.identity.root,
            layout=asked.identity.layout,
            request=asked.identity.request,
            in_flight=key in engine.in_flight,
            policy=engine.settings.l1.eviction_policy,
        )
        engine.explainer.keys.missed(key, engine.clock.unix_ms())
        return reason, detail

    def _outcome(
        self, asked: Asked, all_keys: bytes, granted: Granted, l1_chunks: int, reason: str, detail: str
    ) -> Outcome:
        engine, call, request = self._engine, asked.call, asked.request
        effect: Lease | None = None
        if granted.ticket:
            group = asked.member.group
            name = (call.session.name, call.seq)
            address = call.waiters[-1] if call.waiters else None
            effect = Lease(name, group.name, granted.ticket, granted.rows, address)
            if granted.rows is not group.rows:
                # Processes that died while a lane worked on this will never end their share.
                for row in effect.rows.difference(group.rows):
                    engine.pool.release(granted.ticket, row)
                    effect.rows.discard(row)
        now_s = engine.clock.monotonic_s()
        n = granted.n_chunks
        l1_chunks = min(l1_chunks, n)
        counters = engine.counters
        counters.lookup.add(now_s - asked.started_s)
        counters.lookup_chunks += asked.n_chunks
        counters.l1_hit_chunks += l1_chunks
        counters.l2_hit_chunks += n - l1_chunks
        if l1_chunks and engine.store is not None and engine.store.wants_touches:
            engine.store.touched(split_keys(all_keys[: l1_chunks * asked.n_slices * KEY_BYTES]))
        if reason:
            counters.misses[reason] = counters.misses.get(reason, 0) + 1
        engine.explainer.requests.add(
            Explained(
                request.request_id,
                asked.identity.request.tenant,
                asked.identity.root,
                engine.clock.unix_ms(),
                (now_s - asked.started_s) * 1000,
                asked.n_chunks,
                l1_chunks,
                n - l1_chunks,
                n,
                str(reason),
                detail,
                nth_key(all_keys, n * asked.n_slices) if reason and all_keys else b"",
            )
        )
        reply = LookupReply(call.seq, engine.epoch, n, granted.extents, l1_chunks, n - l1_chunks, str(reason))
        return reply, effect
