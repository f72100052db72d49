"""A server whose L1 is bound to a NUMA node shows that and serves like any other; a missing node stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.memory.numa import nodes_with_memory
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerFailed, ServerProcess

pytestmark = pytest.mark.skipif(not nodes_with_memory(), reason="needs a kernel with NUMA nodes")


def test_l1_lies_on_the_node_that_was_asked_for(tmp_path: Path) -> None:
    node = str(nodes_with_memory()[0])
    with ServerProcess(tmp_path, l1_mb=16, chunk_tokens=CHUNK_TOKENS, flags=("--l1-numa", node)) as server:
        server.start()
        with CacheEngine(server.socket_dir, model="numa") as engine:
            engine.connect()
            engine.stored(prompt(4))
            assert engine.hit(prompt(4)) == 4
        eventually(
            "the whole of L1 is there",
            lambda: (
                server.get("/v1/status")["pool"]["prefaulted_bytes"]
                == server.get("/v1/status")["pool"]["extents_bytes"]
            ),
        )
        told = server.get("/v1/status")["numa"]
        assert (told["setting"], told["nodes"], told["sampled_pages"]) == (node, [int(node)], {node: 64})


def test_a_node_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, l1_mb=16, flags=("--l1-numa", "999")) as server,
        pytest.raises(
            ServerFailed, match=r"l1\.numa: '999': there is no node 999 with memory, this machine has"
        ),
    ):
        server.start()
