"""Explain: what a recent request hit, and why a chunk is not in L1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.keys.batch import split
from kvstrata.native.pool import Pool
from kvstrata.policy.misses import Explainer
from kvstrata.server.pool_events import PoolEvents
from kvstrata.server.requests.leases import InFlight

MOST_RECENT = 20


class Explaining:
    """Answers explain requests. It only reads."""

    def __init__(
        self,
        explainer: Explainer,
        pools: Sequence[Pool],
        in_flight: InFlight,
        events: PoolEvents,
        policy: str,
    ) -> None:
        """`policy`: name of the eviction policy of L1."""
        self._explainer = explainer
        self._pools = pools
        self._in_flight = in_flight
        self._events = events
        self._policy = policy

    def request(self, request_id: str) -> dict[str, Any] | None:
        """What a recent request hit and why its first missing chunk missed; None if it is not remembered.

        Raises BadRequest if `request_id` is the beginning of several requests' ids.
        """
        document = self._explainer.explain(request_id, None)
        return document if document["known"] else None

    def recent(self) -> list[dict[str, Any]]:
        """The last lookups, newest first."""
        return self._explainer.recent(MOST_RECENT)

    def request_of(self, tenants: frozenset[str] | None, request_id: str) -> dict[str, Any]:
        """As `request`, for a process that may use these tenants (None: any); also answers for an unknown request."""
        return self._explainer.explain(request_id, tenants)

    def keys(self, keys: bytes) -> list[dict[str, str]]:
        """For each storage key, whether its chunk is in L1 and, if not, the reason as far as it is remembered."""
        self._events.drain()  # chunks may have left L1 after they were last read
        told = []
        for key in split(keys):
            if any(pool.peek(key, 1) for pool in self._pools):
                told.append({"tier": "l1", "reason": "", "detail": ""})
                continue
            reason, detail = self._explainer.why_key(
                key, in_flight=key in self._in_flight, policy=self._policy
            )
            told.append({"tier": "", "reason": reason.value, "detail": detail})
        return told
