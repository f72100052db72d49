"""Notices what other connectors load, which share an engine with ours in vLLM's `MultiConnector`.

`MultiConnector` asks every connector about a request, lets the first one load that has tokens, and tells the others
only that they load none.  So the amount is inferred: tokens that vLLM calls computed, and that are neither from its own
cache nor from us, are from another connector.

An asynchronous load of another connector has ended, as far as vLLM will use it, when vLLM schedules its request.  Of a
load that is part of a step, vLLM learns only with the step's result that it failed; the step has computed on bad blocks
then.  Until that result, nothing is stored (`StoreTable.must_wait`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.connectors.vllm.lookup_table import Tracked
from kvstrata.connectors.vllm.request_keys import RequestKeys


class OtherLoads:
    """Loads of other connectors in one engine. Belongs to the scheduler's thread."""

    def __init__(self, tracked: Mapping[str, Tracked], keys: RequestKeys) -> None:
        """`tracked` are the lookup table's requests."""
        self._tracked = tracked
        self._keys = keys
        self._asked: set[str] = set()
        """Requests that vLLM has asked about since the last step was planned."""

    def asked(self, tracked: Tracked, computed_tokens: int) -> None:
        """vLLM asks about a request; its own cache has KV of so many tokens, and the request holds no blocks."""
        # So the request builds only on KV that vLLM has just found, or that is loaded.
        tracked.stale = computed_tokens > 0 and self._keys.is_stale(tracked.request)
        tracked.known_tokens, tracked.scheduled, tracked.untrusted = computed_tokens, False, False
        self._asked.add(tracked.request.request_id)

    def in_step(self, output: Any) -> bool:
        """Whether another connector loads in the step that vLLM's SchedulerOutput describes, as part of it."""
        asked, self._asked = self._asked, set()
        found = False
        for request_id, computed in computed_before(output).items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.scheduled:
                continue
            tracked.scheduled = True
            if computed > tracked.known_tokens:
                tracked.untrusted = not self._keys.others_trusted
                found |= request_id in asked
        return found


def computed_before(output: Any) -> dict[str, int]:
    """Request → tokens of which vLLM has KV before the step that its SchedulerOutput describes."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed
