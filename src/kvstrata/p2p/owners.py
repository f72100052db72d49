"""A reader's decisions about its peers: which owners to ask, and for how much at a time. No I/O, no clock.

An owner's breaker opens at the first failure, for 1 s, and at each further failure for twice as long, up to 30 s.  So a
bad owner costs one deadline each time, not one for each request.  A window bounds the bytes under way from an owner.
The window begins small and grows by the bytes that were read without error, so that a newly started instance does not
get all requests of all readers at once.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvstrata.rpc.cluster_wire import Owner
from kvstrata.tiers.breaker import Breaker
from kvstrata.types import KEY_BYTES

MB = 1 << 20


class OwnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the requests to one owner."""

    first_window_bytes: int = 64 * MB
    largest_window_bytes: int = 8 << 30
    open_s: float = 1.0
    max_open_s: float = 30.0
    max_owners: int = 1024
    """Maximum number of owners that are remembered."""


LOAD_STEP_BYTES = 64 * MB
"""An owner's bytes under way are compared with those of others in whole steps of this size."""
WORTH = 7 / 8
"""Owners whose prefix is shorter than this share of the longest one come last, however lightly loaded they are."""


class _Record:
    """The breaker and the window of one owner."""

    __slots__ = ("breaker", "window_bytes")

    def __init__(self, limits: OwnerLimits) -> None:
        self.breaker = Breaker(1, limits.open_s, limits.max_open_s)
        self.window_bytes = limits.first_window_bytes


class OwnerBook:
    """The owners that were asked, by instance id. The caller passes the time."""

    def __init__(self, limits: OwnerLimits, under_way_bytes: Callable[[str], int]) -> None:
        """`under_way_bytes(instance)`: bytes that are leased from an owner and are not yet read, replaced or lost."""
        self._limits = limits
        self._under_way_bytes = under_way_bytes
        self._records: collections.OrderedDict[str, _Record] = collections.OrderedDict()

    def in_order(self, owners: Sequence[Owner], now_s: float) -> list[Owner]:
        """The owners that may be asked now, best first.

        The directory's order (prefix length, zone, load) stands, but among owners with prefixes of about the same
        length, confirmed ones come first, and then those from which we read less.
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
        """The longest prefix, in keys, of the owners that must not be asked now because their window is full; or 0."""
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

    def skipped(self, owners: Iterable[Owner], now_s: float) -> int:
        """The longest prefix, in keys, of the owners that must not be asked now because they failed lately; or 0."""
        return max(
            (
                owner.n_keys
                for owner in owners
                if owner.peer_endpoint and not self._record(owner.instance).breaker.would_admit(now_s)
            ),
            default=0,
        )

    def admit(self, instance: str, now_s: float) -> bool:
        """Whether this owner may be asked now; if so, the caller asks it and then reports `well` or `failed`."""
        return self._record(instance).breaker.admit(now_s)

    def well(self, instance: str, now_s: float) -> None:
        """The owner answered."""
        self._record(instance).breaker.ended(True, now_s)

    def failed(self, instance: str, now_s: float) -> None:
        """The owner did not answer, or sent wrong bytes: skip it for a while, and begin again with the first window."""
        record = self._record(instance)
        record.breaker.ended(False, now_s)
        record.window_bytes = self._limits.first_window_bytes

    def read(self, instance: str, n_bytes: int) -> None:
        """Count bytes that were read without error, which widens the window."""
        record = self._record(instance)
        record.window_bytes = min(record.window_bytes + n_bytes, self._limits.largest_window_bytes)

    def states(self) -> dict[str, int]:
        """Counts for status pages."""
        closed = sum(record.breaker.would_admit(float("-inf")) for record in self._records.values())
        return {"owners": len(self._records), "owners_skipped": len(self._records) - closed}

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
    """A run of keys, identified by its first key, last key and length.

    These suffice, since a storage key stands for all tokens before it.  Of single keys, `first` is a digest of all.
    """

    first: bytes
    last: bytes
    n_keys: int


def question_of(keys: Sequence[bytes], *, each: bool = False) -> Question:
    """The question for this run of keys, or with `each` for these single keys. REQUIRES at least one key."""
    first = hashlib.blake2b(b"".join(keys), digest_size=KEY_BYTES).digest() if each else keys[0]
    return Question(first, keys[-1], len(keys))


class DirectoryCache:
    """The directory's recent answers, bounded.

    The answer that nobody has a key is reused for every question that begins with that key.
    """

    def __init__(self, *, ttl_s: float, negative_ttl_s: float, max_questions: int = 16_384) -> None:
        self._ttl_s = ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._max = max_questions
        self._known: collections.OrderedDict[Question, tuple[float, list[Owner]]] = collections.OrderedDict()
        self._nobody: collections.OrderedDict[bytes, float] = collections.OrderedDict()

    def recall(self, question: Question, now_s: float) -> list[Owner] | None:
        """The owners that a recent answer named, empty if nobody has the first key; None: ask the directory."""
        if self._nobody.get(question.first, now_s) > now_s:
            return []
        until_s, owners = self._known.get(question, (now_s, []))
        return owners if until_s > now_s else None

    def learn(self, question: Question, owners: list[Owner], asked_s: float) -> None:
        """Remember the answer to a question that was asked at `asked_s`."""
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
        """Forget the answer: an owner did not have the chunks that it promised."""
        self._known.pop(question, None)
