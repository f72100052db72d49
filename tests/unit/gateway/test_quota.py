"""How many tokens a tenant may use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config.gateway_model import GatewayTenantSettings
from kvstrata.gateway.door import Quota, Tenant
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.marks import CANCELLED, OK
from kvstrata.gateway.metering import Meter


def limits(tokens_per_s: float = 100.0, tokens_burst: int = 1_000) -> GatewayTenantSettings:
    return GatewayTenantSettings(
        name="red", key_file="k", tokens_per_s=tokens_per_s, tokens_burst=tokens_burst
    )


def test_the_answer_puts_its_own_numbers_in_place_of_the_estimate() -> None:
    quota = Quota(0.0)
    taken = quota.take(limits(), 100, 0.0)
    assert not isinstance(taken, Failure)
    quota.settle(taken, 300, 1_200)
    assert quota.used_tokens(limits(), 0.0) == 1_500
    assert quota.take(limits(), 100, 15.0) == 100 + 120, "answers count by their average"


def test_new_settings_keep_what_was_used() -> None:
    tenant = Tenant(limits(), 0.0)
    assert tenant.take(900, 0.0) == 900
    tenant.settings = limits(10.0, 2_000)
    assert tenant.uses(0.0).used_tokens == 900
    assert tenant.take(1_100, 0.0) == 1_100
    assert isinstance(tenant.take(1, 0.0), Failure)
    tenant.settings = limits(0.0)
    assert tenant.take(10**9, 0.0) == 0.0


def meter(
    outcome: str, *, engine: str = "e", first_s: float = 0.0, usage: dict[str, int] | None = None
) -> Meter:
    found = Meter(0.0, "red")
    found.outcome, found.engine, found.first_s, found.tokens = outcome, engine, first_s, usage or {}
    return found


def test_only_what_engines_have_worked_on_is_charged() -> None:
    usage = {"prompt": 70, "completion": 30}
    for ended, used in (
        (meter(OK, first_s=1.0, usage=usage), 100),
        (meter(OK, first_s=1.0), 200),
        (meter("client_error", first_s=1.0), 0),
        (meter("engine_busy"), 0),
        (meter("queue_full", engine=""), 0),
        (meter(CANCELLED, engine=""), 0),
        (meter(CANCELLED), 200),
        (meter(CANCELLED, first_s=1.0), 200),
    ):
        tenant = Tenant(limits(), 0.0)
        taken = tenant.take(200, 0.0)
        assert not isinstance(taken, Failure)
        tenant.settle(taken, 200, ended)
        assert tenant.uses(0.0).used_tokens == used, ended.outcome


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 3_000),
        st.integers(0, 3_000),
        st.integers(0, 3_000),
        st.floats(0.0, 20.0),
        st.booleans(),
    ),
    max_size=30,
)


@given(REQUESTS, st.floats(1.0, 1_000.0), st.integers(1, 5_000))
def test_no_more_is_let_in_than_rate_and_burst_allow_and_all_drains(requests, rate, burst):
    settings, quota, now_s, waiting = limits(rate, burst), Quota(0.0), 0.0, []
    for prompt, told, generated, step_s, settles in requests:
        now_s += step_s
        before = quota.used_tokens(settings, now_s)
        taken = quota.take(settings, prompt, now_s)
        if isinstance(taken, Failure):
            assert quota.used_tokens(settings, now_s) == before > 0.0
            later_s = now_s + taken.retry_after_s
            assert before - rate * (later_s - now_s) + min(prompt, burst) <= burst + quota._generated + 1e-6
        else:
            assert before == 0.0 or before + taken <= burst + 1e-6
            waiting.append((taken, told, generated))
        if settles and waiting:
            quota.settle(*waiting.pop(0))
        assert quota.used_tokens(settings, now_s) >= 0.0
    for left in waiting:
        quota.settle(*left)
    used = quota.used_tokens(settings, now_s)
    assert quota.used_tokens(settings, now_s + used / rate + 1.0) == 0.0
