"""Core dumps of servers, adapter hosts and engines' processes exclude the pool."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


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
    staging_mb = 7
    hosted = {"type": "fs", "base_path": str(tmp_path / "hosted"), "isolation": "process"}
    encoded = {
        "type": "fs",
        "base_path": str(tmp_path / "encoded"),
        "codec": "zstd",
        "codec_staging_mb": staging_mb,
    }
    flags = ("--l2-adapter", json.dumps(hosted), "--l2-adapter", json.dumps(encoded))
    with ServerProcess(
        tmp_path / "server", l1_mb=16, l2="embedded", chunk_tokens=CHUNK_TOKENS, flags=flags
    ) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
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
            assert staging and all("dd" in flags for flags in staging), (
                "decoded KV lies in the staging memory"
            )
