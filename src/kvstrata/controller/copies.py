"""Copies hot prefixes to several instances ahead of time, so that the loss of an instance costs users little.

The leader asks all instances every STEP_S which prefixes their requests share (server/cluster/shared.py), and how often
the prefixes that it already tracks were requested.

1. A prefix's worth is the computing time that it saves per second: requests per second × the time to compute those of
   its chunks that no shorter hot prefix has.
2. The worth per GB determines on how many instances a prefix should be (`wanted`), spread over as many zones as exist.
3. If fewer instances hold it, one more gets it, if possible in a zone and on a host without a copy (`next_place`).  So
   prefixes that were lost with an instance, or by its restart, are copied again from another one.
4. One copy is under way at a time, in pieces of PIECE_S at the allowed rate, so users' reads wait for at most a piece.
5. All state is in memory: the instances know which prefixes are hot, and the directory knows which chunks they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.controller.member import Member, MemberState
from kvstrata.controller.prompts import Named
from kvstrata.controller.pulls import all_arrived, pulls_of
from kvstrata.errors import KvstrataError
from kvstrata.keys.batch import count, nth, part
from kvstrata.native.core import storage_keys
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.rpc.cluster_wire import MAX_ASKED_ENDS, MAX_PEER_KEYS, AskShared, Shared, SharedPrefix
from kvstrata.types import GB, KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.controller.cluster import Cluster

STEP_S = 10.0
ANSWER_S = 5.0
FIRST_WORTH, MORE_WORTH = 0.05, 8.0
"""Worth per GB (seconds of computing saved per second) that justifies a second copy; factor for each further copy.  For
comparison, one more GB in an L1 of 128 GB saves an always busy engine about 0.005."""
LESS = 0.5
"""Hysteresis: an existing copy stays wanted until the worth is below this share of the threshold."""
MEMORY_S = 45.0
"""Time constant of the average rate of requests (after it, a request's weight is 1/e)."""
COLD_S = 1e-3
"""Requests per second below which a prefix is forgotten."""
MAX_SHARE = 8
"""A prefix may take at most 1/MAX_SHARE of an instance's L1."""
PIECE_S = 0.1
RETRY_S = 60.0
"""Time after a failed copy until the same instance may get the prefix again."""
LIFE_S = 600.0
"""Time after which a copy without a use counts as never used."""
MAX_COPIES = 1_024
MAX_HOLDERS = 64
MB = GB >> 10


class Place(NamedTuple):
    """An instance as the source or target of a copy."""

    name: str
    zone: str
    host: str
    has: int = 0
    """Number of the prefix's leading chunks that it holds."""
    load: float = 0.0


def wanted(worth_gb: float, before: int, places: int) -> int:
    """The number of instances, of `places` at most, that should hold a prefix; `before`: the previous number."""
    number, least = 1, FIRST_WORTH
    while number < places and worth_gb >= least * (LESS if number < before else 1.0):
        number, least = number + 1, least * MORE_WORTH
    return min(number, places)


def next_place(holders: Sequence[Place], others: Sequence[Place], number: int) -> Place | None:
    """The instance of `others` that should get a prefix; None if `number` instances in enough zones hold it.

    An instance without a zone counts as being in a zone of its host.
    """
    zones = {_zone(one) for one in holders}
    new = {_zone(one) for one in others} - zones
    if not holders or (len(holders) >= number and not (new and len(zones) < number)):
        return None
    hosts = {one.host for one in holders}
    return min(
        others, key=lambda one: (_zone(one) in zones, one.host in hosts, -one.has, one.load, one.name), default=None
    )  # fmt: skip


def _is_sound(prefix: SharedPrefix) -> bool:
    """Whether the numbers of keys in an instance's report are consistent, and fit into one command."""
    n_slices, (n_chunks, rest) = len(prefix.slices), divmod(len(prefix.chain), KEY_BYTES)
    return (
        not rest
        and prefix.own_chunks <= n_chunks <= MAX_PEER_KEYS // n_slices
        and len(prefix.record_bytes) == n_slices
        and len(prefix.spans) in (0, n_slices)
    )


def _zone(one: Place) -> str:
    return one.zone or f"{one.host}/"


class Hot:
    """A prefix that recent requests have in common."""

    def __init__(self, told: SharedPrefix) -> None:
        self.end = nth(told.chain, count(told.chain) - 1)
        self.named = Named(
            storage_keys(told.root, told.chain, b"".join(told.slices)), len(told.slices), told.root, told.tenant, 0,
            tuple(told.spans), tuple(told.record_bytes),
        )  # fmt: skip
        self.slices = told.slices
        self.chunk_bytes = sum(told.record_bytes)
        self.own_chunks, self.compute_s = told.own_chunks, told.compute_s
        self.requests_s = 0.0
        self.wanted = 1
        self.holders: list[str] = []

    @property
    def worth(self) -> float:
        """Seconds of computing that it saves per second."""
        return self.requests_s * self.compute_s

    @property
    def worth_gb(self) -> float:
        """`worth` per GB."""
        return self.worth * GB / (self.own_chunks * self.chunk_bytes)


class Copy:
    """A copy whose outcome is not known yet."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.arrived_s: float | None = None
        self.is_late = False
        """Whether a request asked for it before it had arrived."""


class Copies(Numbers):
    """Copies hot prefixes. Belongs to the event loop."""

    outcomes = counter(
        "Copies made ahead of requests: `used`, `late` (after the request), `never` used in ten minutes, `failed`.",
        "outcome",
        name="copies",
    )
    copied_bytes = counter("Bytes of copies made ahead of requests.")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.bytes_s = cluster.settings.copies_mb_s * MB
        self.wake = asyncio.Event()
        """Set when an instance is lost."""
        self._hot: dict[bytes, Hot] = {}
        """By `Hot.end`, the key of the prefix's last chunk."""
        self._copies: dict[tuple[bytes, str], Copy] = {}
        """By `Hot.end` and name of the instance."""
        self._failed_s: dict[tuple[bytes, str], float] = {}
        self._log = EventLog("copies")

    async def keep(self) -> None:
        """Run a step every STEP_S, and at once when an instance is lost, until cancelled."""
        while True:
            self.wake.clear()
            ends_s = self._now() + STEP_S
            if self._cluster.leadership.token is None:
                self._hot.clear()
            elif self.bytes_s:
                await self.step(ends_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, ends_s - self._now())):
                    await self.wake.wait()

    async def step(self, ends_s: float) -> None:
        """Ask instances for hot prefixes, and until `ends_s` copy those with too few holders, the worthiest first."""
        await self._ask()
        for hot in sorted(self._hot.values(), key=lambda one: -one.worth_gb):
            arrived: set[str] = set()
            while self._now() < ends_s and (found := await self._lacks(hot, arrived)):
                if not await self._copy(hot, *found, ends_s):
                    break
                arrived.add(found[1].id)

    def page(self) -> dict[str, Any]:
        """The state for operators."""
        rows = sorted(self._hot.values(), key=lambda one: -one.worth)
        return {
            "allowed_bytes_s": round(self.bytes_s),
            "copied_bytes": self.copied_bytes,
            "outcomes": dict(self.outcomes),
            "prefixes": [
                {
                    "end": one.end.hex()[:16], "chunks": one.named.n_chunks,
                    "bytes": one.named.n_chunks * one.chunk_bytes, "requests_s": round(one.requests_s, 3),
                    "saves": round(one.worth, 4), "wanted": one.wanted, "instances": one.holders,
                }
                for one in rows
            ],
        }  # fmt: skip

    # --- what is hot ----------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        cluster, ends = self._cluster, list(self._hot)
        question = AskShared(ends, [self._hot[end].named.n_chunks for end in ends])
        issued = []
        for member in cluster.live():
            with contextlib.suppress(KvstrataError):
                issued.append(cluster.issue(member, question, ttl_s=ANSWER_S))
        await cluster.outcome(issued, ANSWER_S)
        told: dict[str, Shared] = {}
        for one in issued:
            if one.result is not None and one.result.ok:
                try:
                    told[one.member.id] = msgspec.convert(dict(one.result.body), Shared)
                except msgspec.ValidationError as error:
                    self._log.warning("answer_ignored", instance=one.member.id, reason=str(error))
        await self._learn(ends, list(told.values()))
        self._judge(ends, told)

    async def _learn(self, ends: Sequence[bytes], told: Sequence[Shared]) -> None:
        """Update the rates of known prefixes, and add new ones."""
        newest = -math.expm1(-max((one.seconds for one in told), default=0.0) / MEMORY_S)
        for number, end in enumerate(ends):
            hot = self._hot[end]
            now = sum(one.asked[number] / one.seconds for one in told if number < len(one.asked))
            hot.requests_s += newest * (now - hot.requests_s)
            if hot.requests_s < COLD_S:
                del self._hot[end]
        known = self._hot.keys() & set(ends)
        for prefix in (prefix for one in told for prefix in one.prefixes):
            if not _is_sound(prefix):
                continue
            end = nth(prefix.chain, count(prefix.chain) - 1)
            if end not in self._hot:  # on a thread, since the longest prefix takes a millisecond
                self._hot[end] = await asyncio.get_running_loop().run_in_executor(None, Hot, prefix)
            if end not in known:
                self._hot[end].requests_s += prefix.requests_s
        if len(self._hot) > MAX_ASKED_ENDS:
            best = sorted(self._hot, key=lambda end: -self._hot[end].worth_gb)[:MAX_ASKED_ENDS]
            self._hot = {end: self._hot[end] for end in best}

    def _judge(self, ends: Sequence[bytes], told: dict[str, Shared]) -> None:
        """Determine the outcomes of copies."""
        numbers, now_s = {end: number for number, end in enumerate(ends)}, self._now()
        for (end, name), copy in list(self._copies.items()):
            number, of = numbers.get(end, -1), told.get(name)
            if of is not None and 0 <= number < len(of.asked):
                copy.is_late |= copy.arrived_s is None and of.asked[number] > 0
            else:
                number = -1
            if copy.arrived_s is not None and copy.is_late:
                self._ends(end, name, "late")
            elif (
                copy.arrived_s is not None
                and of is not None
                and 0 <= number < len(of.served)
                and of.served[number]
            ):
                self._ends(end, name, "used")
            elif now_s > (copy.arrived_s or copy.begun_s) + LIFE_S:
                self._ends(end, name, "never")

    def _ends(self, end: bytes, name: str, outcome: str) -> None:
        self.outcomes[outcome] += 1
        del self._copies[end, name]

    # --- copying --------------------------------------------------------------------------------------------

    async def _lacks(self, hot: Hot, arrived: set[str]) -> tuple[Member, Member, int] | None:
        """Source and target of the next copy, and the chunks that the target has already; None: enough hold the prefix.

        `arrived`: instances that have just got it, which the directory may not know yet.
        """
        cluster, named = self._cluster, hot.named
        found = await cluster.lookups.hits(
            named.keys, named.spans or (0,) * named.n_slices, None, MAX_HOLDERS
        )
        has = {one.group: one.n_chunks for one in found}
        able = [one for one in cluster.live() if one.readable and one.condition.state == "ready"]
        holders = [one for one in able if one.id in arrived or has.get(one.group, 0) >= named.n_chunks]
        others = [one for one in able if one not in holders and self._may_get(hot, one)]
        hot.holders = sorted(one.id for one in holders)
        hot.wanted = wanted(hot.worth_gb, hot.wanted, len(holders) + len(others))

        def place(one: Member) -> Place:
            load = one.condition.load.used_bytes.get("l1", 0) / max(1, one.told.l1_bytes)
            return Place(one.id, one.told.zone, one.told.host, has.get(one.group, 0), load)

        to = next_place([place(one) for one in holders], [place(one) for one in others], hot.wanted)
        if to is None:
            return None
        source = min(holders, key=lambda one: (one.condition.load.peer_sending_bytes, one.id))
        target = next(one for one in others if one.id == to.name)
        return source, target, 0 if any(named.spans) else to.has

    def _may_get(self, hot: Hot, member: Member) -> bool:
        """Whether an instance's engines can use the prefix, it fits into L1, and no copy has failed recently."""
        n_bytes = hot.named.n_chunks * hot.chunk_bytes
        retry_s = self._failed_s.get((hot.end, member.id), float("-inf")) + RETRY_S
        return (
            any(kind.slices == hot.slices for kind in member.condition.models)
            and n_bytes * MAX_SHARE <= member.told.l1_bytes
            and self._now() >= retry_s
        )

    async def _copy(self, hot: Hot, source: Member, target: Member, has: int, ends_s: float) -> bool:
        """Copy a prefix until `ends_s`; the next step continues. Returns whether all of it has arrived."""
        cluster, named, key = self._cluster, hot.named, (hot.end, target.id)
        copy = self._copies.setdefault(key, Copy(self._now()))
        while len(self._copies) > MAX_COPIES:
            self._copies.pop(next(iter(self._copies)))
        most = int(PIECE_S * self.bytes_s / hot.chunk_bytes) * named.n_slices
        keys = part(named.keys, has, named.n_chunks, named.n_slices)
        for pull in pulls_of(named._replace(keys=keys), source, most):
            begun_s = self._now()
            if begun_s >= ends_s or target.state is not MemberState.LIVE:
                return False
            try:
                command = cluster.issue(target, pull, ttl_s=ends_s - begun_s + ANSWER_S, quiet=True)
            except KvstrataError:
                return False
            await command.ended.wait()
            result = command.result
            loaded = result.body.get("loaded", 0) if result is not None else 0
            n_bytes = loaded * hot.chunk_bytes if isinstance(loaded, int) else 0
            self.copied_bytes += n_bytes
            await asyncio.sleep(begun_s + n_bytes / self.bytes_s - self._now())
            if not all_arrived(command):
                self._failed(key, str(result.body.get("reason", "")) or result.message if result else "")
                return False
        copy.arrived_s = self._now()
        cluster.journal.say(
            "copied", target.id, source=source.id, chunks=named.n_chunks, held_by=len(hot.holders),
            wanted=hot.wanted, saves=round(hot.worth, 4), took_s=round(copy.arrived_s - copy.begun_s, 3),
        )  # fmt: skip
        return True

    def _failed(self, key: tuple[bytes, str], why: str) -> None:
        now_s = self._now()
        self._failed_s = {one: at_s for one, at_s in self._failed_s.items() if now_s < at_s + RETRY_S}
        self._failed_s[key] = now_s
        self._ends(*key, "failed")
        self._log.info("not_copied", instance=key[1], reason=why)

    def _now(self) -> float:
        return self._cluster.clock.monotonic_s()
