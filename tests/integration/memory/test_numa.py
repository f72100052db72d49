"""A server whose memory comes from a NUMA node; a missing node stops the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerFailed, ServerProcess

NODE = Path("/sys/devices/system/node/node0")


@pytest.mark.skipif(not NODE.exists(), reason="needs a kernel with NUMA nodes")
def test_l1_lies_on_the_node_that_was_asked_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, l1_mb=16, chunk_tokens=CHUNK_TOKENS, flags=("--l1-numa", "0")) as server:
        server.start()
        with CacheEngine(server.socket_dir, model="numa") as engine:
            engine.connect()
            engine.stored(prompt(4))
            assert engine.hit(prompt(4)) == 4
        pool = eventually(
            "the whole of L1 is faulted in",
            lambda: (
                (pool := server.get("/v1/status")["pool"])["prefaulted_bytes"] == pool["extents_bytes"]
                and pool
            ),
        )
        maps = Path(f"/proc/{server.pid}/numa_maps").read_text()
        [line] = [line for line in maps.splitlines() if f"{server.segment_dir}/extents" in line]
        assert re.findall(r"N(\d+)=(\d+)", line) == [("0", str(pool["extents_bytes"] // 4096))]
        assert "prefer" in line


def test_a_missing_node_ends_the_start(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, l1_mb=16, flags=("--l1-numa", "999")) as server,
        pytest.raises(ServerFailed, match=r"l1\.numa: '999': no such node on this machine"),
    ):
        server.start()
