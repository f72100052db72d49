"""What tenants of an instance lend each other."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.controller.lending import ENOUGH, HOLD_S, LOSS, STEP, WINDOW_S, Lending, Step, saved
from kvstrata.rpc.cluster_wire import Shares, TenantShare

SAVED = {"0.5": 0.2, "1": 0.5, "2": 0.85, "4": 0.9}
SHARE = st.floats(0, 1)


class Instance:
    """An instance that obeys."""

    def __init__(self) -> None:
        self.lending, self.now_s, self.lent, self.whole = Lending(), 0.0, 0.0, 0.8
        self.tenants = [TenantShare(name, 1_000, 1_000, 0.5, SAVED, 0, 0) for name in ("red", "blue")]

    def window(self, hit: float = 0.6, **of_blue: float) -> Step | None:
        """A window in which this part of the chunks is found; returns what is done at its end."""
        self.now_s += WINDOW_S
        red, blue = (
            msgspec.structs.replace(
                one, asked_total=one.asked_total + ENOUGH, found_total=one.found_total + round(hit * ENOUGH)
            )
            for one in self.tenants
        )
        self.tenants = [red, msgspec.structs.replace(blue, **of_blue)]
        step = self.lending.step(self.now_s, Shares(self.lent, self.tenants), self.whole)
        if step is not None:
            self.lent = step.lent
        return step


@pytest.fixture
def instance() -> Instance:
    made = Instance()
    assert made.window() is None, "nothing was measured yet"
    return made


def test_all_is_lent_step_by_step_where_that_saves_more_and_nothing_where_it_does_not(instance):
    steps = [instance.window() for _ in range(3)]
    assert [one and one.lent for one in steps] == [STEP, 2 * STEP, None] and instance.lending.measured == 0
    assert steps[0] is not None and steps[0].predicted == pytest.approx(STEP * 0.3)
    other = Instance()
    other.whole = 0.505
    assert [other.window() for _ in range(5)] == [None] * 5 and other.lent == 0
    unknown = Instance()
    assert [unknown.window(used_bytes=0) for _ in range(5)] == [None] * 5, "not known is no gain"


def test_a_tenant_that_would_save_more_with_its_quota_alone_ends_it_for_a_day(instance):
    instance.window()
    changes = []
    for _ in range(2 * round(HOLD_S / WINDOW_S)):
        step = instance.window(used_bytes=400 if instance.lent else 1_000)
        if step is not None:
            changes.append((instance.now_s, step))
    blue = instance.tenants[1]
    assert saved(blue, 1_000) - saved(blue, 400) > LOSS
    (down_s, down), (up_s, up), *_ = changes
    assert "blue" in down.why and down.lent == 0 and up.lent == STEP
    assert up_s - down_s >= HOLD_S


def test_a_step_behind_which_tenants_find_less_is_taken_back(instance):
    for hit in (0.6, 0.59, 0.61):
        instance.whole = 0.5
        assert instance.window(hit) is None
    instance.whole = 0.8
    assert instance.window(0.6) == Step(STEP, pytest.approx(STEP * 0.3))  # type: ignore[arg-type]
    step = instance.window(0.3)
    assert step is not None and (step.lent, step.why) == (0, "tenants find less")
    assert instance.lending.measured == pytest.approx(-0.3)


def test_an_instance_that_has_restarted_is_judged_anew_and_one_that_is_hardly_asked_is_not(instance):
    instance.whole = 0.5
    for _ in range(5):
        assert instance.window() is None
    instance.whole = 0.8
    instance.tenants = [
        msgspec.structs.replace(one, asked_total=0, found_total=0) for one in instance.tenants
    ]
    assert instance.window(0.0) is None, "it has restarted"
    assert instance.window(0.6) is not None
    assert instance.window(0.6) is not None and instance.lending.measured == pytest.approx(0.0)
    for _ in range(3):
        instance.tenants = [
            msgspec.structs.replace(one, asked_total=one.asked_total - ENOUGH + 1) for one in instance.tenants
        ]
        assert instance.window(0.0) is None


@given(st.lists(st.tuples(SHARE, SHARE, SHARE, st.integers(0, 3_000)), max_size=40))
def test_whatever_is_told_what_is_lent_changes_by_a_step_and_once_in_a_window(told):
    instance, last_s = Instance(), -WINDOW_S
    for hit, whole, part, used in told:
        instance.whole, lent = whole, instance.lent
        step = instance.window(hit, part=part, used_bytes=used)
        assert 0 <= instance.lent <= 1 and abs(instance.lent - lent) in (0, STEP)
        if step is not None:
            assert instance.now_s >= last_s + WINDOW_S
            last_s = instance.now_s
        instance.now_s += 1 - WINDOW_S
        assert instance.window(0.0) is None
        instance.now_s -= 1


@given(
    st.dictionaries(
        st.sampled_from(["0.5", "1", "4", "0", "0.0", "nan", "inf", "1e400", "-1", "x", ""]), SHARE
    ),
    st.integers(0, 1 << 62),
    st.integers(1, 1 << 60),
)
def test_whatever_an_instance_tells_of_sizes_it_is_refused_or_a_share_comes_of_it(told, used, n_bytes):
    raw = msgspec.msgpack.encode(TenantShare("red", used, 1, 0.5, told, 0, 0))
    try:
        share = msgspec.msgpack.decode(raw, type=TenantShare)
    except msgspec.ValidationError:
        return
    assert 0 <= saved(share, n_bytes) <= 1
