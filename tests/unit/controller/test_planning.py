"""The leader's plan: loads from the totals of gateways, and what gateways are told."""

from __future__ import annotations

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.planning import STEP_S, Loads
from kvstrata.rpc.cluster_wire import TO_CONTROLLER, GatewayBeat, RatedEngine, ShapeCount, encode
from tests.harness.known_members import KEY

URLS = [f"http://10.0.0.{number}:8000" for number in range(2)]


def count(requests: int, met: int, group: str = "m") -> ShapeCount:
    return ShapeCount(group, 82, 2_000.0, 15.0, requests, met, 430 * requests, 2_500 * requests)


def beat(cluster: Cluster, requests: int, met: int) -> None:
    rated = [RatedEngine(url, "m", "both", 22_000, 0.0055, 0.0001) for url in URLS]
    shapes = [count(requests, met)]
    told = GatewayBeat(1, 15, "gw", "1", 1, "auto", 2, 2, 0, 0, splits=True, rated=rated, shapes=shapes)
    assert TO_CONTROLLER.decode(encode(told)) == told
    cluster.gateways.beat(told, KEY, "10.0.0.9", 1)


def test_loads_are_what_totals_grow_by_at_all_gateways_also_after_one_has_restarted() -> None:
    loads = Loads()
    for number in range(30):
        other = number if number < 20 else number - 20
        told = [("a", count(100 * number, 90 * number)), ("b", count(50 * other, 50 * other))]
        loads.add(told, STEP_S)
        assert number < 3 or 10 <= loads.shapes("m")[0].requests_s <= 16
    [shape] = loads.shapes("m")
    assert abs(shape.requests_s - 15) < 1 and abs(shape.prompt_tokens - 430) < 1e-6
    assert (shape.ttft_s, shape.tpot_s) == (2.0, 0.015)
    assert abs((loads.met_share("m") or 0) - 140 / 150) < 1e-9
    assert loads.shapes("n") == [] and loads.met_share("n") is None
    for _ in range(60):
        loads.add([], STEP_S)
    assert loads.shapes("m") == []


async def test_what_gateways_measure_is_shown_with_what_would_be_better(cluster: Cluster) -> None:
    for number in range(4):
        beat(cluster, 120 * number, 12 * number)
        await cluster.planning.tick()
    [row] = cluster.planning.page()["groups"]
    assert row["group"] == "m" and len(row["measured"]["engines"]) == 2
    assert abs(row["measured"]["met_share"] - 0.1) < 1e-9 and row["predicted"]["met_s"] < 6
    more = {one["what"]: one["met_s"] for one in row["buys"]}
    assert more["another engine"] >= 0
