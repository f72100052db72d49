"""What real servers leave in shared memory, what they say about it, and who may free it."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration


def last_line(server: ServerProcess) -> str:
    return server.log.read_text().splitlines()[-1]


def rows(server: ServerProcess) -> list[dict[str, Any]]:
    """The rows of `pool list` for this server's pools."""
    found = json.loads(own_commands.run("kvstrata", "ctl", "pool", "list", "--json").stdout)
    return [row for row in found if row["place"] == str(server.segment_dir)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, supervised=True) as made:
        yield made


def start_whole(server: ServerProcess) -> None:
    """Start the server and wait until the kernel has given it all of L1."""
    server.start()
    eventually("L1 is faulted in", lambda: server.get("/v1/status")["pool"]["prefaulted_bytes"] >= 64 << 20)


def test_the_last_line_of_a_stop_names_the_pool_that_stays_and_frees_it(server: ServerProcess) -> None:
    start_whole(server)
    assert server.stop() == 0
    line = last_line(server)
    [row] = rows(server)
    assert f"pool_kept place={server.segment_dir} bytes={row['memory_bytes']}" in line
    assert row["memory_bytes"] >= 64 << 20  # and what the kernel has given to the index so far
    assert row["owners"] == []
    freeing = line.partition('to_free="')[2].removesuffix('"')
    assert own_commands.run(*shlex.split(freeing)).returncode == 0
    assert not server.segment_dir.exists()
    assert server.start()["adopted"] is False


def test_where_no_file_can_be_had_the_keeper_keeps_the_pool_for_the_next_server(server):
    server._environment["KVSTRATA_L1_SEGMENT_DIR"] = "/dev/shm/no/such/place"
    start_whole(server)

    def started() -> list[tuple[str, str]]:
        """(pid, whether it adopted L1) of each server so far."""
        return re.findall(r" ready .*?pid=(\d+) .*adopted=(\w+)", server.log.read_text())

    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        assert engine.stored(prompt(2)) == ["stored"] * 2
        for count in (2, 3):
            epoch = engine.client.epoch
            send(int(started()[-1][0]), 9)
            eventually(
                "the engine is attached to the next server",
                functools.partial(lambda before: engine.client.epoch > before, epoch),
            )
            engine.connect()
            assert engine.hit(prompt(2)) == 2
            assert [adopted for _, adopted in started()] == ["False", *["True"] * (count - 1)]
        kept = [name for name in os.listdir(f"/proc/{server.pid}/fd") if is_memfd(server.pid, name)]
        assert len(kept) == 3, "descriptors of earlier servers are closed"
        assert server.stop() == 0
    assert last_line(server).endswith("pool_removed place=memfd engines=1")


def is_memfd(pid: int, fd: str) -> bool:
    return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:kvstrata")


def test_a_pool_to_be_forgotten_goes_at_a_clean_exit_only(tmp_path: Path) -> None:
    with ServerProcess(
        tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=("--forget-on-exit",), supervised=True
    ) as server:
        first = server.start()["pid"]
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            assert engine.stored(prompt(2)) == ["stored"] * 2
            send(first, 9)
            eventually("the next server answers", lambda: engine.client.epoch > server.ready["epoch"])
            engine.connect()
            assert engine.hit(prompt(2)) == 2
            assert server.stop() == 0
        assert last_line(server).endswith(f"pool_removed place={server.segment_dir} engines=1")
        assert not server.segment_dir.exists()


def test_only_a_pool_without_server_keeper_and_engine_is_freed(server: ServerProcess) -> None:
    def refused(owner: str) -> bool:
        done = own_commands.run("kvstrata", "ctl", "pool", "free", str(server.segment_dir))
        assert done.returncode == 1 and server.segment_dir.exists()
        return f"in use by {owner}" in done.stderr

    def owners() -> list[str]:
        return rows(server)[0]["owners"]

    serving = server.start()["pid"]
    assert refused(f"server {serving}")
    eventually("the keeper has locked the pool", lambda: f"keeper {server.pid}" in owners())
    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        server.freeze()
        send(serving, 9)  # the keeper cannot start the next server now
        eventually("the server is gone", lambda: "server" not in owners()[0])
        assert owners()[0] == f"keeper {server.pid}" and owners()[1].startswith("1 engine process (")
        assert refused(f"keeper {server.pid}")
        server.thaw()
        eventually("the next server answers", lambda: engine.client.epoch > server.ready["epoch"])
        assert server.stop() == 0
        assert owners()[0].startswith("1 engine process (")
        assert refused("1 engine process")
