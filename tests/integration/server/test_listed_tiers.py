"""After a crash a real controller learns which chunks a server has on disk, and how full its tiers are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster
from tests.integration.server import late_listing

pytestmark = pytest.mark.integration

CHUNKS = 40
GB = 1 << 30


@contextlib.contextmanager
def cluster_with(folder: Path, entry: dict[str, Any]) -> Iterator[tuple[Cluster, CacheEngine]]:
    """One server with one L2 tier, and an engine at it."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(
                folder,
                l1_mb=64,
                n_servers=1,
                chunk_tokens=CHUNK_TOKENS,
                l2="embedded",
                flags=("--l2-adapter", json.dumps(entry)),
            )
        )
        yield cluster, stack.enter_context(CacheEngine(cluster.servers[0].socket_dir)).connect()


def told(cluster: Cluster, what: str, tier: str) -> int:
    """A number that the controller has about a tier of the instance."""
    row = cluster.member(0)
    return 0 if row is None else int(row[what].get(tier, 0))


def places(cluster: Cluster, tokens: list[int]) -> list[list[str]]:
    """For each chunk, the tiers that the controller's lookup names."""
    found = cluster.controller.ask("/v1/lookup", {"tokens": tokens})
    return [[place["tier"] for place in chunk["places"]] for chunk in found["chunks"]]


def start_anew(cluster: Cluster) -> None:
    """Kill the server, and start it with an empty L1."""
    server = cluster.servers[0]
    server.kill()
    server.wipe_segment()
    server.start()
    server.get("/v1/status")


@pytest.mark.parametrize("isolation", ["in_process", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["disk", pytest.param("fs", marks=pytest.mark.long)])
def test_chunks_on_disk_from_before_a_crash_are_known_to_the_controller_after_the_start(
    tmp_path: Path, kind: str, isolation: str
) -> None:
    tier = f"{kind}-0"
    entry = {"type": kind, "base_path": str(tmp_path / "l2"), "capacity_gb": 1, "isolation": isolation}
    with cluster_with(tmp_path, entry) as (cluster, engine):
        tokens = prompt(CHUNKS)
        assert set(engine.stored(tokens)) == {"stored"}
        eventually("all of it is on disk", lambda: told(cluster, "keys", tier) == CHUNKS)
        start_anew(cluster)
        eventually(
            "what is on disk is told, and no more",
            lambda: (told(cluster, "keys", "l1"), told(cluster, "keys", tier)) == (0, CHUNKS),
        )
        engine.connect()
        eventually("its kind of KV is known", lambda: cluster.controller.ask("/v1/models")["models"])
        assert places(cluster, tokens) == [[tier]] * CHUNKS
        eventually("its fill is told", lambda: told(cluster, "used_bytes", tier) > CHUNKS * 4096)
        assert told(cluster, "capacity_bytes", tier) == GB
        [row] = [row for row in cluster.controller.ask("/v1/tiers")["tiers"] if row["tier"] == tier]
        assert (row["keys"], row["capacity_bytes"]) == (CHUNKS, GB)
        assert row["used_bytes"] == told(cluster, "used_bytes", tier)
        assert engine.hit(tokens) == CHUNKS
        assert set(engine.stored(prompt(3, seed=1))) == {"stored"}
        eventually("what came since is told too", lambda: told(cluster, "keys", tier) == CHUNKS + 3)


@pytest.mark.long
def test_a_tier_that_cannot_be_listed_yet_delays_nothing_and_is_reported_once_it_can(tmp_path: Path) -> None:
    lists_with = tmp_path / "may be listed"
    entry = late_listing.entry(tmp_path / "l2", lists_with)
    with cluster_with(tmp_path, entry) as (cluster, engine):
        assert set(engine.stored(prompt(CHUNKS))) == {"stored"}
        eventually("all of it is on disk", lambda: told(cluster, "keys", "plugin-0") == CHUNKS)
        start_anew(cluster)
        engine.connect()
        assert set(engine.stored(prompt(5, seed=1))) == {"stored"}
        eventually("L1 is told without it", lambda: told(cluster, "keys", "l1") == 5)
        assert told(cluster, "keys", "plugin-0") <= 5
        lists_with.touch()
        eventually("it is told", lambda: told(cluster, "keys", "plugin-0") == CHUNKS + 5)
