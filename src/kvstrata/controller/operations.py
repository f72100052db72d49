"""What admins ask of the cluster: where chunks are, and to keep, copy, move and drop them.

Instances are asked by commands that ride on their heartbeats; what is begun here goes on when nobody waits for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata.controller import prompts
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.directory import Found, Place
from kvstrata.controller.members import COMMAND_TTL_S, Denied, Issued, Member, MemberState
from kvstrata.controller.orders import Pin
from kvstrata.controller.prompts import Named
from kvstrata.errors import BadRequest, KvstrataError, Unavailable
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS, CommandKind, tags_of
from kvstrata.types import KEY_BYTES, RequestIdentity

MAX_LONGEST = 16


class NotThere(Exception):
    """What was named is not there; the message says so."""


class Asked(NamedTuple):
    """What names chunks in a request."""

    tokens: list[int] | None
    keys: Sequence[str] | None
    model: str
    kind: int | None
    request: RequestIdentity


class Placement(NamedTuple):
    """Where chunks are."""

    named: Named
    longest: list[Found]
    """Readable ones, best first."""
    places: list[list[Place]]
    """By chunk: those that have all of its slices."""

    @property
    def held_chunks(self) -> int:
        """Leading chunks that somebody has."""
        return next((index for index, places in enumerate(self.places) if not places), len(self.places))


class Operations:
    """Over one cluster."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        self._cluster = cluster
        self._supervisor = supervisor

    # --- finding --------------------------------------------------------------------------------------------

    def member(self, instance: str) -> Member:
        """Raises NotThere."""
        member = self._cluster.members.get(instance)
        if member is None:
            there = ", ".join(sorted(member.id for member in self._cluster.members)) or "none"
            raise NotThere(f"instance: there is no {instance!r:.80}; there are: {there:.500}")
        return member

    def named(self, instances: Sequence[str] | None) -> list[Member]:
        """These, or all, dead ones for a while too. Raises NotThere."""
        return list(self._cluster.members) if instances is None else [self.member(one) for one in instances]

    async def name(self, asked: Asked) -> Named:
        """The chunks that a request names. Raises BadRequest."""
        if (asked.tokens is None) == (asked.keys is None):
            raise BadRequest("tokens: give either tokens or keys", field="tokens")
        if asked.keys is not None:
            return prompts.from_keys(asked.keys)
        assert asked.tokens is not None
        kind = self._kind(asked)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, prompts.from_tokens, kind, asked.request, asked.tokens)

    def _kind(self, asked: Asked) -> prompts.Kind:
        return prompts.choose(prompts.kinds(self._cluster.members), asked.model, asked.kind)

    async def find(self, named: Named) -> Placement:
        """Where they are."""
        tags = tags_of(named.keys)
        directory, n_slices = self._cluster.directory, named.n_slices
        longest = await directory.longest_on_thread(tags, n_slices, None, MAX_LONGEST)
        rows = await directory.holders(tags)
        places = []
        for first in range(0, len(rows), n_slices):
            common = set(rows[first])
            for row in rows[first + 1 : first + n_slices]:
                common.intersection_update(row)
            places.append(sorted(common, key=lambda place: (place.tier != "l1", place)))
        return Placement(named, longest, places)

    # --- keeping --------------------------------------------------------------------------------------------

    async def pin(
        self, named: Named, instance: str | None, ttl_s: float
    ) -> tuple[Pin, list[Issued], asyncio.Task[None]]:
        """Keep the leading chunks that an instance has in L1; the task ends when it has answered.

        The order is written before the instance is asked, so that nothing is kept that is not listed.  Raises
        BadRequest, NotThere, Refused, Denied, NotLeading.
        """
        cluster = self._cluster
        if instance is None:
            member, n_chunks = await self._longest(named, None)
            keys = named.keys[: n_chunks * named.n_slices * KEY_BYTES]
        else:
            member, keys = self.member(instance), named.keys
        parts = _batches(_some(keys), 1)
        cluster.members.check_room(member, len(parts))
        ttl_ms = round(1000 * ttl_s)
        pin = Pin(
            secrets.token_hex(8),
            member.id,
            len(keys) // KEY_BYTES,
            cluster.clock.unix_ms() + ttl_ms,
            member.incarnation,
            len(parts),
            kept=False,
        )
        await cluster.orders.put_pin(pin)
        arguments = [
            {"keys": part, "ttl_ms": ttl_ms, "claim": claim}
            for claim, part in zip(pin.claims, parts, strict=True)
        ]
        try:
            issued = cluster.issue_all(member, CommandKind.PIN, arguments)
        except Denied:
            await cluster.orders.end_pins(pin.claim)
            raise
        return pin, issued, self._supervisor.spawn(self._pinned(pin, issued), "pin")

    async def _pinned(self, pin: Pin, issued: list[Issued]) -> None:
        """List what is kept; a part of it is ended again."""
        await self._cluster.outcome(issued, COMMAND_TTL_S + 1)
        kept = [one for one in issued if _count(one)]
        n_keys = sum(_count(one) for one in issued)
        if self._cluster.orders.pin(pin.claim) is None:
            return  # its time, or the process that was asked, is over
        try:
            if n_keys and all(one.result is not None and one.result.ok for one in issued):
                await self._cluster.orders.put_pin(msgspec.structs.replace(pin, n_keys=n_keys, kept=True))
            elif all(one.answered or not one.sent for one in issued):
                member = self._cluster.members.get(pin.instance)
                if kept and member is not None:
                    ends = [{"claim": one.command.argument["claim"]} for one in kept]
                    self._cluster.issue_all(member, CommandKind.UNPIN, ends)
                await self._cluster.orders.end_pins(pin.claim)
            # Else the instance may keep them: it stays listed as it was asked for, until its time is over.
        except (Denied, KvstrataError) as error:
            self._cluster.say("pin_unsettled", pin.instance, claim=pin.claim, reason=str(error))

    async def unpin(self, claim: str, instance: str | None) -> tuple[list[Issued], asyncio.Task[None]]:
        """End a pin; it is listed until the instance has ended it, when the task ends. Raises NotThere, Denied."""
        pin = self._cluster.orders.pin(claim)
        if pin is None and instance is None:
            raise NotThere(
                f"claim: there is no pin {claim!r:.80}; name its instance if another controller made it"
            )
        member = self.member(pin.instance if instance is None and pin is not None else instance or "")
        claims = [claim] if pin is None else pin.claims
        issued = self._cluster.issue_all(member, CommandKind.UNPIN, [{"claim": one} for one in claims])
        return issued, self._supervisor.spawn(self._unpinned(claim, issued), "unpin")

    async def _unpinned(self, claim: str, issued: list[Issued]) -> None:
        await self._cluster.outcome(issued, COMMAND_TTL_S + 1)
        try:
            if all(one.result is not None and one.result.ok for one in issued):
                await self._cluster.orders.end_pins(claim)
        except KvstrataError as error:
            self._cluster.say("pin_unsettled", issued[0].instance, claim=claim, reason=str(error))

    # --- copying --------------------------------------------------------------------------------------------

    async def copy(
        self, named: Named, to: str, source: str | None, *, move: bool
    ) -> tuple[list[Issued], asyncio.Task[None]]:
        """Copy the leading chunks that an instance has into another's L1, and drop them at the first for a move.

        The commands so far (a move has more in the end), and what ends when all have.  Raises BadRequest, NotThere,
        Denied.
        """
        target = self.member(to)
        if source is None:
            owner, n_chunks = await self._longest(named, target)
        else:
            owner = self.member(source)
            n_chunks = named.n_chunks
        if owner is target:
            raise BadRequest(f"to: {to} is where the chunks come from", field="to")
        if not owner.told.peer_endpoint:
            raise BadRequest(f"source: {owner.id} serves no peers", field="source")
        if owner.state is not MemberState.LIVE:
            raise Unavailable(f"source: {owner.id} is {owner.state}", field="source")
        keys = _some(named.keys[: n_chunks * named.n_slices * KEY_BYTES])
        told = {
            "instance": owner.id,
            "incarnation": owner.incarnation,
            "peer_endpoint": owner.told.peer_endpoint,
            "confirmed": owner.confirmed,
        }
        arguments = [
            {
                "keys": part,
                "n_slices": named.n_slices,
                "identity": named.root,
                "tenant": named.tenant,
                "owner": {**told, "n_keys": len(part) // KEY_BYTES},
            }
            for part in _batches(keys, named.n_slices)
        ]
        commands = self._cluster.issue_all(target, CommandKind.PULL, arguments)
        task = self._supervisor.spawn(self._copied(commands, owner if move else None, keys), "copy of chunks")
        return commands, task

    async def _copied(self, commands: list[Issued], leave: Member | None, keys: bytes) -> None:
        await self._cluster.outcome(commands, COMMAND_TTL_S + 1)
        if leave is None:
            return
        missing = [one.number for one in commands if not _all_arrived(one)]
        if missing:
            reason = f"not all chunks of the commands {missing} have arrived; nothing was dropped"
            self._cluster.say("move_incomplete", leave.id, reason=reason)
            return
        try:
            drops = self._cluster.issue_all(leave, CommandKind.EVICT, _drops(keys))
        except Denied as denied:
            self._cluster.say("move_incomplete", leave.id, reason=f"nothing was dropped: {denied.message}")
            return
        commands += drops
        await self._cluster.outcome(drops, COMMAND_TTL_S + 1)
        failed = [one for one in drops if one.result is None or not one.result.ok]
        if failed:
            why = failed[0].result.message if failed[0].result is not None else "no answer"
            reason = f"all chunks have arrived; the commands {[one.number for one in failed]} dropped nothing: {why}"
            self._cluster.say("move_incomplete", leave.id, reason=reason)

    # --- dropping -------------------------------------------------------------------------------------------

    def clear(self, tier: str, tenant: str | None, instances: Sequence[str] | None) -> list[Issued]:
        """Drop the chunks of a tier. Raises NotThere, Denied."""
        return self._ask_all(
            CommandKind.CLEAR,
            [(member, [{"tier": tier, "tenant": tenant}]) for member in self._live_or_named(instances)],
        )

    def evict_identity(self, root: bytes, instances: Sequence[str] | None) -> list[Issued]:
        """Drop all chunks of an identity from L1. Raises BadRequest, NotThere, Denied."""
        if len(root) != KEY_BYTES:
            raise BadRequest(f"identity: has {len(root)} bytes, must have {KEY_BYTES}", field="identity")
        return self._ask_all(
            CommandKind.EVICT, [(member, [{"identity": root}]) for member in self._live_or_named(instances)]
        )

    def identity_of(self, asked: Asked) -> bytes:
        """The root that model, adapter, tenant and salt make. Raises BadRequest."""
        return prompts.from_tokens(self._kind(asked), asked.request, []).root

    async def evict_chunks(self, named: Named, instances: Sequence[str] | None) -> list[Issued]:
        """Drop chunks from L1, by default wherever some of them are. Raises BadRequest, NotThere, Denied."""
        drops = _drops(_some(named.keys))
        if instances is not None:
            return self._ask_all(CommandKind.EVICT, [(member, drops) for member in self.named(instances)])
        rows = await self._cluster.directory.holders(tags_of(named.keys))
        of_group: dict[int, list[dict[str, Any]]] = {}
        for number, drop in enumerate(drops):
            here = rows[number * MAX_PEER_KEYS : (number + 1) * MAX_PEER_KEYS]
            for group in {place.group for row in here for place in row if place.tier == "l1"}:
                of_group.setdefault(group, []).append(drop)
        there = [(self._cluster.members.of_group(group), drops) for group, drops in of_group.items()]
        return self._ask_all(
            CommandKind.EVICT,
            [(one, drops) for one, drops in there if one is not None and one.state is MemberState.LIVE],
        )

    # --- inside ---------------------------------------------------------------------------------------------

    def _live_or_named(self, instances: Sequence[str] | None) -> list[Member]:
        return self._cluster.live() if instances is None else self.named(instances)

    def _ask_all(
        self, kind: CommandKind, asked: Iterable[tuple[Member, list[dict[str, Any]]]]
    ) -> list[Issued]:
        """Ask all of them, or none. Raises Denied."""
        rows = sorted(asked, key=lambda row: row[0].id)
        for member, arguments in rows:
            self._cluster.members.check_room(member, len(arguments))
        return [
            issued
            for member, arguments in rows
            for issued in self._cluster.issue_all(member, kind, arguments)
        ]

    async def _longest(self, named: Named, but: Member | None) -> tuple[Member, int]:
        """Who has the longest beginning. Raises NotThere."""
        group = but.group if but is not None else None
        found = await self._cluster.directory.longest_on_thread(
            tags_of(named.keys), named.n_slices, group, MAX_LONGEST
        )
        for one in found:
            member = self._cluster.members.of_group(one.group)
            if member is not None and member.state is MemberState.LIVE:
                return member, one.n_chunks
        raise NotThere("no instance that peers may read has the first of these chunks in L1")


def _batches(keys: bytes, n_slices: int) -> list[bytes]:
    """Whole chunks, as many at a time as one command may name."""
    step = max(1, MAX_PEER_KEYS // n_slices) * n_slices * KEY_BYTES
    return [keys[at : at + step] for at in range(0, len(keys), step)]


def _drops(keys: bytes) -> list[dict[str, Any]]:
    """Arguments of the commands that drop them from L1."""
    return [{"keys": part} for part in _batches(keys, 1)]


def _some(keys: bytes) -> bytes:
    """Raises BadRequest where none are named."""
    if not keys:
        raise BadRequest("tokens: name no whole chunk; give more tokens, or keys", field="tokens")
    return keys


def _count(issued: Issued) -> int:
    """Of records that a command changed, 0 where it failed."""
    result = issued.result
    count = result.body.get("count") if result is not None and result.ok else 0
    return count if isinstance(count, int) else 0


def _all_arrived(pull: Issued) -> bool:
    """Whether a pull ended with every chunk that it named in L1: a part of them is no failure of the command."""
    result, argument = pull.result, pull.command.argument
    n_chunks = len(argument["keys"]) // (KEY_BYTES * argument["n_slices"])
    return result is not None and result.ok and result.body.get("count") == n_chunks
