"""Own tiers: a controller sees each adapter as one tier, however long its name is."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from kvstrata.rpc.cluster_wire import Events
from kvstrata.server.cluster.events import TierNews
from kvstrata.server.cluster.told_tiers import MAX_NAME_CHARS, tier_name

LONG = "a_plugin_with_a_really_long_name_for_its_type"


def test_long_names_are_cut_and_stay_apart() -> None:
    assert tier_name("disk-0") == "disk-0"
    cut = {tier_name(f"{LONG}-{number}") for number in range(20)}
    assert len(cut) == 20
    assert {len(name) for name in cut} == {MAX_NAME_CHARS}


def test_events_of_a_tier_carry_the_name_that_controllers_know() -> None:
    name = f"{LONG}-1"
    own = SimpleNamespace(lists=lambda tier: False)
    news = TierNews(own)  # type: ignore[arg-type]
    news.set_tiers(["l1", tier_name(name)])
    news.begin_telling()
    news.tier_got(name, bytes(32))
    assert news.tags.count(tier_name(name)) == 1
    news.tier_lost(name, [bytes(32)])
    news.tier_emptied(name)
    frame = news.next_frame("ours", 1)
    assert frame is not None
    told = msgspec.msgpack.decode(frame, type=Events)
    assert [run.tier for run in told.runs] == [tier_name(name)] * 3
    assert news.tags.count(tier_name(name)) == 0
