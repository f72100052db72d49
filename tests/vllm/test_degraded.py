"""An engine whose copies, server or own code fails: the same tokens, and what is counted and logged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.harness.records import Extents
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_engine import Calls
from tests.vllm.conftest import Rig, rig_of, until

pytestmark = pytest.mark.vllm

SCHEDULER_WAIT_S = 0.002
"""The longest that all waits of one call on the scheduler's thread may be ready to wait (promise P4)."""


@pytest.fixture(scope="module")
def rig(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine and its server, which the tests kill and freeze."""
    folder = tmp_path_factory.mktemp("degraded")
    with ServerProcess(folder / "server", l1_mb=128) as server:
        server.start()
        with rig_of(server, small_model, folder / "vllm") as rig:
            yield rig


def check_calls(rig):
    """Assert that no call on the engine's threads would have waited for the server.

    Workers may wait for copies, but the synchronous ones of this engine end in the calling thread.
    """
    methods = rig.vllm.ask("take_calls")["methods"]
    assert {"get_num_new_matched_tokens", "start_load_kv"} <= methods.keys()
    for name in Calls.SCHEDULER:
        if name in methods:
            assert methods[name]["wait_s"] <= SCHEDULER_WAIT_S, (name, methods)
    for name in Calls.WORKER:
        if name in methods:
            assert methods[name]["wait_s"] == 0, (name, methods)


@pytest.fixture
def rig_without_server(small_model: Path, tmp_path: Path) -> Iterator[Rig]:
    """An engine that is started before its server."""
    with (
        ServerProcess(tmp_path / "server", l1_mb=64) as server,
        rig_of(server, small_model, tmp_path / "vllm", attached=False) as rig,
    ):
        yield rig


def test_server_absent_at_start_then_caching_begins_by_itself(rig_without_server):
    rig = rig_without_server
    prompt = rig.fresh_prompt(1_000)
    cold = rig.vllm.generate(prompt)
    assert cold["cached_tokens"] == 0
    check_calls(rig)
    rig.server.start()
    until(rig.connected, "attaching to a server that came later")
    again = rig.again(prompt)
    assert (again["cached_tokens"], again["tokens"]) == (0, cold["tokens"])
    rig.until_stored(4)
    warm = rig.again(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (896, cold["tokens"])
    lines = rig.vllm.log_text().splitlines()
    [warning] = [line for line in lines if "no cache server answers" in line and "WARNING" in line]
    assert f"lmcache-server --port {rig.server.port} --socket-dir {rig.server.socket_dir}" in warning
    assert any("INFO" in line and "connected to cache server" in line for line in lines)


long = partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize("when", [long("before the request"), "in prefill", long("in decode")])
def test_a_frozen_server_costs_only_hits(rig, when):
    known, new = rig.fresh_prompt(1_000), rig.fresh_prompt(3_000)
    cold = rig.stored(known)
    expected = rig.vllm.generate(new, salt="reference", max_tokens=32)["tokens"]
    until(rig.forget, "letting all blocks go")
    rig.vllm.ask("take_calls")
    if when == "before the request":
        rig.server.freeze()
    request = rig.vllm.ask("submit", prompt=new, max_tokens=32)
    if when != "before the request":
        rig.vllm.ask("step", n=2 if when == "in prefill" else 8)
        rig.server.freeze()
    done = []
    while not done:
        done = rig.vllm.ask("step", n=4)
    assert [d["request"] for d in done] == [request] and done[0]["tokens"] == expected
    frozen = rig.again(known)
    assert frozen["tokens"] == cold["tokens"]
    check_calls(rig)
    rig.server.thaw()
    until(rig.connected, "noticing that the server goes on")
    # Right after a server's return its heartbeat may still be old.
    assert until(lambda: rig.full_hit(known, 896), "hitting again")["tokens"] == cold["tokens"]


@pytest.mark.parametrize("tokens_before", [long(2), 8])
def test_a_killed_server_costs_only_hits_and_its_pool_is_served_again(rig, tokens_before):
    known, new = rig.fresh_prompt(1_000), rig.fresh_prompt(3_000)
    cold = rig.stored(known)
    expected = rig.vllm.generate(new, salt="reference", max_tokens=32)["tokens"]
    until(rig.forget, "letting all blocks go")
    rig.vllm.ask("take_calls")
    rig.vllm.ask("submit", prompt=new, max_tokens=32)
    rig.vllm.ask("step", n=tokens_before)
    rig.server.kill()
    done = []
    while not done:
        done = rig.vllm.ask("step", n=4)
    assert done[0]["tokens"] == expected
    assert rig.again(known)["tokens"] == cold["tokens"]
    check_calls(rig)
    assert rig.server.start()["adopted"]
    until(rig.connected, "attaching again")
    # The tail may be verified a moment after the chunks before it.
    warm = until(lambda: rig.full_hit(known, 896), "hitting what was stored before")
    assert warm["tokens"] == cold["tokens"]


def test_server_that_lost_its_pool_is_filled_again(rig):
    known = rig.fresh_prompt(1_000)
    cold = rig.stored(known)
    rig.server.kill()
    rig.server.wipe_segment()
    assert not rig.server.start()["adopted"]
    until(rig.connected, "attaching again")
    again = rig.again(known)
    assert (again["cached_tokens"], again["tokens"]) == (0, cold["tokens"])
    rig.until_stored(4)
    warm = rig.again(known)
    assert (warm["cached_tokens"], warm["tokens"]) == (896, cold["tokens"])


def records_of_new_chunks(rig, prompt):
    """Store a prompt; returns (extents file, (offset, header) of each added record, result of the request)."""
    extents = Extents(rig.server.segment_dir)
    before = {header.key for header in extents.records().values()}
    result = rig.stored(prompt)
    added = [(at, h) for at, h in extents.records().items() if h.key not in before]
    return extents, added, result


def test_a_chunk_with_a_flipped_bit_is_computed_and_stored_again(rig):
    prompt = rig.fresh_prompt(1_400)
    extents, added, cold = records_of_new_chunks(rig, prompt)
    third = chain([header for _, header in added])[2]
    extents.flip_a_byte(next(at for at, header in added if header.key == third.key), third)
    bad = rig.again(prompt)
    assert bad["tokens"] == cold["tokens"]
    rig.vllm.ask("idle_steps", n=2)
    assert rig.vllm.ask("client")["worker"]["corrupt_chunks"] >= 1
    healed = until(lambda: rig.full_hit(prompt, 1_280), "storing the chunk again")
    assert healed["tokens"] == cold["tokens"]
    extents.close()


def chain(headers):
    """Headers in the order of their chunks."""
    by_parent = {header.parent_key: header for header in headers}
    ordered = [by_parent[bytes(32)]]
    while ordered[-1].key in by_parent:
        ordered.append(by_parent[ordered[-1].key])
    assert len(ordered) == len(headers)
    return ordered


def test_vllm_computes_with_the_stored_bytes(rig):
    """Other KV with valid checksums changes the output, which proves that hits really are loaded."""
    prompt = rig.fresh_prompt(1_000)
    extents, added, cold = records_of_new_chunks(rig, prompt)
    for seed, (at, header) in enumerate(added):
        extents.replace_payload(at, header, seed)
    warm = rig.again(prompt)
    assert warm["cached_tokens"] == 896
    assert warm["tokens"] != cold["tokens"]
    extents.close()
