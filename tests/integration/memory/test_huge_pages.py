"""A server whose L1 is in huge pages: engines work as with small pages, and too few huge pages are a clear error."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvstrata.memory.memory_limit import HUGE_PAGE_BYTES, huge_pages
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerFailed, ServerProcess
from tests.harness.signals import send

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
