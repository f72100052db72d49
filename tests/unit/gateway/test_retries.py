"""The budget of retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.gateway.retries import AT_ONCE, RetryBudget


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=300))
def test_retries_stay_within_their_share_of_requests(share: float, steps: list[bool]) -> None:
    budget = RetryBudget(share)
    requests = taken = 0
    for is_request in steps:
        if is_request:
            budget.request()
            requests += 1
        else:
            taken += budget.take()
        assert taken <= AT_ONCE + requests * share + 1e-6
        assert 0 <= budget.left <= AT_ONCE
