"""Explains where the chunks of a prompt are or why they are missing, and what the lookups of a request found.

All instances are asked at once by commands, which only a leading controller may send; any other controller answers what
its directory knows.  All instances together are waited for at most as long as the caller says, and instances without an
answer are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.lookups import Place
from kvstrata.controller.member import Member, MemberState
from kvstrata.controller.operations import Placement
from kvstrata.errors import KvstrataError
from kvstrata.keys.batch import nth
from kvstrata.rpc.cluster_wire import MAX_EXPLAINED_KEYS, CommandKind, tags_of
from kvstrata.types import KEY_BYTES, MissReason

LEAST_TTL_S = 1.0
_MOST_TELLING = (
    MissReason.IN_FLIGHT,
    MissReason.CORRUPT,
    MissReason.REFUSED,
    MissReason.PUT_SKIPPED,
    MissReason.BREAKER_OPEN,
    MissReason.L2_FAILED,
    MissReason.DEADLINE,
    MissReason.EVICTED,
    MissReason.IDENTITY_DIFFERS,
    MissReason.NEVER_STORED,
    MissReason.FORGOTTEN,
    MissReason.NOT_IN_L1,
    MissReason.UNKNOWN_KEY,
)
_RANK = {reason.value: rank for rank, reason in enumerate(_MOST_TELLING)}


class Answers(NamedTuple):
    """The answers of the instances that were asked."""

    told: dict[str, dict[str, Any]]
    unanswered: dict[str, str]
    """Why an instance has not answered, by instance."""

    def reject(self, instance: str, error: ValueError) -> None:
        """Treat an instance as unanswered, because its answer is not of the expected form."""
        del self.told[instance]
        self.unanswered[instance] = f"invalid answer: {error}"


class _FirstMiss(msgspec.Struct, frozen=True):
    storage_key: str


class _Remembered(msgspec.Struct, frozen=True):
    """The fields of a lookup's document that this module uses."""

    unix_ms: int
    first_miss: _FirstMiss | None


class _Row(msgspec.Struct, frozen=True):
    """An instance's answer for one key."""

    tier: str
    reason: str
    detail: str


class Told(NamedTuple):
    """An instance's answer for a chunk that the directory does not find."""

    instance: str
    tier: str
    """`l1` if the instance has the chunk and the directory has not received that event yet."""
    reason: str
    detail: str


class Miss(NamedTuple):
    """One chunk that, as far as the directory knows, no instance has with all slices that a hit needs."""

    chunk: int
    key: bytes
    """Storage key of its first slice that no instance has."""
    slice: bytes
    """Digest of that slice; empty if the request named keys."""
    window: bool
    """A hit needs that slice at its end only: it has a window or a state."""
    told: list[Told]
    """The most informative answer first."""


class Lookup(NamedTuple):
    """One lookup that an instance remembers."""

    instance: str
    document: dict[str, Any]
    places: list[Place]
    """Places that now have the chunk that the lookup missed first."""


async def of_request(
    cluster: Cluster, members: Iterable[Member], request_id: str, wait_s: float
) -> tuple[list[Lookup], Answers]:
    """The lookups of a request that the instances remember, oldest first."""
    answers = await _ask(cluster, members, {"request_id": request_id}, wait_s)
    lookups: list[tuple[int, Lookup]] = []
    for instance, body in list(answers.told.items()):
        try:
            for document in body.get("lookups", ()):
                told = msgspec.convert(document, _Remembered)
                places: list[Place] = []
                if told.first_miss is not None:
                    key = bytes.fromhex(told.first_miss.storage_key)
                    (places,) = await cluster.lookups.holders(tags_of(key))
                lookups.append((told.unix_ms, Lookup(instance, document, places)))
        except ValueError as error:  # msgspec's errors are ValueErrors too
            answers.reject(instance, error)
    return [lookup for _, lookup in sorted(lookups, key=lambda one: one[0])], answers


async def of_chunks(
    cluster: Cluster, members: Iterable[Member], found: Placement, wait_s: float
) -> tuple[list[Miss], Answers]:
    """Why the directory does not find some of the chunks: the first missing ones, as many as a command may name."""
    n_slices, keys = found.named.n_slices, found.named.keys
    absent = found.absent[: MAX_EXPLAINED_KEYS // n_slices]
    if not absent:
        return [], Answers({}, {})
    asked = b"".join(nth(keys, number) for _, numbers in absent for number in numbers)
    answers = await _ask(cluster, members, {"keys": asked}, wait_s)
    said: dict[str, list[_Row]] = {}
    for instance, body in list(answers.told.items()):
        try:
            said[instance] = msgspec.convert(body.get("keys"), list[_Row])
            if len(said[instance]) != len(asked) // KEY_BYTES:
                raise ValueError(f"{len(said.pop(instance))} keys instead of {len(asked) // KEY_BYTES}")
        except ValueError as error:
            answers.reject(instance, error)
    misses, end = [], 0
    for index, numbers in absent:
        first, end = end, end + len(numbers)
        told = []
        for instance, all_rows in said.items():
            # A chunk counts only with all of its slices, so the missing slice gives the reason.
            rows = all_rows[first:end]
            row = min(rows, key=lambda row: (bool(row.tier), _RANK.get(row.reason, len(_RANK))))
            told.append(Told(instance, row.tier, row.reason, row.detail))
        told.sort(key=lambda one: (not one.tier, _RANK.get(one.reason, len(_RANK)), one.instance))
        number = numbers[0] % n_slices
        named = found.named
        misses.append(
            Miss(
                index,
                nth(keys, numbers[0]),
                named.slices[number] if named.slices else b"",
                bool(named.spans) and named.spans[number] > 0,
                told,
            )
        )
    return misses, answers


async def _ask(
    cluster: Cluster, members: Iterable[Member], argument: dict[str, Any], wait_s: float
) -> Answers:
    """Ask all members at once, and wait for all together at most `wait_s`."""
    told: dict[str, dict[str, Any]] = {}
    unanswered: dict[str, str] = {}
    issued = []
    for member in sorted(members, key=lambda member: member.id):
        try:
            if member.state is not MemberState.LIVE:
                unanswered[member.id] = f"it is {member.state}"
            else:
                ttl_s = max(LEAST_TTL_S, wait_s)
                issued.append(cluster.issue(member, CommandKind.EXPLAIN, argument, ttl_s=ttl_s))
        except KvstrataError as denied:
            unanswered[member.id] = denied.message
    await cluster.outcome(issued, wait_s)
    for one in issued:
        if one.result is None:
            unanswered[one.instance] = f"no answer within {wait_s:g} s"
        elif not one.result.ok:
            unanswered[one.instance] = one.result.message
        else:
            told[one.instance] = one.result.body
    return Answers(told, unanswered)
