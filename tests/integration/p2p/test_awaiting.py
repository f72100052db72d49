"""Prefill and decode on two hosts: a lookup at one server waits for what an engine of the other one computes, and is
answered at once when that will not come."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstrata.client import LookupCall, PromiseCall
from kvstrata.types import MissReason
from tests.harness import network
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster
from tests.harness.network import Network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "-"),
]

CHUNKS = 12
WAIT_MS = 60_000
SETTINGS = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "2000"}
_seeds = itertools.count(1)


class Rig(NamedTuple):
    """An engine at server 0 on host 0 prefills, one at server 1 on host 1 decodes."""

    network: Network
    cluster: Cluster
    prefilling: CacheEngine
    decoding: CacheEngine
    given: list[PromiseCall]
    """The promises of a test, which end with it."""

    def asked(self, tokens: list[int], source: str = "instance-0", wait_ms: int = WAIT_MS) -> LookupCall:
        """Begin a lookup at the decoding engine; returns once it waits."""
        call = self.decoding.lookup(tokens, wait_ms=wait_ms, expects=bool(source), source=source)
        eventually("it waits", lambda: call.done or self.promises(1)["waits_now"])
        return call

    def promised(self, tokens: list[int], number: int = 0) -> PromiseCall:
        engine = (self.prefilling, self.decoding)[number]
        call = engine.client.promise(engine.identity(), engine.hasher(tokens).chain)
        self.given.append(call)
        eventually("it is promised", lambda: self.promises(number)["live"])
        return call

    def follows_promises(self, count: int) -> None:
        """Wait until the controller knows of so many promises."""
        ask = self.cluster.controller.ask
        eventually("the directory follows", lambda: ask("/v1/cluster")["directory"]["promised"] == count)

    def promises(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.servers[number].get("/v1/status")["promises"]
        return found

    def computed(self, tokens: list[int], first: int, end: int) -> None:
        """Compute and store these chunks, one at a time, each once the one before has crossed to the other server."""
        for chunk in range(first, end):
            part = tokens[: (chunk + 1) * CHUNK_TOKENS]
            assert set(self.prefilling.stored(part, chunk)) <= {"stored", "present"}
            eventually("it has come", lambda part=part: self.decoding.client.peek(
                self.decoding.identity(), self.decoding.hasher(part)) == len(part) // CHUNK_TOKENS)  # fmt: skip

    def computed_here(self, tokens: list[int], first: int, end: int) -> None:
        """Compute and store these chunks at the prefilling engine."""
        assert set(self.prefilling.stored(tokens[: end * CHUNK_TOKENS], first)) <= {"stored", "present"}

    def ends(self, call: LookupCall, n_chunks: int, reason: str) -> None:
        assert call.wait(WAIT_MS / 1000 / 2), "it waits on, though nothing will come"
        assert (call.result.n_chunks, call.result.reason) == (n_chunks, reason)
        if n_chunks:
            self.decoding.client.release([call.result.lease], group=True)
        eventually("nobody waits", lambda: not self.promises(1)["waits_now"])


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("awaiting")
    with (
        Network(folder, 2) as made,
        Cluster(folder, l1_mb=64, chunk_tokens=CHUNK_TOKENS, settings=SETTINGS, network=made) as cluster,
        contextlib.ExitStack() as stack,
    ):
        engines = [
            stack.enter_context(CacheEngine(server.socket_dir, block_bytes=32_768)).connect()
            for server in cluster.servers
        ]
        yield Rig(made, cluster, engines[0], engines[1], [])


@pytest.fixture(autouse=True)
def nothing_promised(rig: Rig) -> Iterator[None]:
    yield
    while rig.given:
        rig.given.pop().withdraw()


def test_each_chunk_crosses_while_the_next_one_is_computed_and_the_lookup_gets_them_all(rig: Rig) -> None:
    tokens = prompt(CHUNKS, next(_seeds))
    call = rig.asked(tokens)
    promise = rig.promised(tokens)
    rig.computed(tokens, 0, CHUNKS)
    promise.withdraw()
    assert call.wait(WAIT_MS / 1000) and (call.result.n_chunks, call.result.l2_chunks) == (CHUNKS, CHUNKS)
    assert not rig.decoding.check_load(tokens, call.result, sync=True), "bytes are missing"
    assert rig.promises(1)["waits"]["ready"] == 1 and not rig.promises(0)["peers_wait_now"]
    assert rig.promises(0)["peer_waits"]["ready"] >= CHUNKS // 4, (
        "the owner tells only when it is asked again"
    )


@pytest.mark.parametrize("stored", [0, 3])
def test_a_broken_promise_ends_the_wait_with_what_has_come(rig: Rig, stored: int) -> None:
    tokens = prompt(CHUNKS, next(_seeds))
    promise = rig.promised(tokens)
    call = rig.asked(tokens)
    rig.computed(tokens, 0, stored)
    eventually(
        "it is awaited there", lambda: rig.promises(0)["peers_wait_now"] and rig.promises(0)["peer_waits"]
    )
    assert not call.done
    promise.withdraw()
    rig.ends(call, stored, MissReason.PROMISE_BROKEN)


def test_a_lookup_that_has_waited_as_long_as_it_may_gets_what_has_come(rig: Rig) -> None:
    tokens = prompt(CHUNKS, next(_seeds))
    rig.promised(tokens)
    rig.computed_here(tokens, 0, 2)
    for wait_ms in (1_000, 5_000, 20_000):  # a busy machine may load nothing within a second
        call = rig.asked(tokens, wait_ms=wait_ms)
        if call.wait(WAIT_MS / 1000) and call.result.n_chunks == 2:
            break
    rig.ends(call, 2, MissReason.PROMISED)


def test_a_lookup_finds_by_the_directory_who_computes_its_prompt_and_gets_that_as_it_comes(rig: Rig) -> None:
    tokens = prompt(CHUNKS, next(_seeds))
    before = rig.asked(tokens, source="", wait_ms=2_000)
    assert before.wait(WAIT_MS / 1000) and not before.result.n_chunks, "nobody computes it"
    promise = rig.promised(tokens)
    rig.computed_here(tokens, 0, 2)
    rig.follows_promises(1)
    call = rig.asked(tokens[: 5 * CHUNK_TOKENS] + prompt(CHUNKS, next(_seeds)), source="")
    rig.computed(tokens, 2, 5)
    rig.ends(call, 5, MissReason.UNKNOWN_KEY)
    promise.withdraw()
    rig.follows_promises(0)


def test_of_two_instances_that_promise_the_same_one_waits_for_the_other(rig: Rig) -> None:
    tokens = prompt(CHUNKS, next(_seeds))
    promises = [rig.promised(tokens, number) for number in (0, 1)]
    rig.follows_promises(2)
    here = rig.prefilling.lookup(tokens, wait_ms=3_000)
    assert here.wait(WAIT_MS / 1000) and here.result.reason != MissReason.PROMISED, "both wait"
    call = rig.asked(tokens, source="")
    assert not call.done
    promises[0].withdraw()
    rig.ends(call, 0, MissReason.PROMISE_BROKEN)


def test_an_instance_that_is_not_known_is_not_waited_for(rig: Rig) -> None:
    rig.ends(rig.asked(prompt(CHUNKS, next(_seeds)), source="instance-9"), 0, MissReason.PROMISE_BROKEN)


@pytest.mark.parametrize("how", ["cut", pytest.param("stopped", marks=pytest.mark.long), "killed"])
def test_an_owner_that_is_gone_ends_the_wait_with_what_has_come(rig: Rig, how: str) -> None:
    tokens, owner, host = prompt(CHUNKS, next(_seeds)), rig.cluster.servers[0], rig.network.hosts[0]
    rig.promised(tokens)
    call = rig.asked(tokens)
    rig.computed(tokens, 0, 2)
    {"cut": host.cut, "stopped": owner.freeze, "killed": owner.kill}[how]()
    rig.ends(call, 2, MissReason.PROMISE_BROKEN)
    {"cut": host.mend, "stopped": owner.thaw, "killed": owner.start}[how]()
    rig.prefilling.connect()
    eventually("both are members", lambda: rig.cluster.member(0) and rig.cluster.member(1))
    eventually("nobody waits there", lambda: not rig.promises(0)["peers_wait_now"])

    def comes_again() -> bool:
        fresh = prompt(2, next(_seeds))
        promise, call = rig.promised(fresh), rig.asked(fresh)
        rig.computed_here(fresh, 0, 2)
        assert call.wait(WAIT_MS / 1000)
        promise.withdraw()
        if call.result.n_chunks:
            rig.decoding.client.release([call.result.lease], group=True)
        return call.result.n_chunks == 2

    eventually("what the owner computes comes again", comes_again)
