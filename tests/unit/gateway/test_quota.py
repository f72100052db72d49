"""How many tokens a tenant may use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config.gateway_model import GatewayTenantSettings
from kvstrata.gateway.door import Bucket, Tenant
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.marks import CANCELLED, OK
from kvstrata.gateway.request import Request
from tests.unit.gateway.requests import a_request


def limits(tokens_per_s: float = 100.0, tokens_burst: int = 1_000) -> GatewayTenantSettings:
    return GatewayTenantSettings(
        name="red", key_file="k", tokens_per_s=tokens_per_s, tokens_burst=tokens_burst
    )


def ended(
    outcome: str, *, engine: str = "e", first_s: float = 0.0, usage: dict[str, int] | None = None
) -> Request:
    """A request of 200 tokens that has taken as many."""
    found = a_request(tokens=200)
    found.outcome, found.engine, found.first_s, found.tokens = outcome, engine, first_s, usage or {}
    found.taken = 200.0
    return found


def test_the_answer_puts_its_own_numbers_in_place_of_the_estimate() -> None:
    tenant = Tenant(limits(), 0.0)
    assert tenant.take(200, 0.0) == 200
    tenant.settle(ended(OK, first_s=1.0, usage={"prompt": 300, "completion": 1_200}))
    assert tenant.uses(0.0).used_tokens == 1_500
    assert tenant.take(100, 15.0) == 100 + 120, "answers count by their average"


def test_new_settings_keep_what_was_used() -> None:
    tenant = Tenant(limits(), 0.0)
    assert tenant.take(900, 0.0) == 900
    tenant.settings = limits(10.0, 2_000)
    assert tenant.uses(0.0).used_tokens == 900
    assert tenant.take(1_100, 0.0) == 1_100
    assert isinstance(tenant.take(1, 0.0), Failure)
    tenant.settings = limits(0.0)
    assert tenant.take(10**9, 0.0) == 0.0


def test_what_engines_have_worked_on_is_charged_and_at_least_a_quarter_of_the_body() -> None:
    for request, used in (
        (ended(OK, first_s=1.0, usage={"prompt": 270, "completion": 30}), 300),
        (ended(OK, first_s=1.0, usage={"prompt": 7, "completion": 3}), 200),
        (ended(OK, first_s=1.0), 200),
        (ended("client_error", first_s=1.0), 0),
        (ended("engine_busy"), 0),
        (ended("queue_full", engine=""), 0),
        (ended(CANCELLED, engine=""), 0),
        (ended(CANCELLED), 200),
        (ended(CANCELLED, first_s=1.0), 200),
    ):
        tenant = Tenant(limits(), 0.0)
        assert tenant.take(200, 0.0) == 200
        tenant.settle(request)
        assert tenant.uses(0.0).used_tokens == used, request.outcome


def test_a_whole_answer_that_was_left_before_its_usage_is_charged_as_the_average_and_a_stream_by_its_events():
    for events, used in ((0, 220), (5, 205)):
        tenant = Tenant(limits(), 0.0)
        tenant.take(200, 0.0)
        tenant.settle(ended(OK, first_s=1.0, usage={"prompt": 200, "completion": 200}))
        request = ended(CANCELLED, first_s=1.0)
        request.taken, request.events = tenant.take(200, 100.0), events
        tenant.settle(request)
        assert tenant.uses(100.0).used_tokens == used


def test_an_answer_that_looks_like_an_error_is_free_only_if_it_has_no_tokens():
    for usage, used in (({}, 0), ({"prompt": 270, "completion": 30}, 300)):
        tenant, request = Tenant(limits(), 0.0), ended(OK, first_s=1.0, usage=usage)
        assert tenant.take(200, 0.0) == 200
        request.failed_inside = True
        tenant.settle(request)
        assert tenant.uses(0.0).used_tokens == used


@given(
    st.lists(st.tuples(st.integers(1, 3_000), st.floats(0.0, 20.0)), max_size=30),
    st.floats(1.0, 1_000.0),
    st.integers(1, 5_000),
)
def test_no_more_is_let_in_than_rate_and_burst_allow_and_all_drains(uses, rate, burst):
    bucket, now_s = Bucket(0.0), 0.0
    for amount, step_s in uses:
        now_s += step_s
        before = bucket.drained(rate, now_s)
        wait_s = bucket.take(amount, rate, burst, now_s)
        if wait_s:
            assert bucket.used == before > 0.0
            assert before - rate * wait_s + min(amount, burst) <= burst + 1e-6
        else:
            assert bucket.used == before + amount and (
                before == 0.0 or bucket.used <= max(burst, before + 1e-6) + 1e-6 or amount > burst
            )
    assert bucket.drained(rate, now_s + bucket.used / rate + 1.0) == 0.0
