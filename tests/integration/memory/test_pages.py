"""Where the pool's pages lie: huge pages, NUMA nodes, and not in a core dump."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from kvstrata.memory.segment_settings import HUGE_PAGE_BYTES, huge_pages
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.own_process import ServerFailed
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration


L1_MB = 32


def test_chunks_in_huge_pages_outlive_the_server(tmp_path: Path) -> None:
    flags = ("--l1-use-hugepages",)
    with ServerProcess(
        tmp_path, l1_mb=L1_MB, chunk_tokens=CHUNK_TOKENS, flags=flags, supervised=True
    ) as server:
        if huge_pages().free * HUGE_PAGE_BYTES < L1_MB << 20:
            with pytest.raises(ServerFailed, match=r"l1\.use_hugepages: .*sysctl -w vm\.nr_hugepages="):
                server.start()
            return
        server.start()
        with CacheEngine(server.socket_dir, model="huge") as engine:
            engine.connect()
            engine.stored(prompt(4))
            send(server.ready["pid"], signal.SIGKILL)
            eventually("the next server answers", lambda: engine.client.epoch > server.ready["epoch"])
            engine.connect()
            assert engine.hit(prompt(4)) == 4


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


def mappings(pid: int) -> list[tuple[str, int, set[str]]]:
    """(path, bytes, flags) of every mapping of a process."""
    found: list[tuple[str, int, set[str]]] = []
    path, n_bytes = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(word, 16) for word in words[0].split("-"))
            path, n_bytes = " ".join(words[5:]), last - first
        elif words[0] == "VmFlags:":
            found.append((path, n_bytes, set(words[1:])))
    return found


def of_pool(pid: int, server: ServerProcess) -> dict[str, set[str]]:
    """The flags of the mappings of the pool's files by their names."""
    return {Path(path).name: flags for path, _, flags in mappings(pid) if str(server.segment_dir) in path}


def test_no_process_that_maps_the_pool_has_it_in_its_core_dump(tmp_path: Path) -> None:
    staging_mb = 23  # as no other mapping has
    hosted = {"type": "fs", "base_path": str(tmp_path / "hosted"), "isolation": "process"}
    encoded = {
        "type": "fs",
        "base_path": str(tmp_path / "encoded"),
        "codec": "zstd",
        "codec_staging_mb": staging_mb,
    }
    flags = ("--l2-adapter", json.dumps(hosted), "--l2-adapter", json.dumps(encoded))
    with (
        ServerProcess(
            tmp_path / "server", l1_mb=16, l2="embedded", chunk_tokens=CHUNK_TOKENS, flags=flags
        ).started() as server,
        CacheEngine(server.socket_dir) as engine,
    ):
        engine.connect()
        engine.stored(prompt(2))
        children = Path(f"/proc/{server.pid}/task").glob("*/children")
        (host,) = {int(pid) for path in children for pid in path.read_text().split()}
        for process in (server.pid, host, os.getpid()):
            pool = of_pool(process, server)
            assert "extents" in pool
            assert all("dd" in flags for flags in pool.values()), (process, pool)
        eventually("the record is encoded", lambda: list((tmp_path / "encoded").rglob("*.kvc")))
        staging = [flags for _, n_bytes, flags in mappings(server.pid) if n_bytes == staging_mb << 20]
        assert staging and all("dd" in flags for flags in staging), "decoded KV lies in the staging memory"
