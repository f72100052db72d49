"""What became of each chunk, for explain and the counters: stored, refused, not put, dropped, evicted.

Every part that stores, puts or drops chunks reports to this object, which itself calls no other part.  The rules by
which a reason is chosen, and how much is remembered: policy/misses.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.clock import Clock
from kvstrata.observability.metrics import ServerCounters, count_word
from kvstrata.policy.misses import Explainer, with_advice
from kvstrata.types import MissReason, PoolEvent

_LEFT_BY: dict[int, str] = {
    PoolEvent.CLEARED: "clear",
    PoolEvent.REMOVED: "an evict of the controller",
}
"""The words of explain for the reason why a chunk left L1, if that is not the eviction policy."""


class ChunkHistory:
    """The history of chunks, by storage key. Belongs to the event loop."""

    def __init__(self, explainer: Explainer, counters: ServerCounters, clock: Clock, policy: str) -> None:
        """`policy`: name of the eviction policy of L1."""
        self._explainer = explainer
        self._keys = explainer.keys
        self._counters = counters
        self._clock = clock
        self._policy = policy

    # --- reported by requests -----------------------------------------------------------------------------

    def committed(self, keys: Sequence[bytes]) -> None:
        """Note that these chunks became visible."""
        self._keys.stored(keys)
        self._counters.committed_chunks += len(keys)

    def refused(self, key: bytes, word: str) -> None:
        """Note that a reserve of this chunk was refused; `word` says why."""
        self._keys.note(key, MissReason.REFUSED, with_advice(word), self._clock.unix_ms())

    # --- reported by L2 -----------------------------------------------------------------------------------

    def put_skipped(self, key: bytes, reason: str) -> None:
        """Note that a tier did not get this chunk."""
        count_word(self._counters.put_skipped, reason)
        self._keys.note(key, MissReason.PUT_SKIPPED, reason, self._clock.unix_ms())

    def dropped(self, tier: str, key: bytes) -> None:
        """Note that a tier dropped this chunk to stay below its cap."""
        self._keys.note(key, MissReason.EVICTED, f"the cap of {tier}", self._clock.unix_ms())

    # --- reported by the pool -----------------------------------------------------------------------------

    def left_l1(self, key: bytes, kind: int, now_ms: int) -> None:
        """Note that this chunk left L1; `kind` is the kind of the pool's event."""
        known = self._keys.get(key)
        # A chunk that was not put is missed for that reason: with the put it would be in L2.
        if known is None or known.reason is not MissReason.PUT_SKIPPED:
            self._keys.note(key, MissReason.EVICTED, _LEFT_BY.get(kind, self._policy), now_ms)

    def corrupt(self, key: bytes, now_ms: int) -> None:
        """Note that the checksum of this chunk is wrong."""
        self._keys.note(key, MissReason.CORRUPT, "checksum differs", now_ms)

    def inserted(self, key: bytes) -> None:
        """Note that this chunk entered L1."""
        known = self._keys.get(key)  # a put may have been skipped after the commit that this event reports
        if known is not None and known.reason is not MissReason.PUT_SKIPPED:
            self._keys.stored([key])

    def events_lost(self) -> None:
        """Note that the pool dropped events before they were read."""
        self._keys.lost_events()
