"""Operations of admins on the cluster: find, claim, copy, move and drop chunks; drain and remove instances.

An operation continues after its caller has stopped waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.cluster.lookups import Found, Place
from kvstrata.controller import prompts
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.commands import COMMAND_TTL_S, Command
from kvstrata.controller.member import Member, MemberState
from kvstrata.controller.prompts import Named
from kvstrata.controller.pulls import all_arrived, batches, pulls_of
from kvstrata.errors import BadRequest, KvstrataError, NotFound, Unavailable
from kvstrata.keys.spans import longest
from kvstrata.process.operations import MAX_KEYS, Chunks, Claiming
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    MAX_PEER_KEYS,
    Claim,
    Drain,
    Evict,
    Operation,
    tags_of,
)
from kvstrata.types import KEY_BYTES

MAX_LONGEST = 16


class Placement(NamedTuple):
    """The places that have the named chunks."""

    named: Named
    longest: list[Found]
    """Groups that peers may read and that could serve a hit of these chunks, the longest first."""
    places: list[list[Place]]
    """For each chunk, the places that have all of its slices; slices with a span are left out, if others are there."""
    held_chunks: int
    """Chunks of the longest hit of which some place has each part."""


def _placement(named: Named, longest_hits: list[Found], rows: list[list[Place]]) -> Placement:
    """`rows`: for each key the places that have it."""
    n_slices, spans = named.n_slices, named.spans
    whole = [number for number in range(n_slices) if not (spans and spans[number])] or list(range(n_slices))
    places = []
    for first in range(0, len(rows), n_slices):
        common = set(rows[first + whole[0]])
        for number in whole[1:]:
            common.intersection_update(rows[first + number])
        places.append(sorted(common, key=lambda place: (place.tier != "l1", place)))
    prefix = next((chunk for chunk, there in enumerate(places) if not there), len(places))
    held = longest(prefix, spans, lambda chunk, number: bool(rows[chunk * n_slices + number]))
    return Placement(named, longest_hits, places, held if any(spans) else prefix)


class Operations:
    """The operations on one cluster."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        self._cluster = cluster
        self._supervisor = supervisor

    # --- finding --------------------------------------------------------------------------------------------

    def member(self, instance: str) -> Member:
        """The member with this id. Raises NotFound."""
        member = self._cluster.members.get(instance)
        if member is None:
            there = ", ".join(sorted(member.id for member in self._cluster.members)) or "none"
            raise NotFound(f"instance: unknown instance {instance!r:.80}; instances: {there:.500}")
        return member

    def named(self, instances: Sequence[str]) -> list[Member]:
        """The members with these ids. Raises NotFound."""
        return [self.member(one) for one in instances]

    async def name(self, ask: Chunks, kind: int | None) -> Named:
        """The storage keys of the chunks that a request names, by tokens or by keys. Raises BadRequest."""
        loop = asyncio.get_running_loop()
        if ask.keys is not None and ask.tokens is None:
            return await loop.run_in_executor(None, prompts.from_keys, ask.keys, ask.tenant)
        if ask.keys is None and ask.tokens is not None:
            chosen = prompts.choose(prompts.kinds(self._cluster.members), ask.model, kind)
            return await loop.run_in_executor(None, prompts.from_tokens, chosen, ask.request(), ask.tokens)
        raise BadRequest("tokens: give either tokens or keys", field="tokens")

    async def find(self, named: Named) -> Placement:
        """Find the places that have the named chunks."""
        hits = await self._hits(named, None)
        return _placement(named, hits, await self._cluster.lookups.holders(tags_of(named.keys)))

    # --- instances ------------------------------------------------------------------------------------------

    async def drain(self, instance: str, on: bool) -> list[Command]:
        """Order that no peers are sent to an instance, or that they are sent again.

        Returns the command for the instance; an empty list if the instance is not live.  A drain can also be ended for
        an instance that is no member now.  Raises KvstrataError.
        """
        cluster = self._cluster
        name = instance if not on and instance in cluster.orders.drained else self.member(instance).id
        cluster.leadership.must_lead()
        await cluster.orders.drain(name, on)
        cluster.journal.say("draining" if on else "undrained", name)
        member = cluster.members.get(name)
        if member is None or member.state is not MemberState.LIVE:
            return []
        return [cluster.issue(member, Drain(on))]

    async def remove(self, instance: str) -> MemberState:
        """Forget a member, and the key that its id belongs to; returns its state before.

        Unless it is dead, it may not join again until it is allowed.  An absent instance whose id belongs to a key is
        forgotten likewise.  Raises KvstrataError.
        """
        cluster = self._cluster
        if cluster.members.get(instance) is None and instance in cluster.orders.keys:
            cluster.leadership.must_lead()
            await cluster.orders.remove(instance, bar=False)
            return MemberState.GONE
        member = self.member(instance)
        was = member.state
        cluster.leadership.must_lead()
        await cluster.orders.remove(member.id, bar=was is not MemberState.DEAD)
        if cluster.members.get(member.id) is member:
            cluster.members.remove(member)
        cluster.settle()
        return was

    # --- claims ---------------------------------------------------------------------------------------------

    async def claim(self, named: Named, instance: str | None, asked: Claiming) -> list[Command]:
        """Claim chunks at an instance, by default the one with the longest prefix of them. Raises KvstrataError."""
        keys = _some(named.keys)
        if len(keys) > MAX_KEYS * KEY_BYTES:
            raise BadRequest(
                f"tokens: a claim keeps at most {MAX_KEYS} records, found {len(keys) // KEY_BYTES}; give fewer tokens",
                field="tokens",
            )
        member = self.member(instance) if instance is not None else (await self._longest(named, None))[0]
        operation = Claim(
            keys,
            asked.left_s(self._cluster.clock.unix_ms() / 1000),
            named.n_slices,
            list(named.spans),
            named.root or None,
            named.tenant,
            asked.bytes,
        )
        return self._cluster.issue_to_each([(member, [operation])])

    def at(self, instances: Sequence[str] | None, operation: Operation) -> list[Command]:
        """Have these instances, by default all live ones, carry out an operation. Raises KvstrataError."""
        members = self._cluster.live() if instances is None else self.named(instances)
        return self._cluster.issue_to_each([(one, [operation]) for one in members])

    # --- copying --------------------------------------------------------------------------------------------

    async def copy(
        self, named: Named, to: str, source: str | None, *, move: bool
    ) -> tuple[list[Command], asyncio.Task[None]]:
        """Copy the leading chunks of one instance's L1 into that of instance `to`; a move drops them at the source.

        Returns the commands so far, to which a move adds its drops, and a task that ends when all commands have ended.
        Raises KvstrataError.
        """
        target = self.member(to)
        if source is None:
            owner, n_chunks = await self._longest(named, target)
        else:
            owner = self.member(source)
            n_chunks = named.n_chunks
        if owner is target:
            raise BadRequest(f"to: {to} is also the source of the chunks; name another instance", field="to")
        if not owner.told.gives_to_peers:
            raise BadRequest(f"source: {owner.id} does not serve peers; name another", field="source")
        if owner.state is not MemberState.LIVE:
            raise Unavailable(f"source: {owner.id} is {owner.state}; name a live instance", field="source")
        keys = _some(named.keys[: n_chunks * named.n_slices * KEY_BYTES])
        pulls = pulls_of(named._replace(keys=keys), owner)
        commands = self._cluster.issue_to_each([(target, pulls)])
        task = self._supervisor.job(self._copied(commands, owner if move else None, keys), "copy of chunks")
        return commands, task

    async def _copied(self, commands: list[Command], leave: Member | None, keys: bytes) -> None:
        await self._cluster.outcome(commands, COMMAND_TTL_S + 1)
        if leave is None:
            return
        missing = [one.number for one in commands if not all_arrived(one)]
        if missing:
            reason = f"some chunks of the commands {missing} have not arrived; nothing was dropped"
            self._cluster.journal.say("move_incomplete", leave.id, reason=reason)
            return
        try:
            drops = self._cluster.issue_to_each([(leave, _drops(keys))])
        except KvstrataError as denied:
            self._cluster.journal.say(
                "move_incomplete", leave.id, reason=f"nothing was dropped: {denied.message}"
            )
            return
        commands += drops
        await self._cluster.outcome(drops, COMMAND_TTL_S + 1)
        failed = [one for one in drops if one.result is None or not one.result.ok]
        if failed:
            why = failed[0].result.message if failed[0].result is not None else "no answer"
            reason = f"all chunks have arrived; the commands {[one.number for one in failed]} dropped nothing: {why}"
            self._cluster.journal.say("move_incomplete", leave.id, reason=reason)

    # --- dropping -------------------------------------------------------------------------------------------

    async def evict_chunks(self, named: Named, instances: Sequence[str] | None) -> list[Command]:
        """Drop chunks from L1, by default at all instances that have some of them. Raises KvstrataError."""
        drops = _drops(_some(named.keys))
        if instances is not None:
            return self._cluster.issue_to_each([(member, drops) for member in self.named(instances)])
        rows = await self._cluster.lookups.holders(tags_of(named.keys))
        of_group: dict[int, list[Evict]] = {}
        for number, drop in enumerate(drops):
            here = rows[number * MAX_PEER_KEYS : (number + 1) * MAX_PEER_KEYS]
            for group in {place.group for row in here for place in row if place.tier == "l1"}:
                of_group.setdefault(group, []).append(drop)
        there = [(self._cluster.members.of_group(group), drops) for group, drops in of_group.items()]
        return self._cluster.issue_to_each(
            [(one, drops) for one, drops in there if one is not None and one.state is MemberState.LIVE]
        )

    # --- inside ---------------------------------------------------------------------------------------------

    async def _hits(self, named: Named, but: int | None) -> list[Found]:
        """The groups, other than `but`, with the longest hits."""
        spans = named.spans or (0,) * named.n_slices
        return await self._cluster.lookups.hits(named.keys, spans, but, MAX_LONGEST)

    async def _longest(self, named: Named, but: Member | None) -> tuple[Member, int]:
        """The live member, other than `but`, with the longest prefix, and its chunks. Raises NotFound."""
        group = but.group if but is not None else None
        for one in await self._hits(named, group):
            member = self._cluster.members.of_group(one.group)
            if member is not None and member.state is MemberState.LIVE:
                return member, one.n_chunks
        raise NotFound("no live instance that serves peers has the first of these chunks in L1")


def _drops(keys: bytes) -> list[Evict]:
    """The operations that drop these keys from L1."""
    return [Evict(part) for part in batches(keys, 1)]


def _some(keys: bytes) -> bytes:
    """The same keys. Raises BadRequest if they are empty."""
    if not keys:
        raise BadRequest("tokens: must fill at least one chunk; give more tokens, or keys", field="tokens")
    return keys
