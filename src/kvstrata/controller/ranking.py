"""Ranks the owners to which an instance is sent for chunks that it lacks.

The longest prefix ranks first; ties go to owners with confirmed chunks, then to the asker's zone, then to idle owners.
"""

from __future__ import annotations

import time

from kvstrata.clock import Clock
from kvstrata.cluster.lookups import Found, Lookups
from kvstrata.controller.member import Member
from kvstrata.controller.members import Members
from kvstrata.observability.numbers import Numbers, counter, histogram
from kvstrata.rpc.cluster_wire import MAX_OWNERS, TAG_BYTES, Owner, Where

SLOW_START_S = 30.0
"""Age of a member from which its load counts as reported; a younger one's load is increased by up to one half."""
CANDIDATES = 2 * MAX_OWNERS


class Ranking(Numbers):
    """Answers instances' `Where` requests. Belongs to the event loop."""

    seconds = histogram("Time to answer an instance's lookup.", name="lookup_seconds")
    hits = counter("Lookups of instances that found an owner.", name="lookup_hits")

    def __init__(self, clock: Clock, members: Members, lookups: Lookups) -> None:
        self._clock = clock
        self._members = members
        self._lookups = lookups
        self._referred: dict[str, int] = {}
        """By instance: number of readers sent to it since its last condition."""
        self.keys = 0
        """Number of tags in all requests."""

    async def where(self, told: Where) -> list[Owner]:
        """The owners of the longest prefixes or, for single keys, of the earliest keys; best first."""
        began_s, asker = time.perf_counter(), self._members.get(told.asker)
        group = asker.group if asker is not None else None
        if told.each:
            found = await self._lookups.nearest(told.tags, group, CANDIDATES, promised=told.promised)
        else:
            found = await self._lookups.longest(
                told.tags, told.n_slices, group, CANDIDATES, on_disks=told.on_disks
            )
        return self._ranked(told, asker, found, began_s)

    def named(self, told: Where) -> list[Owner]:
        """The instance that the request names, if peers may read it now; else empty."""
        member = self._members.get(told.named)
        return [owner_of(member, 0)] if member is not None and member.readable else []

    def forget_referred(self, instance: str) -> None:
        """Forget the readers sent to an instance, since it has reported its load or is no longer a member."""
        self._referred.pop(instance, None)

    def _ranked(self, told: Where, asker: Member | None, found: list[Found], began_s: float) -> list[Owner]:
        now_s = self._clock.monotonic_s()
        zone = asker.told.zone if asker is not None else ""
        rows: list[tuple[tuple[int, bool, bool, float], Member, int]] = []
        for group, n_chunks in found:
            member = self._members.of_group(group)
            if member is None or not member.readable or member.id == told.asker:
                continue
            load = member.condition.load.peer_sending_bytes / max(1, member.told.l1_bytes // 4)
            load += 0.01 * self._referred.get(member.id, 0)
            load += 0.5 * max(0.0, 1.0 - (now_s - member.joined_s) / SLOW_START_S)
            far = bool(zone) and member.told.zone != zone
            rows.append(((-n_chunks, not member.confirmed, far, load), member, n_chunks))
        rows.sort(key=lambda row: row[0])
        owners = [
            owner_of(member, n_chunks * told.n_slices) for _, member, n_chunks in rows[: told.max_owners]
        ]
        if owners:
            self._referred[owners[0].instance] = self._referred.get(owners[0].instance, 0) + 1
        self.hits += bool(owners)
        self.keys += len(told.tags) // TAG_BYTES
        self.seconds.add(time.perf_counter() - began_s)
        return owners


def owner_of(member: Member, n_keys: int) -> Owner:
    """The record by which peers reach a member; `n_keys`: the leading keys that it has."""
    return Owner(
        member.id, member.incarnation, member.told.control_endpoint, n_keys, member.confirmed, member.key
    )
