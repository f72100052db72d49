"""Where the chunks of a prompt are, or why they are not; and what became of a request: asked of all instances at once.

Instances are asked by commands, so only a controller that leads can; the others tell what the directory knows.  Nobody
is waited for longer than the caller says, and who has not answered is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.directory import Place
from kvstrata.controller.members import Denied, Member, MemberState
from kvstrata.controller.operations import Placement
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
    MissReason.UNKNOWN_KEY,
)
_RANK = {reason.value: rank for rank, reason in enumerate(_MOST_TELLING)}


class Answers(NamedTuple):
    """What instances said, by instance."""

    told: dict[str, dict[str, Any]]
    unanswered: dict[str, str]
    """Why there is no answer."""

    def is_strange(self, instance: str, error: ValueError) -> None:
        """It answered something else."""
        del self.told[instance]
        self.unanswered[instance] = f"it answered something else: {error}"


class _FirstMiss(msgspec.Struct, frozen=True):
    storage_key: str


class _Remembered(msgspec.Struct, frozen=True):
    """What is used here of a lookup's document."""

    unix_ms: int
    first_miss: _FirstMiss | None


class _Row(msgspec.Struct, frozen=True):
    """What an instance says of one key."""

    tier: str
    reason: str
    detail: str


class Told(NamedTuple):
    """What one instance says of a chunk that the directory does not know."""

    instance: str
    tier: str
    """`l1` where it is there: the directory has not heard of it yet."""
    reason: str
    detail: str


class Miss(NamedTuple):
    """One chunk that nobody is known to have whole."""

    chunk: int
    key: bytes
    """Storage key of its first slice."""
    told: list[Told]
    """The most telling first."""


class Lookup(NamedTuple):
    """One lookup that an instance remembers."""

    instance: str
    document: dict[str, Any]
    places: list[Place]
    """Who has the chunk now that it missed first."""


async def of_request(
    cluster: Cluster, members: Iterable[Member], request_id: str, wait_s: float
) -> tuple[list[Lookup], Answers]:
    """The lookups of a request that instances remember, oldest first."""
    answers = await _ask(cluster, members, {"request_id": request_id}, wait_s)
    lookups: list[tuple[int, Lookup]] = []
    for instance, body in list(answers.told.items()):
        try:
            for document in body.get("lookups", ()):
                told = msgspec.convert(document, _Remembered)
                places: list[Place] = []
                if told.first_miss is not None:
                    key = bytes.fromhex(told.first_miss.storage_key)
                    (places,) = await cluster.directory.holders(tags_of(key))
                lookups.append((told.unix_ms, Lookup(instance, document, places)))
        except ValueError as error:  # msgspec's too
            answers.is_strange(instance, error)
    return [lookup for _, lookup in sorted(lookups, key=lambda one: one[0])], answers


async def of_chunks(
    cluster: Cluster, members: Iterable[Member], found: Placement, wait_s: float
) -> tuple[list[Miss], Answers]:
    """Why the first chunks are missing that nobody is known to have; so many as one command may name."""
    n_slices, keys = found.named.n_slices, found.named.keys
    absent = [index for index, places in enumerate(found.places) if not places]
    absent = absent[: MAX_EXPLAINED_KEYS // n_slices]
    if not absent:
        return [], Answers({}, {})
    step = n_slices * KEY_BYTES
    asked = b"".join(keys[index * step : (index + 1) * step] for index in absent)
    answers = await _ask(cluster, members, {"keys": asked}, wait_s)
    said: dict[str, list[_Row]] = {}
    for instance, body in list(answers.told.items()):
        try:
            said[instance] = msgspec.convert(body.get("keys"), list[_Row])
            if len(said[instance]) != len(asked) // KEY_BYTES:
                raise ValueError(f"{len(said.pop(instance))} keys instead of {len(asked) // KEY_BYTES}")
        except ValueError as error:
            answers.is_strange(instance, error)
    misses = []
    for number, index in enumerate(absent):
        told = []
        for instance, all_rows in said.items():
            # A chunk is there with all of its slices only: the slice that lacks says why.
            rows = all_rows[number * n_slices : (number + 1) * n_slices]
            row = min(rows, key=lambda row: (bool(row.tier), _RANK.get(row.reason, len(_RANK))))
            told.append(Told(instance, row.tier, row.reason, row.detail))
        told.sort(key=lambda one: (not one.tier, _RANK.get(one.reason, len(_RANK)), one.instance))
        misses.append(Miss(index, keys[index * step : index * step + KEY_BYTES], told))
    return misses, answers


async def _ask(
    cluster: Cluster, members: Iterable[Member], argument: dict[str, Any], wait_s: float
) -> Answers:
    """Ask all at once, and wait so long for all together."""
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
        except Denied as denied:
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
