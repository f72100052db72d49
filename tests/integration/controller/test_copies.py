"""Copies of hot prefixes that a controller has made ahead: real servers, of which one is killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster

pytestmark = pytest.mark.integration

CHUNKS = 40
MB_S = 1
TOKENS_S = 600_000.0
"""A prefix that a few requests in half a minute ask for is then wanted twice."""


def test_a_hot_prefix_is_on_two_instances_and_again_after_one_was_killed_within_the_byte_rate(
    tmp_path: Path,
) -> None:
    flags = ("--heartbeat-s", "1", "--dead-after-s", "6", "--copies-mb-s", str(MB_S))
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(tmp_path, l1_mb=64, n_servers=3, chunk_tokens=CHUNK_TOKENS, controller_flags=flags)
        )
        engines = [
            stack.enter_context(CacheEngine(server.socket_dir, block_bytes=32_768)).connect()
            for server in cluster.servers
        ]
        for engine in engines:
            engine.client.prompt_tokens_s = TOKENS_S
        hot, cold = prompt(CHUNKS, seed=1), prompt(CHUNKS, seed=2)
        for tokens in (hot, cold):
            eventually(
                "it is stored", lambda tokens=tokens: set(engines[0].stored(tokens)) <= {"stored", "present"}
            )

        def plan() -> dict[str, Any]:
            return dict(cluster.controller.ask("/v1/plan")["copies"])

        def holders(number: int) -> list[str]:
            rows = [row for row in plan()["prefixes"] if row["chunks"] == CHUNKS]
            rate_s = rows[0]["requests_s"] if rows else 0.0
            if rate_s not in asked_at and not (rows and rows[0]["wanted"] >= number):
                asked_at.append(rate_s)  # again, since a slow machine cools down before anything is copied
                for _ in range(4):
                    assert engine.hit(hot) == CHUNKS
            return rows[0]["instances"] if rows and len(rows[0]["instances"]) == number else []

        engine, asked_at = engines[0], list[float]()
        first = eventually("it is on two instances", lambda: holders(2))
        [copy] = [name for name in first if name != "instance-0"]
        [third] = {"instance-1", "instance-2"} - {copy}
        assert cluster.known(int(third[-1])) == 0, "it is wanted twice, and only the hot one is"
        assert engines[int(copy[-1])].hit(hot) == CHUNKS
        assert cluster.peer_records(int(copy[-1])) == CHUNKS, "it was there before anybody asked"
        engine = engines[int(copy[-1])]
        cluster.servers[0].kill()
        again = eventually("it is on two again", lambda: "instance-0" not in (now := holders(2)) and now)
        assert again == sorted([copy, third])
        assert engines[int(third[-1])].hit(hot) == CHUNKS
        eventually("the first copy was used", lambda: plan()["outcomes"].get("used", 0) >= 1)
        events = cluster.controller.ask("/v1/events")["events"]
        took = [row["facts"]["took_s"] for row in events if row["kind"] == "copied"]
        [n_bytes] = [row["bytes"] for row in plan()["prefixes"]]
        assert len(took) == 2 and min(took) >= n_bytes / (MB_S << 20), took
        assert plan()["copied_bytes"] == 2 * n_bytes
