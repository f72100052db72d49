"""Chooses the owners that a reader asks for keys, by the directory and by the outcomes of earlier requests.

An owner's breaker opens at the first failure, for 1 s, and at each further failure for twice as long, up to 30 s.  So a
bad owner costs one deadline each time, not one for each request.

The directory's answer is reused for a moment for the same keys, and by loads of any of these keys: it is only a hint
where to ask.  Its answer that no instance has a key applies to every run of keys that begins with that key.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.p2p.settings import OwnerLimits, PeerSettings
from kvstrata.rpc.cluster_wire import TAG_BYTES, Owner, Where, WhereReply, tags_of
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import Links
from kvstrata.tiers.base import Ask
from kvstrata.tiers.breaker import Breaker
from kvstrata.tiers.work import Work

log = logging.getLogger(__name__)

CONTROLLER_MAX_OPEN_S = 4.0
"""Maximum pause before a controller that did not answer is asked again."""
MAX_WARNINGS = 256
COUNTED = (
    "asked_directory", "recalled", "reads", "read_records", "read_bytes", "read_failures", "unsound_records", "hellos",
    "owners", "owners_skipped", "named_reads", "named_refused",
)  # fmt: skip
WORTH = 7 / 8
"""Owners whose prefix is shorter than this share of the longest one come last, however lightly loaded they are."""
SLOW, RATED_BYTES, RATED_S = 1 / 2, 1 << 20, 60.0
"""Owners whose reads of RATED_BYTES or more had less than SLOW times the best owner's rate rank behind the others for
RATED_S; then they are tried again."""
REMEMBERED_KEYS = 32_768
"""Number of keys in each of the two halves, newer and older, of the remembered answers."""
_OWNER = msgspec.msgpack.Decoder(Owner)


class Shared:
    """Objects that the parts of one tier share. Belongs to the event loop."""

    def __init__(self, name: str, settings: PeerSettings, clock: Clock, instance_id: str) -> None:
        """`name` of the tier; `instance_id` of this instance."""
        self.name = name
        self.settings = settings
        self.counts = collections.Counter(dict.fromkeys(COUNTED, 0))
        self.work = Work(name)
        self.now_s = clock.monotonic_s
        self.instance_id = instance_id
        self._warned: set[str] = set()

    def warn_once(self, what: str) -> None:
        """Log a warning, each text only once, and at most MAX_WARNINGS texts."""
        if what not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(what)
            log.warning("%s: %s", self.name, what)


class OwnerBook:
    """The breakers of the owners that were asked, by instance id. The caller passes the time."""

    def __init__(self, limits: OwnerLimits, under_way: Callable[[str], int]) -> None:
        """`under_way(instance)`: the number of reads from an owner that have not ended."""
        self._limits = limits
        self._under_way = under_way
        self._breakers: collections.OrderedDict[str, Breaker] = collections.OrderedDict()
        self._rates: dict[str, tuple[float, float]] = {}
        """For owners with a breaker: recent rate in bytes per second, and the time of its measurement."""

    def in_order(self, owners: Sequence[Owner], now_s: float) -> list[Owner]:
        """The owners that may be asked now, best first.

        The directory's order (prefix length, zone, load) is kept, except that among owners with prefixes of about the
        same length confirmed ones come first, then those with fast reads, then those from which we read less.
        """
        longest = max((owner.n_keys for owner in owners), default=0)
        rates = {
            owner.instance: rated[0]
            for owner in owners
            if (rated := self._rates.get(owner.instance)) is not None and now_s < rated[1] + RATED_S
        }
        slow = SLOW * max(rates.values(), default=0.0)

        def rank(owner: Owner) -> tuple[bool, bool, bool, int]:
            is_slow = rates.get(owner.instance, slow) < slow
            return (
                owner.n_keys < WORTH * longest,
                not owner.confirmed,
                is_slow,
                self._under_way(owner.instance),
            )

        return sorted((owner for owner in owners if not self.is_skipped(owner, now_s)), key=rank)

    def is_skipped(self, owner: Owner, now_s: float) -> bool:
        """Whether an owner must not be asked now because it failed recently."""
        return not self._breaker(owner.instance).would_admit(now_s)

    def admit(self, instance: str, now_s: float) -> bool:
        """Whether this owner may be asked now; if so, the caller asks it and then reports `ended`."""
        return self._breaker(instance).admit(now_s)

    def ended(self, instance: str, now_s: float, *, well: bool) -> None:
        """Report the end of a request. `well` false: the owner did not answer, or sent wrong bytes; it is skipped."""
        self._breaker(instance).ended(well, now_s)

    def measured(self, instance: str, n_bytes: int, began_s: float, now_s: float) -> None:
        """Record a read of `n_bytes` from this owner."""
        if n_bytes >= RATED_BYTES and instance in self._breakers:
            rate = n_bytes / max(1e-6, now_s - began_s)
            before, at_s = self._rates.get(instance, (rate, now_s))
            weight = 0.25 if now_s < at_s + RATED_S else 1.0
            self._rates[instance] = before + weight * (rate - before), now_s

    def states(self) -> dict[str, int]:
        """Numbers of owners for status pages."""
        closed = sum(breaker.would_admit(float("-inf")) for breaker in self._breakers.values())
        return {"owners": len(self._breakers), "owners_skipped": len(self._breakers) - closed}

    def _breaker(self, instance: str) -> Breaker:
        breaker = self._breakers.get(instance)
        if breaker is None:
            breaker = self._breakers[instance] = Breaker(1, self._limits.open_s, self._limits.max_open_s)
            if len(self._breakers) > self._limits.max_owners:
                self._rates.pop(self._breakers.popitem(last=False)[0], None)
        else:
            self._breakers.move_to_end(instance)
        return breaker


class Controllers:
    """The controllers, which are asked in their order until one answers. Belongs to the event loop."""

    def __init__(self, shared: Shared, links: Links, keys: ClusterKeys) -> None:
        """Raises Unavailable if one of their URLs is not an endpoint."""
        self._shared = shared
        self._asked = [
            (links.ask(url, keys=keys), Breaker(1, 0.25, CONTROLLER_MAX_OPEN_S))
            for url in shared.settings.controllers
        ]

    def close(self) -> None:
        """Stop asking, and close the links."""
        for controller, _ in self._asked:
            controller.close()

    async def ask(self, request: Where, ends_s: float) -> WhereReply | None:
        """The first valid answer of a controller; None: no controller answered in time."""
        n_keys = len(request.tags) // TAG_BYTES
        for controller, breaker in self._asked:
            left_s = ends_s - self._shared.now_s()
            if left_s <= 0 or not breaker.admit(self._shared.now_s()):
                continue
            self._shared.counts["asked_directory"] += 1
            well = True
            try:
                reply = await controller.ask(request, WhereReply, left_s)
                if len(reply.owners) > request.max_owners or any(one.n_keys > n_keys for one in reply.owners):
                    raise Unavailable("its answer names more owners or keys than were asked for")
                return reply
            except Unavailable as error:
                well = False
                self._shared.warn_once(f"a controller does not answer which instances have chunks: {error}")
            except ClusterFailure as refused:
                self._shared.warn_once(f"the controller refuses lookups: {refused}")
            finally:
                breaker.ended(well, self._shared.now_s())
        return None


class Answer(NamedTuple):
    """The directory's answer about a run of keys."""

    keys: tuple[bytes, int]
    """The last key and the length of the run, which identify it together with the first key."""
    owners: list[Owner]
    asked_s: float


class Finder:
    """Asks the directory for one tier, and remembers its answers."""

    def __init__(self, shared: Shared, controllers: Controllers, *, on_disks: bool = False) -> None:
        """`on_disks`: chunks in owners' own L2 tiers count too."""
        self._shared = shared
        self._controllers, self._on_disks = controllers, on_disks
        self._newer: dict[bytes, Answer] = {}
        self._older: dict[bytes, Answer] = {}
        """Key → the last answer that named owners."""
        self._nobody: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        """First key of a run → time until which it is assumed that no instance has it."""
        self._asking: dict[tuple[bytes, bytes, int, bool], asyncio.Task[list[Owner] | None]] = {}

    def named(self, ask: Ask, n_keys: int) -> list[Owner]:
        """The owner that a command named for these keys, assumed to have them all; empty without one."""
        if not ask.owner:
            return []
        return [msgspec.structs.replace(_OWNER.decode(ask.owner), n_keys=n_keys, confirmed=True)]

    def hint(self, key: bytes) -> list[Owner] | None:
        """The owners that an answer named for a run with this key in it; None: it is in no remembered run."""
        answer = self._newer.get(key) or self._older.get(key)
        return None if answer is None else answer.owners

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget the answers about these keys: an owner did not have the chunks that it was named for."""
        for key in keys:
            self._newer.pop(key, None)
            self._older.pop(key, None)

    async def owners(self, keys: Sequence[bytes], ask: Ask, ends_s: float) -> list[Owner] | None:
        """The owners of a prefix of this run, or with `ask.each` of some of these keys; None: no controller answered.

        Callers with the same request share one task, which runs to its end even if a call is cancelled.
        """
        now_s, settings = self._shared.now_s(), self._shared.settings
        run = keys[-1], len(keys)
        if self._nobody.get(keys[0], now_s) > now_s and not ask.each:
            return []
        known = self._newer.get(keys[0]) or self._older.get(keys[0])
        if known is not None and known.keys == run and now_s < known.asked_s + settings.remember_ms / 1000:
            self._shared.counts["recalled"] += 1
            return known.owners
        question = keys[0], *run, ask.each
        task = self._asking.get(question)
        if task is None:
            task = self._shared.work.start(self._ask(keys, ask.each, ends_s), f"{self._shared.name}-ask")
            self._asking[question] = task
            task.add_done_callback(lambda _: self._asking.pop(question, None))
        return await asyncio.shield(task)

    async def _ask(self, keys: Sequence[bytes], each: bool, ends_s: float) -> list[Owner] | None:
        asked_s = self._shared.now_s()
        request = Where(
            0, self._shared.instance_id, tags_of(b"".join(keys)), 1, each=each, on_disks=self._on_disks
        )
        reply = await self._controllers.ask(request, ends_s)
        if reply is None:
            return None
        owners = [
            owner
            for owner in reply.owners
            if owner.instance != self._shared.instance_id and owner.peer_endpoint and owner.n_keys > 0
        ]
        self._learn(keys, owners, asked_s)
        return owners

    def _learn(self, keys: Sequence[bytes], owners: list[Owner], asked_s: float) -> None:
        if not owners:
            self._nobody[keys[0]] = asked_s + self._shared.settings.remember_none_ms / 1000
            if len(self._nobody) > REMEMBERED_KEYS:
                self._nobody.popitem(last=False)
            return
        self._nobody.pop(keys[0], None)
        if len(self._newer) + len(keys) > REMEMBERED_KEYS:
            self._newer, self._older = {}, self._newer
        self._newer.update(dict.fromkeys(keys, Answer((keys[-1], len(keys)), owners, asked_s)))
