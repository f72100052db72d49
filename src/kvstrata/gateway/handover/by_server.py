"""The contract `kvstrata`: content keys are the whole protocol.

Both engines get the request at once.  The connector of the one that computes promises the chunks of its prompt to their
`lmcache-server`, and the one that answers waits there for them (`kvstrata.wait_ms`), or its server does at the other's
instance (`kvstrata.from`).  It computes what does not come.
"""

from __future__ import annotations

from kvstrata.gateway.handover.contract import Fields, Handover

LEAST_WAIT_MS, MOST_WAIT_MS = 1_000, 60_000
"""The connector takes at most 60 s."""


class ByServer(Handover):
    """See the module."""

    def for_prefill(self) -> Fields:
        """Nothing: the connector promises what it computes."""
        return {}

    async def for_answer(self, returned: Fields | None) -> Fields:
        """Wait twice as long as the prompt is expected to take, and a second."""
        wait_ms = min(MOST_WAIT_MS, LEAST_WAIT_MS + round(2_000 * max(0.0, self.expected_s)))
        return {"kvstrata.wait_ms": wait_ms} | ({"kvstrata.from": self.source} if self.source else {})
