"""The lengths of records that this process has put or found; see invariant 4 of the adapter."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping, Sequence

from kvstrata.storage.base import Found, Presence, Usage

KNOWN_LENGTHS = 1 << 17


class KnownRecords:
    """The lengths by key: at most KNOWN_LENGTHS, the oldest are forgotten first. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[bytes, Found] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def answers(self, keys: Sequence[bytes]) -> list[Found | None]:
        """For each key the answer for a record whose length is known, else None. Takes no lock."""
        return [*map(self._known.get, keys)]

    def usage(self) -> Usage:
        """Bytes and number of the known records."""
        with self._lock:
            return Usage(self._bytes, 0, len(self._known))

    def learn(self, largest_bytes: int, lengths: Mapping[bytes, int]) -> None:
        """Remember lengths of stored records; a record longer than `largest_bytes` counts as absent."""
        with self._lock:
            for key, length in lengths.items():
                self._drop(key)
                if length <= largest_bytes:
                    self._known[key] = _present(length)
                    self._bytes += length
            if len(self._known) > KNOWN_LENGTHS:
                # Forget some more at once: to find its oldest key, a dict steps over every entry removed before.
                too_many = len(self._known) - KNOWN_LENGTHS + KNOWN_LENGTHS // 16
                for key in list(itertools.islice(self._known, too_many)):
                    self._drop(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget records that may have changed, or are gone."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        """Forget all records."""
        with self._lock:
            self._known.clear()
            self._bytes = 0

    def _drop(self, key: bytes) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._bytes -= known.record_bytes


@functools.lru_cache(maxsize=64)
def _present(record_bytes: int) -> Found:
    """The answer for a record of this length; cached, since nearly all records have the same length."""
    return Found(Presence.PRESENT, record_bytes)
