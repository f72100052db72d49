"""What another instance has on its disk alone is loaded into its L1 and read from there, by a lookup that lacks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstrata.keys.batch import split
from kvstrata.native.core import storage_keys
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster

pytestmark = pytest.mark.integration

CHUNKS = 12
"""Of 4 MiB: an owner loads two of them for a question, and the second question goes out before the first answer."""
SETTINGS = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "2000"}


class Rig(NamedTuple):
    cluster: Cluster
    owner: CacheEngine
    reader: CacheEngine

    def on_disk(self, seed: int) -> list[int]:
        """Store a prompt at the owner, so that its disk alone has it, and the controller knows; returns the prompt."""
        tokens, server = prompt(CHUNKS, seed), self.cluster.servers[0]
        before = self.known()
        eventually("it is stored", lambda: set(self.owner.stored(tokens)) <= {"stored", "present"})
        eventually("it is on the disk", lambda: self.known() == before + CHUNKS)
        server.post("/v1/clear", {"tier": "l1"})
        eventually("L1 is empty", lambda: not self.cluster.known(0))
        return tokens

    def known(self) -> int:
        """Return how many chunks of the owner's disk the controller knows."""
        row = self.cluster.member(0)
        return 0 if row is None else sum(n for tier, n in row["keys"].items() if tier != "l1")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("disks")
    with (
        Cluster(folder, l1_mb=160, chunk_tokens=CHUNK_TOKENS, l2="fs", settings=SETTINGS) as cluster,
        contextlib.ExitStack() as stack,
    ):
        engines = [
            stack.enter_context(
                CacheEngine(server.socket_dir, block_bytes=1 << 20, num_blocks=4 * CHUNKS + 4)
            ).connect()
            for server in cluster.servers
        ]
        yield Rig(cluster, engines[0], engines[1])


def test_a_chunk_that_only_a_peers_disk_has_is_a_hit_with_right_bytes(rig: Rig) -> None:
    tokens = rig.on_disk(1)
    eventually("the prompt is a hit", lambda: rig.reader.hit(tokens) == CHUNKS)
    # The owner has loaded it into its L1 for that.
    assert rig.owner.client.peek(rig.owner.identity(), rig.owner.hasher(tokens)) == CHUNKS


def test_files_that_somebody_has_deleted_are_a_miss_and_nothing_stays_held(rig: Rig) -> None:
    tokens, owner, left = rig.on_disk(2), rig.cluster.servers[0], 5
    root, slices = rig.owner.identity().root, rig.owner.client.slice_digest
    for key in split(storage_keys(root, rig.owner.hasher(tokens).chain, slices))[left:]:
        [file] = (owner.folder / "l2").rglob(f"*{key.hex()[16:]}*")
        file.unlink()
    eventually("what is left is a hit", lambda: rig.reader.hit(tokens) == left)
    for server in rig.cluster.servers:
        pool = server.get("/v1/status")["pool"]
        assert pool["reservations"] == pool["holds"] == 0
