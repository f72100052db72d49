"""cluster_tiers: each adapter is one tier to a controller, whatever its name."""

from __future__ import annotations

from types import SimpleNamespace

from kvstrata.server.cluster.membership import Cluster
from kvstrata.server.cluster.own_tiers import MAX_NAME_CHARS, tier_name

LONG = "a_plugin_with_a_really_long_name_for_its_type"


def test_long_names_are_cut_and_stay_apart() -> None:
    assert tier_name("disk-0") == "disk-0"
    cut = {tier_name(f"{LONG}-{number}") for number in range(20)}
    assert len(cut) == 20
    assert {len(name) for name in cut} == {MAX_NAME_CHARS}


def test_what_happens_in_a_tier_is_told_under_the_name_that_controllers_know() -> None:
    said: list[str] = []
    link = SimpleNamespace(
        put_there=lambda tier, key: said.append(tier),
        gone_there=lambda tier, keys: said.append(tier),
        cleared_there=said.append,
    )
    watcher = Cluster.__new__(Cluster)
    watcher._links = [link]
    name = f"{LONG}-1"
    watcher.put_there(name, bytes(32))
    watcher.gone_there(name, [bytes(32)])
    watcher.cleared_there(name)
    assert said == [tier_name(name)] * 3
