"""What a gateway makes of what controllers tell and of what instances hold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.cluster.lookups import Held
from kvstrata.gateway.choosing import ChoiceInputs, Choosing
from kvstrata.gateway.controllers.asking import _At, copies_of
from kvstrata.gateway.controllers.following import Followed, Holding
from kvstrata.gateway.controllers.kinds import Kind, adapter_of, served_as
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place, ServingEngine
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.choose import POLICIES
from kvstrata.gateway.routing.model import Copy
from kvstrata.gateway.routing.rates import PrefillRates
from kvstrata.rpc.cluster_wire import KvKind, Served
from kvstrata.types import LayoutIdentity, canonical_json
from tests.harness.amount import amount
from tests.unit.controller.member_messages import register

LAYOUT = LayoutIdentity(model="m", kv_dtype="bfloat16", chunk_tokens=16)
SLICE = b"s" * 32


def followed(name: str, *, peers: bool = True) -> Followed:
    told = register(1, name, tiers=["l1"], gives_to_peers=peers)
    return Followed(Served(told, "k" * 40, peers), 0, lambda: 0.0, lambda: None)


def engine(port: int, instance: str = "") -> ServingEngine:
    return ServingEngine(
        Place(f"e{port}", Address("10.0.0.1", port, False), instance=instance), PrefillRates(1.0)
    )


def test_nothing_is_asked_for_a_kind_whose_keys_cannot_be_derived() -> None:
    for wrong in (
        KvKind(LayoutIdentity(model="m", kv_dtype="x", chunk_tokens=0), [SLICE]),
        KvKind(LayoutIdentity(model="m", kv_dtype="x", chunk_tokens=16, lookahead_tokens=-1), [SLICE]),
        KvKind(LAYOUT, []),
        KvKind(LAYOUT, [b"short"]),
        KvKind(LAYOUT, [SLICE], [7]),
    ):
        assert served_as([wrong], ["m"]) is None
        good = KvKind(LAYOUT, [SLICE])
        assert served_as([wrong, good], ["other"]) == (Kind(LAYOUT, (SLICE,)), good)


def test_of_several_kinds_that_of_the_model_counts() -> None:
    kinds = [KvKind(msgspec.structs.replace(LAYOUT, model=name), [SLICE]) for name in ("m", "n")]
    for names, found in ((["org/n"], kinds[1]), (["m"], kinds[0]), (["m", "n"], None), (["x"], None)):
        served = served_as(kinds, names)
        assert (served[1] if served else None) == found


OLD, NEW = (canonical_json(["sql", content]).decode() for content in ("old", "new"))
REPLACED = canonical_json(["weights", "7", ""]).decode()
REPLACED_NEW = canonical_json(["weights", "7", NEW]).decode()


def test_the_newest_adapter_of_a_name_counts() -> None:
    for adapters, lora, found in (
        ([NEW, OLD], "sql", NEW),
        ([OLD, NEW], "sql", OLD),
        ([NEW], "other", None),
        ([NEW], "", ""),
        ([REPLACED, ""], "", REPLACED),
        ([REPLACED_NEW, NEW], "sql", REPLACED_NEW),
        ([], "sql", None),
        (["sql", "[1,2]", '["sql"]', "{", '["weights","7","{"]', '["weights",7,""]'], "sql", None),
    ):
        assert adapter_of(KvKind(LAYOUT, [SLICE], adapters=adapters), lora) == found


NESTED = st.recursive(
    st.text(max_size=6), lambda inner: inner.map(lambda text: canonical_json(["weights", "", text]).decode())
)


@given(NESTED)
@settings(max_examples=amount(20, 100))
def test_no_text_of_an_adapter_breaks_the_choice(adapter: str) -> None:
    assert adapter_of(KvKind(LAYOUT, [SLICE], adapters=[adapter]), "") in ("", adapter)


COUNTS = st.integers(0, 1 << 40)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcx"), st.tuples(COUNTS, COUNTS, COUNTS), st.integers(0, 9)),
        max_size=4,
        unique_by=lambda row: row[0],
    ),
    st.integers(1, 64),
)
def test_no_answer_promises_more_than_was_asked_for(
    rows: list[tuple[str, tuple[int, int, int], int]], most: int
) -> None:
    instances = {name: followed(name, peers=name != "b") for name in "abcx"}
    at = [_At(engine(n, name), instances[name]) for n, name in enumerate("abc")]
    holdings = [Holding(instances[name], Held(*held), ms) for name, held, ms in rows]
    copies = copies_of(at, holdings, 16, most)
    of = {row.of.told.instance: row for row in holdings}
    for copy in copies:
        assert 0 < copy.tokens <= 16 * most and copy.source in of
        assert (copy.certainty == "exact") == (not of[copy.source].unconfirmed_ms)
        name = "abc"[int(copy.engine[1:])]
        assert (copy.tier == "peer") == (copy.source != name)
        if copy.tier == "peer":
            assert name != "b" and copy.source in ("a", "c", "x"), "b neither reads nor gives"


def test_one_copy_stands_for_all_if_every_engine_reads_peers() -> None:
    at = [_At(engine(n, name), followed(name)) for n, name in enumerate("abc")]
    holdings = [Holding(at[0].of, Held(5, 5))]
    peers = [one for one in copies_of(at, holdings, 16, 8, 3) if one.tier == "peer"]
    assert [(one.engine, one.tokens, one.source) for one in peers] == [("", 80, "a")]
    for n_targets in (0, 4):
        each = [one for one in copies_of(at, holdings, 16, 8, n_targets) if one.tier == "peer"]
        assert [one.engine for one in each] == [at[1].engine.name, at[2].engine.name]


@pytest.mark.parametrize("tier", ["l1", "l2", "peer"])
def test_a_load_is_not_timed_as_computing(tier: Any) -> None:
    now_s = [100.0]
    fleet = Fleet(lambda: now_s[0])
    fleet.set_places([Place(name, Address("127.0.0.1", port, False)) for port, name in enumerate("ab", 1)])
    for one in fleet.engines.values():
        fleet.up(one, {"m": {}})
    residency = Residency(lambda: now_s[0])
    try:
        choosing = Choosing(POLICIES["ttft"], fleet, residency, Meters({}), lambda: now_s[0])
        for n in range(4):
            held = [Copy(engine="a", tier=tier, tokens=30_000, source="i")]
            prompt = Prompt(range(n * 40_000, n * 40_000 + 32_000))
            choice = choosing.choose(ChoiceInputs(str(n), n, "m", 32_000, prompt=prompt, held=held))
            assert choice is not None and choice.decision is not None and choice.decision.way is not None
            assert (choice.engine.name, choice.decision.way.tier) == ("a", tier)
            fleet.attach(lambda engine: "", peers=False)  # what a split waits for may take long
            choosing.dispatched(choice)
            now_s[0] += 0.5
            choosing.first_token(choice)
            choosing.learn(choice, 32_000, 30_000)
            choosing.ended(choice, answered=True)
            now_s[0] += 10.0
        assert not fleet.measured(fleet.engines["a"]), "no prefill rate comes of a load"
    finally:
        residency.close()


@pytest.mark.parametrize(
    ("tier", "source", "waits"), [("l2", "disk", False), ("peer", "i", True), ("peer", "j", False)]
)
def test_a_load_waits_for_those_before_it_over_its_engine_s_link_or_from_its_peer(
    tier: Any, source: str, waits: bool
) -> None:
    now_s = [100.0]
    fleet = Fleet(lambda: now_s[0])
    fleet.set_places([Place(name, Address("127.0.0.1", port, False)) for port, name in enumerate("ab", 1)])
    for one in fleet.engines.values():
        fleet.up(one, {"m": {}})
    residency = Residency(lambda: now_s[0])
    try:
        choosing = Choosing(POLICIES["ttft"], fleet, residency, Meters({}), lambda: now_s[0])

        def load_s(n: int, engine: str, tier: Any, source: str) -> float:
            held = [Copy(engine=engine, tier=tier, tokens=90_000, source=source)]
            prompt = Prompt(range(n * 100_000, n * 100_000 + 91_000))
            choice = choosing.choose(ChoiceInputs(str(n), n, "m", 91_000, prompt=prompt, held=held))
            assert choice is not None and choice.way is not None and choice.engine.name == engine
            choosing.dispatched(choice)
            return choice.way.load_s

        alone_s = load_s(1, "a", "peer", "i")
        for_s = alone_s - fleet.engines["a"].load.paths["peer"].latency_s
        assert load_s(2, "a", "peer", "other") == pytest.approx(alone_s + for_s), "the same link"
        before_s = load_s(3, "b", tier, source)
        now_s[0] += 100.0
        assert before_s == pytest.approx(load_s(4, "b", tier, source) + waits * for_s)
    finally:
        residency.close()
