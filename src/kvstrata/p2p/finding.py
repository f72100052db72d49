"""Finds an owner for a run of keys, called a question, and leases the leading keys there.

standing leases ─▶ the owner named for these keys ─▶ the directory (remembered for a moment) ─▶ PeerLease at owners
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstrata.errors import ClusterFailure, TransferError, Unavailable
from kvstrata.p2p.connections import Connections
from kvstrata.p2p.leases import Lease
from kvstrata.p2p.owners import DirectoryCache, Question, question_of
from kvstrata.p2p.returns import Returns
from kvstrata.p2p.shared import Shared
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS, Owner, PeerLease, PeerLeased, Where, WhereReply, tags_of
from kvstrata.rpc.zmq_link import AskLink
from kvstrata.tiers.base import MIN_RECORD_BYTES, Ask, Presence
from kvstrata.tiers.breaker import Breaker
from kvstrata.tiers.reasons import (
    CONTROLLER_DOWN,
    LIMIT,
    MAC_DIFFERS,
    PEER_DEADLINE,
    PEER_FAILED,
    PEER_GONE,
    PEER_SKIPPED,
    THROTTLED,
)
from kvstrata.types import EXTENT, NO_EXTENT, Extent, unpack_extents

STANDS_S = 1.0
"""A lookup asks for a new lease on keys whose lease has less time left than this.

When the lookup answers, it counts every lease that is valid at that moment.
"""
ATTEMPTS = 2
"""Maximum number of owners named by the directory that one lookup asks; an owner that a command named comes before."""
_OWNER = msgspec.msgpack.Decoder(Owner)


class Asked(NamedTuple):
    """The result of a question, besides the leases that are now in the LeaseBook."""

    reason: str = ""
    """The short reason why chunks that are not leased count as unknown; empty if they count as absent."""
    more: int = 0
    """Number of leading keys that an owner will lease only when we have given leases back.  The directory, or the
    command that named the owner, says that it has them."""


class Finder:
    """Finds and leases records for one tier."""

    def __init__(
        self,
        shared: Shared,
        connections: Connections,
        returns: Returns,
        controllers: Sequence[tuple[AskLink, Breaker]],
    ) -> None:
        """`controllers` are asked in this order until one answers."""
        self._shared = shared
        self._connections = connections
        self._returns = returns
        self._controllers = controllers
        settings = shared.settings
        self._directory = DirectoryCache(
            ttl_s=settings.remember_ms / 1000, negative_ttl_s=settings.remember_none_ms / 1000
        )
        self._asking: dict[tuple[Question, bytes], asyncio.Task[Asked]] = {}
        """By question and named owner."""

    async def find(self, keys: list[bytes], ask: Ask) -> bytes:
        """Lease the leading keys that some owner has, and answer for all keys as `StorageAdapter.exists` does.

        With `ask.each`, each that one of `ATTEMPTS` owners has is leased.
        """
        if ask.each:
            return await self._find_each(keys, ask)
        first = len(self._shared.leases.leading(keys, self._shared.now_s() + STANDS_S))
        asked = Asked()
        if first < len(keys):
            asked = await self.lease(keys[first:][:MAX_PEER_KEYS], ask)
        n_there = len(self._shared.leases.leading(keys, self._shared.now_s()))
        if n_there:
            n_there = max(n_there, first + asked.more)
        ask.reason = asked.reason if n_there < len(keys) else ""
        rest = Presence.UNKNOWN if asked.reason else Presence.ABSENT
        return bytes([Presence.PRESENT] * n_there + [rest] * (len(keys) - n_there))

    async def _find_each(self, keys: list[bytes], ask: Ask) -> bytes:
        leases, now_s = self._shared.leases, self._shared.now_s
        until_s = now_s() + STANDS_S
        missing = [key for key in keys if leases.standing(key, until_s) is None]
        asked = await self.lease(missing[:MAX_PEER_KEYS], ask) if missing else Asked()
        ask.reason = asked.reason
        rest = Presence.UNKNOWN if asked.reason else Presence.ABSENT
        return bytes([rest if leases.standing(key, now_s()) is None else Presence.PRESENT for key in keys])

    async def lease(self, keys: list[bytes], ask: Ask) -> Asked:
        """Lease the leading keys of this run, or with `ask.each` each; callers with the same question share one task.

        If a call is cancelled, the task still runs to its end.
        """
        question = question_of(keys, each=ask.each)
        name = question, ask.owner
        task = self._asking.get(name)
        if task is None:
            named = _OWNER.decode(ask.owner) if ask.owner else None
            work = self._ask_each(question, keys, named) if ask.each else self._ask(question, keys, named)
            task = asyncio.create_task(work, name=f"{self._shared.name}-ask")
            self._asking[name] = task
            self._shared.work.keep(task)
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        return await asyncio.shield(task)

    async def _ask(self, question: Question, keys: list[bytes], named: Owner | None) -> Asked:
        ends_s = self._shared.now_s() + self._shared.settings.lookup_timeout_ms / 1000
        reason, n_lost = "", 0  # why an owner that has this many keys leases none of them
        if named is not None:
            asked, reason = await self._ask_named(named, keys, ends_s)
            if asked is not None:
                return asked
            n_lost = len(keys) if reason else 0
            ends_s = self._shared.now_s() + self._shared.settings.lookup_timeout_ms / 1000
        owners = self._directory.recall(question, self._shared.now_s())
        if owners is None:
            owners = await self._ask_directory(question, keys, ends_s)
            if owners is None:
                return Asked(reason or CONTROLLER_DOWN)
        else:
            self._shared.counts["recalled"] += 1
        more = self._shared.owners.crowded(owners, self._shared.now_s())
        skipped = self._shared.owners.skipped(owners, self._shared.now_s())
        if skipped:
            reason, n_lost = reason or PEER_SKIPPED, max(n_lost, skipped)
        for owner in self._shared.owners.in_order(owners, self._shared.now_s())[:ATTEMPTS]:
            if not self._shared.owners.admit(owner.instance, self._shared.now_s()):
                reason, n_lost = reason or PEER_SKIPPED, max(n_lost, owner.n_keys)
                continue
            count, word = await self._lease_at(owner, keys[: owner.n_keys], ends_s)
            if word == LIMIT:
                return Asked(more=owner.n_keys)
            if count:
                return Asked(reason if n_lost > count else "")
            if word:
                reason, n_lost = reason or word, max(n_lost, owner.n_keys)
            self._directory.wrong(question)
        return Asked(reason, more)

    async def _ask_each(self, question: Question, keys: list[bytes], named: Owner | None) -> Asked:
        """Lease single keys: at the owner that is named for them, and what it lacks at up to `ATTEMPTS` others."""
        shared = self._shared
        ends_s = shared.now_s() + shared.settings.lookup_timeout_ms / 1000
        left, reason = keys, ""
        if named is not None:
            left, word = await self._lease_each([named], keys, ends_s)
            reason = reason or word
        if not left:
            return Asked()
        owners = self._directory.recall(question, shared.now_s())
        if owners is None:
            owners = await self._ask_directory(question, left, ends_s, each=True)
            if owners is None:
                return Asked(reason or CONTROLLER_DOWN)
        else:
            shared.counts["recalled"] += 1
        if shared.owners.skipped(owners, shared.now_s()):
            reason = reason or PEER_SKIPPED
        now = shared.owners.in_order(owners, shared.now_s())[:ATTEMPTS]
        left, word = await self._lease_each(now, left, ends_s)
        reason = reason or word
        return Asked(reason) if left else Asked()

    async def _lease_each(
        self, owners: Sequence[Owner], keys: list[bytes], ends_s: float
    ) -> tuple[list[bytes], str]:
        """Lease these single keys at the owners in turn; returns the keys that are not leased, and why ("": absent)."""
        shared, reason = self._shared, ""
        for owner in owners:
            if not keys:
                break
            word = PEER_SKIPPED
            if shared.owners.admit(owner.instance, shared.now_s()):
                _, word = await self._lease_at(owner, keys, ends_s, each=True)
            if word == LIMIT:
                word = THROTTLED
            reason = reason or word
            keys = [key for key in keys if shared.leases.standing(key, shared.now_s()) is None]
        return keys, reason

    async def _ask_named(self, owner: Owner, keys: list[bytes], ends_s: float) -> tuple[Asked | None, str]:
        """Lease at the owner that was named for these keys.

        Returns None if the owner leases none of them now, and then a short reason, which is "" if it has none of them.
        """
        now_s = self._shared.now_s()
        word = PEER_SKIPPED
        if self._shared.owners.crowded([owner], now_s):
            return Asked(more=len(keys)), ""
        if self._shared.owners.admit(owner.instance, now_s):
            count, word = await self._lease_at(owner, keys, ends_s)
            if count:
                self._shared.counts["named_leases"] += 1
            if count or (word == LIMIT and self._shared.leases.under_way_bytes(owner.instance)):
                return Asked(more=len(keys) if word == LIMIT else 0), ""
        self._shared.counts["named_refused"] += 1
        self._shared.tell_once(f"{owner.instance} leases none of the chunks it was named for; asking others")
        return None, THROTTLED if word == LIMIT else word

    async def _ask_directory(
        self, question: Question, keys: list[bytes], ends_s: float, *, each: bool = False
    ) -> list[Owner] | None:
        asked_s = self._shared.now_s()
        request = Where(0, self._shared.instance_id, tags_of(b"".join(keys)), 1, each=each)
        reply = None
        for controller, breaker in self._controllers:
            left_s = ends_s - self._shared.now_s()
            if reply is not None or left_s <= 0 or not breaker.admit(self._shared.now_s()):
                continue
            self._shared.counts["asked_directory"] += 1
            try:
                reply = await controller.ask(request, WhereReply, left_s)
            except Unavailable:
                breaker.ended(False, self._shared.now_s())
                continue
            except ClusterFailure as refused:
                self._shared.tell_once(f"the controller refuses lookups: {refused}")
            breaker.ended(True, self._shared.now_s())
        if reply is None:
            return None
        owners = [owner for owner in reply.owners if owner.instance != self._shared.instance_id]
        self._directory.learn(question, owners, asked_s)
        return owners

    async def _lease_at(
        self, owner: Owner, keys: list[bytes], ends_s: float, *, each: bool = False
    ) -> tuple[int, str]:
        """Ask an owner to lease these keys; returns how many it leases now, and a short reason or "".

        The reason is "" if the owner has none of these keys, LIMIT if it leases no more for now, PEER_DEADLINE if no
        answer came in time, PEER_GONE if the owner has restarted, MAC_DIFFERS if its `p2p.mac` is another, and
        PEER_FAILED if it refused, answered something invalid, or cannot be read; the last two are logged.
        Reports to the owner's breaker, which must have admitted this call.
        """
        now_s = self._shared.now_s
        try:
            peer = await self._connections.connected(owner, ends_s)
        except Unavailable:
            self._shared.owners.failed(owner.instance, now_s())
            return 0, PEER_DEADLINE
        except (ClusterFailure, TransferError) as error:
            self._shared.owners.failed(owner.instance, now_s())
            self._shared.tell_once(f"{owner.instance} cannot be read: {error}")
            return 0, MAC_DIFFERS if error.field == "mac" else PEER_FAILED
        request = PeerLease(
            0,
            self._shared.instance_id,
            b"".join(keys),
            1,
            ttl_ms=self._shared.settings.lease_ms,
            each=each,
        )
        asked_s = now_s()
        try:
            leased = await peer.link.ask(request, PeerLeased, max(0.0, ends_s - asked_s))
        except Unavailable:
            self._shared.owners.failed(owner.instance, now_s())
            self._connections.let_go(peer)
            return 0, PEER_DEADLINE
        except ClusterFailure as refused:
            self._shared.owners.well(owner.instance, now_s())
            self._shared.tell_once(f"{owner.instance} leases nothing: {refused}")
            return 0, PEER_FAILED
        try:
            extents = _extents_of(leased, keys, peer.extents_bytes, each)
        except ValueError as error:
            self._shared.owners.failed(owner.instance, now_s())
            self._shared.tell_once(f"{owner.instance} answered with an impossible lease: {error}")
            return 0, PEER_FAILED
        self._shared.owners.well(owner.instance, now_s())
        if leased.epoch != peer.epoch:  # the owner has restarted: the connection reaches the old process
            self._connections.let_go(peer)
            return 0, PEER_GONE
        word = LIMIT if leased.reason == LIMIT else ""
        if not extents:
            self._shared.counts["leases_refused"] += 1
            return 0, word
        self._shared.counts["leases"] += 1
        lease = Lease(
            owner.instance,
            leased.lease,
            leased.epoch,
            extents,
            asked_s + leased.ttl_ms / 1000,
            now_s(),
        )
        for over in self._shared.leases.add(lease):
            self._shared.work.keep(self._returns.give_back(over))
        return len(extents), word


def _extents_of(
    leased: PeerLeased, keys: Sequence[bytes], extents_bytes: int, each: bool
) -> dict[bytes, Extent]:
    """The leased extents by key, checked against the length of the owner's L1. Raises ValueError.

    With `each`, an extent that is zero stands for a key that is not leased.
    """
    n_keys = len(keys)
    if len(leased.extents) % EXTENT.size or len(leased.extents) > n_keys * EXTENT.size:
        raise ValueError(f"{len(leased.extents)} bytes of extents for {n_keys} keys")
    extents = {
        key: extent
        for key, extent in zip(keys, unpack_extents(leased.extents), strict=False)
        if extent != NO_EXTENT or not each
    }
    for extent in extents.values():
        if (
            extent.length_bytes < MIN_RECORD_BYTES
            or extent.offset_bytes + extent.length_bytes > extents_bytes
        ):
            raise ValueError(f"{extent} in a pool of {extents_bytes} bytes")
    if extents and not leased.lease:
        raise ValueError("extents without a lease")
    return extents
