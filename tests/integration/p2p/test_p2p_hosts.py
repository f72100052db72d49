"""Two servers on two hosts, which reach each other over tcp alone, and what happens to them while a read is under way.

The link is made so slow that a prompt takes seconds, and what happens to it happens once a part of it has passed: in
the midst of a transfer, on a machine of any speed.  Nobody gets wrong bytes, everybody goes on, and what was being
written is free when nothing can write it any more.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import network
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster
from tests.harness.network import Network
from tests.harness.signals import send

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "-"),
]

MIB = 1 << 20
L1_MB = 64
BLOCK_BYTES = 131_072
CHUNKS, CHUNK_BYTES = 8, 4 * BLOCK_BYTES
SLOW_BYTES_PER_S = MIB
PASSED_BYTES = MIB
"""Bytes of a prompt of 4 MiB that have passed when something happens to its transfer."""
SETTINGS = {
    "KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "2000",
    "KVSTRATA_P2P_LOAD_TIMEOUT_MS": "3000",
}
FREED_S = 120.0
"""NIXL cannot end a read: the adapter host is killed for it after a while."""


def stored(engine: CacheEngine, tokens: list[int]) -> list[int]:
    """Store a prompt, again if need be: on a busy machine the client may give the server up for a moment."""
    eventually("it is stored", lambda: set(engine.stored(tokens)) <= {"stored", "present"})
    return tokens


class Rig(NamedTuple):
    """The owner is server 0 on host 0, the reader server 1 on host 1."""

    network: Network
    cluster: Cluster
    owner: CacheEngine
    reader: CacheEngine
    hosted: bool

    def known(self, seed: int) -> list[int]:
        """Store a prompt at the owner and wait until the controller knows it; returns the prompt."""
        tokens = stored(self.owner, prompt(CHUNKS, seed))
        self.cluster.until_known(0)
        return tokens

    def read(self, tokens: list[int]) -> None:
        """Wait until the whole prompt is a hit with right bytes; that may take some tries."""
        eventually("it is a hit", lambda: self.reader.hit(tokens) == CHUNKS)

    def in_the_midst(self, tokens: list[int], happens: Callable[[], None]) -> int:
        """Call `happens` once a part of the prompt has passed the link; returns how many chunks the reader hit."""
        before, hits, brief = self.sent_bytes(), [], {"deadline_ms": 5_000, "again_s": 0.0}
        self.network.hosts[0].slow(SLOW_BYTES_PER_S)
        reading = threading.Thread(target=lambda: hits.append(self.reader.hit(tokens, **brief)))
        reading.start()
        eventually(
            "a part has passed, unless a busy machine has outrun the load",
            lambda: self.sent_bytes() - before > PASSED_BYTES or not reading.is_alive(),
        )
        happens()
        assert self.sent_bytes() - before < CHUNKS * CHUNK_BYTES
        # The reader's server serves its engine meanwhile.
        own = stored(self.reader, prompt(2, seed=77))
        eventually("its own prompt is a hit", lambda: self.reader.hit(own) == 2)
        reading.join()
        return hits[0]

    def sent_bytes(self) -> int:
        return self.network.hosts[0].sent_bytes()

    def freed(self) -> None:
        """Wait until no extent of the reader's pool is being written; asserts that the pool is sound."""
        ends_s = time.monotonic() + FREED_S
        while not self._idle(1):
            assert time.monotonic() < ends_s, "bytes are held for ever"

    def _idle(self, number: int) -> bool:
        pool: dict[str, Any] = self.cluster.servers[number].get("/v1/status")["pool"]
        return pool["holds"] == 0 and pool["reservations"] == 0 and pool["bytes"]["quarantined"] == 0

    def goes_on(self, seed: int) -> None:
        """The reader reads from the owner again, and both end idle."""
        self.network.hosts[0].fast()
        eventually("both are members", lambda: self.cluster.member(0) and self.cluster.member(1))
        self.owner.connect()
        self.read(self.known(seed))
        eventually("the owner keeps nothing", lambda: self._idle(0))

    def host_pid(self, number: int) -> int:
        """Pid of a server's adapter host."""
        adapters = self.cluster.servers[number].get("/v1/status")["l2_adapters"]
        return int(adapters["peer-0"]["host"]["pid"])


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.long)])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    hosted = request.param == "nixl"
    settings = {**SETTINGS, "KVSTRATA_P2P_ENGINE": request.param}
    if hosted:
        settings["UCX_TLS"] = "tcp"
        settings |= request.getfixturevalue("nixl_environment")
    with (
        Network(tmp_path, 2) as made,
        Cluster(tmp_path, l1_mb=L1_MB, chunk_tokens=CHUNK_TOKENS, settings=settings, network=made) as cluster,
        contextlib.ExitStack() as stack,
    ):
        engines = [
            stack.enter_context(CacheEngine(server.socket_dir, block_bytes=BLOCK_BYTES)).connect()
            for server in cluster.servers
        ]
        rig = Rig(made, cluster, engines[0], engines[1], hosted)
        rig.read(rig.known(seed=1))
        yield rig


def test_a_prompt_is_read_from_another_host(rig: Rig) -> None:
    before = rig.sent_bytes()
    rig.read(rig.known(seed=2))
    assert rig.sent_bytes() - before >= CHUNKS * CHUNK_BYTES
    assert rig.cluster.peer_records(1) == 2 * CHUNKS
    rig.freed()


def test_a_link_that_is_cut_in_mid_read_is_a_miss_and_is_used_again_once_it_is_mended(rig: Rig) -> None:
    assert rig.in_the_midst(rig.known(seed=2), rig.network.hosts[0].cut) < CHUNKS
    rig.freed()
    rig.network.hosts[0].mend()
    rig.goes_on(seed=3)


def test_an_owner_killed_in_mid_read_is_a_miss(rig: Rig) -> None:
    owner = rig.cluster.servers[0]
    assert rig.in_the_midst(rig.known(seed=2), owner.kill) < CHUNKS
    rig.freed()
    owner.start()
    rig.goes_on(seed=3)


def test_late_bytes_of_an_owner_frozen_in_mid_read_are_written_into_no_extent_in_use(rig: Rig) -> None:
    owner = rig.cluster.servers[0]
    stopped = [owner.pid, *([rig.host_pid(0)] if rig.hosted else [])]

    def all_stop() -> None:
        for pid in stopped:
            send(pid, signal.SIGSTOP)

    before = rig.sent_bytes()
    assert rig.in_the_midst(rig.known(seed=2), all_stop) < CHUNKS
    # Whatever is free in the reader's L1 is somebody's now: these and what is held fit, and hardly anything else.
    fresh = [stored(rig.reader, prompt(CHUNKS, seed)) for seed in range(100, 114)]
    for pid in stopped:
        send(pid, signal.SIGCONT)
    if rig.hosted:  # our own engine does not ask for more after the deadline
        eventually("the rest has come", lambda: rig.sent_bytes() - before >= CHUNKS * CHUNK_BYTES)
    rig.freed()
    for tokens in fresh:
        rig.read(tokens)
    rig.goes_on(seed=3)


@pytest.mark.long
@pytest.mark.parametrize("rig", ["nixl"], indirect=True)
@pytest.mark.parametrize("whose", [0, 1], ids=["owner", "reader"])
def test_an_adapter_host_killed_in_mid_read_is_a_miss_and_another_one_takes_its_place(
    rig: Rig, whose: int
) -> None:
    pid = rig.host_pid(whose)
    assert rig.in_the_midst(rig.known(seed=2), lambda: send(pid, signal.SIGKILL)) < CHUNKS
    rig.freed()
    rig.goes_on(seed=3)
    assert rig.host_pid(whose) != pid
