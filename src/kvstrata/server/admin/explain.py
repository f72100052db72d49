"""Explain: what a recent request hit, and why its first missing chunk is not in L1."""

from __future__ import annotations

from typing import Any

from kvstrata.policy.misses import Explainer

MOST_RECENT = 20


class Explaining:
    """Answers explain requests. It only reads."""

    def __init__(self, explainer: Explainer) -> None:
        self._explainer = explainer

    def request(self, request_id: str) -> dict[str, Any] | None:
        """What a recent request hit and why its first missing chunk missed; None if it is not remembered.

        Raises BadRequest if `request_id` is the beginning of several requests' ids.
        """
        document = self._explainer.explain(request_id)
        return document if document["known"] else None

    def recent(self) -> list[dict[str, Any]]:
        """The last lookups, newest first."""
        return self._explainer.recent(MOST_RECENT)
