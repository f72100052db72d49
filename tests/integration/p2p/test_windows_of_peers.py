"""Engines with windows at instances that read from each other: peers give the windows of any hit, not only the last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, eventually, prompt
from tests.harness.cluster import Cluster
from tests.harness.engine_groups import Groups, open_groups

pytestmark = pytest.mark.integration

SETTINGS = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "5000"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("cluster"), l1_mb=64, chunk_tokens=CHUNK_TOKENS, settings=SETTINGS
    ) as made:
        yield made


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[tuple[Groups, Groups]]:
    one, other = cluster.servers
    with open_groups(one) as here, open_groups(other) as there:
        yield here, there


def until_hit(groups: Groups, asked: int, n_chunks: int, windows: list[int], seed: int) -> None:
    """Wait until a prompt hits so far, then load these windows with the rest; a busy machine may need several tries."""
    tokens = prompt(asked, seed)
    eventually("the prompt is a hit", lambda: groups.whole.hit(tokens) == n_chunks)
    result = groups.whole.looked_up(tokens)
    assert (result.n_chunks, groups.windows_of(result)) == (n_chunks, windows)
    groups.load(asked, result, seed)


def test_a_peer_gives_the_windows_of_a_hit_that_ends_in_the_middle_of_its_prompt(
    cluster: Cluster, engines: tuple[Groups, Groups]
) -> None:
    here, there = engines
    here.store(12, [(2, 4)], seed=1)
    here.store(12, [(0, 1), (3, 6), (11, 12)], seed=2)
    cluster.until_known(0)
    before = cluster.peer_records(1)
    until_hit(there, 12, 4, [2, 3], seed=1)
    until_hit(there, 12, 6, [4, 5], seed=2)
    assert cluster.peer_records(1) - before == (4 + 2) + (6 + 2), "only what the hits need is read"


def test_a_controller_counts_hits_and_copies_windows_too(
    cluster: Cluster, engines: tuple[Groups, Groups]
) -> None:
    here, there = engines
    here.store(8, [(2, 4)], seed=3)
    cluster.until_known(0)
    ask = cluster.controller.ask
    asked = {"tokens": prompt(8, 3)}

    def reported() -> bool:
        return [len(kind["instances"]) for kind in ask("/v1/models")["models"]] == [2]

    eventually("both instances report the model", reported)
    placed = ask("/v1/lookup", asked)
    assert (placed["n_slices"], placed["held_chunks"]) == (2, 4)
    assert [(one["instance"], one["chunks"]) for one in placed["longest"]] == [("instance-0", 4)]
    assert all(chunk["places"] for chunk in placed["chunks"])
    before = cluster.peer_records(1)
    done = ask("/v1/replicate", {**asked, "to": "instance-1", "wait_s": 30})
    assert [row["state"] for row in done["commands"]] == ["done"], done
    assert there.whole.hit(prompt(8, 3)) == 4
    assert cluster.peer_records(1) - before == 4 + 2, "the copy has brought the windows"
