"""What a reader decides about its peers: whom to ask, how much at a time, and which leases it has. No I/O, no clock.

An owner's breaker opens at its first failure, for a second, then twice as long each time, so that one bad owner costs
one deadline.  What is under way from an owner is bounded by a window that begins small and doubles with what was read
well: an instance that has just begun is not asked for everything at once by everybody.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvstrata.rpc.cluster_wire import Owner
from kvstrata.storage.wrap.deadline import Breaker
from kvstrata.types import Extent

MB = 1 << 20


class OwnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what is asked of one owner."""

    first_window_bytes: int = 64 * MB
    largest_window_bytes: int = 8 << 30
    open_s: float = 1.0
    max_open_s: float = 30.0
    max_owners: int = 1024
    """Owners that are remembered."""


LOAD_STEP_BYTES = 64 * MB
"""Owners with less difference than that under way count as equally loaded by us."""
WORTH = 7 / 8
"""An owner whose beginning is shorter than that share of the longest one is not preferred for its load."""


class _Record:
    """How one owner has behaved."""

    __slots__ = ("breaker", "window_bytes")

    def __init__(self, limits: OwnerLimits) -> None:
        self.breaker = Breaker(1, limits.open_s, limits.max_open_s)
        self.window_bytes = limits.first_window_bytes


class OwnerBook:
    """Every owner that was asked, by instance id. The caller brings the time."""

    def __init__(self, limits: OwnerLimits, under_way_bytes: Callable[[str], int]) -> None:
        """`under_way_bytes(instance)`: what is leased from an owner and not read to its end."""
        self._limits = limits
        self._under_way_bytes = under_way_bytes
        self._records: collections.OrderedDict[str, _Record] = collections.OrderedDict()

    def in_order(self, owners: Sequence[Owner], now_s: float) -> list[Owner]:
        """Those that may be asked now, best first.

        The directory's order (length, zone, load) stands, but of beginnings about as long, confirmed ones come
        before unconfirmed ones, and those from which we read less before those from which we read more.
        """
        longest = max((owner.n_keys for owner in owners), default=0)

        def rank(place: int) -> tuple[bool, bool, int, int]:
            owner = owners[place]
            under_way = self._under_way_bytes(owner.instance)
            return (
                owner.n_keys < WORTH * longest,
                not owner.confirmed,
                under_way // LOAD_STEP_BYTES,
                place,
            )

        may = [place for place, owner in enumerate(owners) if owner.n_keys > 0 and owner.peer_endpoint]
        return [owners[place] for place in sorted(may, key=rank) if self._may(owners[place].instance, now_s)]

    def crowded(self, owners: Sequence[Owner], now_s: float) -> int:
        """Leading keys of an owner that is asked for no more until we have read what is under way; 0: there is none."""
        return max(
            (
                owner.n_keys
                for owner in owners
                if owner.peer_endpoint
                and self._record(owner.instance).breaker.would_admit(now_s)
                and not self._may(owner.instance, now_s)
            ),
            default=0,
        )

    def admit(self, instance: str, now_s: float) -> bool:
        """Whether to ask this owner now; each yes ends in `well` or `failed`."""
        return self._record(instance).breaker.admit(now_s)

    def well(self, instance: str, now_s: float) -> None:
        """It answered."""
        self._record(instance).breaker.ended(True, now_s)

    def failed(self, instance: str, now_s: float) -> None:
        """It did not answer, or what it sent was wrong: it is let alone for a while, and begins anew then."""
        record = self._record(instance)
        record.breaker.ended(False, now_s)
        record.window_bytes = self._limits.first_window_bytes

    def read(self, instance: str, n_bytes: int) -> None:
        """So many bytes were read well."""
        record = self._record(instance)
        record.window_bytes = min(record.window_bytes + n_bytes, self._limits.largest_window_bytes)

    def forgive(self) -> None:
        """What failed did so for reasons of ours that are over: every owner may be asked again."""
        for record in self._records.values():
            record.breaker = Breaker(1, self._limits.open_s, self._limits.max_open_s)

    def states(self) -> dict[str, int]:
        """Counts for status pages."""
        closed = sum(record.breaker.would_admit(float("-inf")) for record in self._records.values())
        return {"owners": len(self._records), "owners_let_alone": len(self._records) - closed}

    def _may(self, instance: str, now_s: float) -> bool:
        record = self._record(instance)
        return self._under_way_bytes(instance) < record.window_bytes and record.breaker.would_admit(now_s)

    def _record(self, instance: str) -> _Record:
        record = self._records.get(instance)
        if record is None:
            record = self._records[instance] = _Record(self._limits)
            if len(self._records) > self._limits.max_owners:
                self._records.popitem(last=False)
        else:
            self._records.move_to_end(instance)
        return record


class Question(NamedTuple):
    """Names a run of keys: a storage key stands for all tokens before it, so the ends and the number tell."""

    first: bytes
    last: bytes
    n_keys: int


def question_of(keys: Sequence[bytes]) -> Question:
    """REQUIRES at least one key."""
    return Question(keys[0], keys[-1], len(keys))


class DirectoryCache:
    """What the directory said a moment ago, bounded. That nobody has the first key holds for all that begin with it."""

    def __init__(self, *, ttl_s: float, negative_ttl_s: float, max_questions: int = 16_384) -> None:
        self._ttl_s = ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._max = max_questions
        self._known: collections.OrderedDict[Question, tuple[float, list[Owner]]] = collections.OrderedDict()
        self._nobody: collections.OrderedDict[bytes, float] = collections.OrderedDict()

    def recall(self, question: Question, now_s: float) -> list[Owner] | None:
        """Owners, none where nobody has the first key; None: ask."""
        if self._nobody.get(question.first, now_s) > now_s:
            return []
        until_s, owners = self._known.get(question, (now_s, []))
        return owners if until_s > now_s else None

    def learn(self, question: Question, owners: list[Owner], asked_s: float) -> None:
        """The answer to a question that was asked then."""
        if owners:
            self._known[question] = (asked_s + self._ttl_s, owners)
            self._nobody.pop(question.first, None)
        else:
            self._nobody[question.first] = asked_s + self._negative_ttl_s
            self._known.pop(question, None)
        for kept in (self._known, self._nobody):
            if len(kept) > self._max:
                kept.popitem(last=False)

    def wrong(self, question: Question) -> None:
        """An owner did not have what the answer said: ask anew."""
        self._known.pop(question, None)


class NamedOwners:
    """Owners that were named for keys, bounded: of more, the oldest are forgotten."""

    def __init__(self, *, max_keys: int = 65_536) -> None:
        self._max_keys = max_keys
        self._owners: dict[bytes, Owner] = {}

    def name(self, keys: Iterable[bytes], owner: Owner | None) -> None:
        """From now on this one; None: whoever has them."""
        for key in keys:
            self._owners.pop(key, None)
            if owner is not None:
                self._owners[key] = owner
        for key in list(itertools.islice(self._owners, max(0, len(self._owners) - self._max_keys))):
            del self._owners[key]

    def of(self, key: bytes) -> Owner | None:
        """Whom to ask for what begins with this key."""
        return self._owners.get(key)


class Lease:
    """Records that an owner keeps for us, as far as they are not read yet."""

    def __init__(
        self, owner: str, number: int, epoch: int, extents: dict[bytes, Extent], until_s: float, now_s: float
    ) -> None:
        self.owner = owner
        self.number = number
        self.epoch = epoch
        """Incarnation of the owner that granted it."""
        self.unread = extents
        self.until_s = until_s
        """It stands at least so long, by our clock."""
        self.used_s = now_s
        self.readers = 0
        """Batches that are being read."""

    @property
    def over(self) -> bool:
        """Nobody reads and nothing is left to read."""
        return not self.readers and not self.unread


class LeaseBook:
    """The leases of this reader; of a key that is leased twice the later one counts. The caller brings the time."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Lease] = {}
        self._leases: dict[tuple[str, int, int], Lease] = {}
        self._ending: set[Lease] = set()
        """Over, and their owners have not heard it yet."""
        self._bytes: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """Leases that take room at their owners."""
        return len(self._leases) + len(self._ending)

    def add(self, lease: Lease) -> list[Lease]:
        """Take a lease in; returns those that are over because of it."""
        self._leases[lease.owner, lease.epoch, lease.number] = lease
        replaced = set()
        for key in lease.unread:
            older = self._by_key.get(key)
            if older is not None:
                self._bytes[older.owner] -= older.unread.pop(key).length_bytes
                replaced.add(older)
            self._by_key[key] = lease
            self._bytes[lease.owner] += lease.unread[key].length_bytes
        return [older for older in replaced if older.over and self._end(older)]

    def under_way_bytes(self, owner: str) -> int:
        """Leased from an owner and not read to its end."""
        return self._bytes[owner]

    def leading(self, keys: Iterable[bytes], until_s: float) -> list[Extent]:
        """Extents of the leading keys whose leases stand until then."""

        def standing(key: bytes) -> Extent | None:
            lease = self._by_key.get(key)
            return lease.unread[key] if lease is not None and lease.until_s >= until_s else None

        found = map(standing, keys)
        return [extent for extent in itertools.takewhile(lambda one: one is not None, found) if extent]

    def take(self, keys: Sequence[bytes], now_s: float) -> dict[Lease, list[tuple[int, Extent]]]:
        """By lease: places of keys that it holds now, and where they lie. They are being read, until `read`."""
        taken: dict[Lease, list[tuple[int, Extent]]] = {}
        for place, key in enumerate(keys):
            lease = self._by_key.get(key)
            if lease is not None and lease.until_s > now_s:
                del self._by_key[key]
                taken.setdefault(lease, []).append((place, lease.unread.pop(key)))
        for lease in taken:
            lease.readers += 1
            lease.used_s = now_s
        return taken

    def read(self, lease: Lease, n_bytes: int, now_s: float) -> bool:
        """A batch of so many bytes was read, well or not; True: the lease is over, and forgotten here."""
        self._bytes[lease.owner] -= n_bytes
        lease.readers -= 1
        lease.used_s = now_s
        return lease.over and self._end(lease)

    def ended(self, lease: Lease) -> None:
        """Its owner has heard that it is over, or will not hear it from us."""
        self._ending.discard(lease)

    def renewed(self, lease: Lease, until_s: float) -> None:
        """The owner keeps it longer."""
        lease.until_s = max(lease.until_s, until_s)

    def lost(self, lease: Lease) -> None:
        """The owner does not keep it any more."""
        self._forget_keys(lease)
        self._remove(lease)

    def lost_all(self, owner: str) -> None:
        """The owner is gone, or another process."""
        for lease in [lease for lease in self._leases.values() if lease.owner == owner]:
            self.lost(lease)

    def unused(self, now_s: float, idle_s: float) -> list[Lease]:
        """Take out the leases that nobody has read of for so long, or that have run out: they are over."""
        idle = [
            lease
            for lease in self._leases.values()
            if not lease.readers and (lease.used_s + idle_s <= now_s or lease.until_s <= now_s)
        ]
        for lease in idle:
            self._forget_keys(lease)
            self._end(lease)
        return idle

    def all(self) -> list[Lease]:
        """Every lease."""
        return list(self._leases.values())

    def _forget_keys(self, lease: Lease) -> None:
        for key, extent in lease.unread.items():
            del self._by_key[key]
            self._bytes[lease.owner] -= extent.length_bytes
        lease.unread.clear()

    def _end(self, lease: Lease) -> bool:
        """It is over, and takes room until `ended`; False: it was taken out before."""
        removed = self._remove(lease)
        if removed:
            self._ending.add(lease)
        return removed

    def _remove(self, lease: Lease) -> bool:
        return self._leases.pop((lease.owner, lease.epoch, lease.number), None) is not None


class Pacer:
    """Bounds bytes per second: each read begins when the ones before it have had their time. 0: no bound."""

    BURST_S = 0.25

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = float("-inf")

    def delay_s(self, now_s: float) -> float:
        """How long a read that came now would wait."""
        return max(0.0, self._free_s - now_s - self.BURST_S) if self._bytes_per_s else 0.0

    def take(self, n_bytes: int, now_s: float) -> float:
        """Count a read and return how long it has to wait."""
        if not self._bytes_per_s:
            return 0.0
        delay_s = self.delay_s(now_s)
        self._free_s = max(self._free_s, now_s) + n_bytes / self._bytes_per_s
        return delay_s
