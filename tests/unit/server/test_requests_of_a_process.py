"""Processes and their requests: what repeated, lost and wrong requests leave behind, and sessions that end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
import tracemalloc
import weakref

import pytest

from kvstrata.keys.chunking import ChunkHasher
from kvstrata.observability import explain
from kvstrata.rpc import wire
from kvstrata.server.admin import prewarm
from kvstrata.server.admin.operations import Prompt
from kvstrata.server.processes import Use
from kvstrata.server.requests import promises, requests
from kvstrata.server.requests.reserve import KEYS_ON_LOOP
from kvstrata.tiers.base import log_broken_contract
from kvstrata.types import KEY_BYTES, MissReason, RequestIdentity
from tests.harness.alone import alone
from tests.harness.amount import amount
from tests.harness.instance_in_process import InstanceInProcess, Said, said
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, chain_of, layout, part

SESSION = b"s" * 16


def test_a_prewarm_finds_the_chunks_of_an_engine_with_draft_layers() -> None:
    server = InstanceInProcess()
    server.attach(SESSION, b"g" * 16, lookahead_tokens=3)
    tokens = list(range(4 * CHUNK_TOKENS + 2))
    [identity] = server.feed(said(SESSION, wire.Identify(1, RequestIdentity())))
    hasher = ChunkHasher(identity.root, CHUNK_TOKENS, lookahead_tokens=3)
    hasher.feed(tokens)
    server.store(SESSION, 2, identity, hasher.chain)
    assert prewarmed(server, tokens) == (3, 3)  # the last chunk's key covers tokens that are not known
    server.close()


@pytest.mark.parametrize("adapter", ["", "lora"])
def test_a_prewarm_is_for_the_weights_that_the_engines_newest_requests_name(server, adapter):
    tokens = list(range(3 * CHUNK_TOKENS))
    named = [f'["lora","{content}"]' if adapter else "" for content in "ab"]
    for number, within in enumerate(named):
        request = RequestIdentity(adapter=json.dumps(["weights", "a mark", within]))
        [identity] = server.feed(said(SESSION, wire.Identify(number + 1, request)))
    server.store(SESSION, 3, identity, chain_of(identity.root, 3))
    assert prewarmed(server, tokens, adapter=adapter) == (3, 3)
    assert prewarmed(server, tokens, adapter=request.adapter) == (3, 3)
    assert prewarmed(server, tokens, adapter="other") == (3, 0)


def prewarmed(server: InstanceInProcess, tokens: list[int], adapter: str = "") -> tuple[int, int]:
    """(chunks of a prewarm, those that are in L1)"""
    prewarms = server.parts.prewarms

    async def run() -> prewarm.Job:
        job = await prewarms.prewarm(Prompt(tokens=tokens, adapter=adapter, budget_bytes=1))
        await server.supervisor.idle()
        return job

    found = server.loop.run_until_complete(run())
    return found.chunks, found.l1_chunks


def test_a_prewarm_goes_on_when_its_engine_leaves_before_it_has_begun(server: InstanceInProcess) -> None:
    prewarms, group = server.parts.prewarms, server.parts.processes.groups[0]

    async def run() -> None:
        begun = asyncio.create_task(prewarms.prewarm(Prompt(tokens=list(range(CHUNK_TOKENS)))))
        await asyncio.sleep(0)
        [process] = server.parts.processes
        server.parts.processes.leave(process)
        assert not group.complete
        job = await begun
        await server.supervisor.idle()
        assert (job.chunks, job.state, job.reason) == (1, "done", MissReason.NEVER_STORED)

    server.loop.run_until_complete(run())


def test_a_job_that_fails_is_done_and_says_so(server, monkeypatch):
    prewarms = server.parts.prewarms

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(prewarms._prefetch, "fetch", fails)

    async def run() -> None:
        job = await prewarms.prewarm(Prompt(tokens=list(range(CHUNK_TOKENS))))
        await server.supervisor.idle()
        assert (job.state, job.reason) == ("done", "internal")
        assert not server.supervisor.failure.done()

    server.loop.run_until_complete(run())
    assert server.supervisor.failed_jobs == 1
    server.supervisor.failed_jobs = 0


def test_a_lookup_whose_name_its_group_still_holds_is_refused(server: InstanceInProcess) -> None:
    """A process may attach again under its session's name, and number its requests anew."""
    group, first, second = b"g" * 16, b"1" * 16, b"2" * 16
    server.attach(first, group)
    server.attach(second, group)
    chain = b""

    def look_up(seq: int) -> wire.AnyReply:
        [identity] = server.feed(said(first, wire.Identify(seq - 1, RequestIdentity())))
        assert isinstance(identity, wire.IdentifyReply)
        nonlocal chain
        if not chain:
            chain = chain_of(identity.root, 1)
            server.store(second, 2, identity, chain)
        [reply] = server.feed(said(first, wire.Lookup(seq, 1000, identity.identity_id, "", chain)))
        return reply

    [own] = server.feed(said(second, wire.Identify(1, RequestIdentity())))
    assert isinstance(own, wire.IdentifyReply)
    assert isinstance(leased := look_up(6), wire.LookupReply) and leased.n_chunks == 1
    server.gone(first)
    server.attach(first, group)
    refused = look_up(6)
    assert isinstance(refused, wire.Error) and (refused.code, refused.field) == ("bad_request", "seq")
    assert isinstance(again := look_up(8), wire.LookupReply) and again.n_chunks == 1
    server.check()


def test_a_process_with_too_many_running_requests_may_still_give_back(server, identity, monkeypatch):
    chain = chain_of(identity.root, 1)
    server.store(SESSION, 2, identity, chain)
    monkeypatch.setattr(requests, "MAX_TASKS_OF_PROCESS", 0)
    refused, released = server.feed(
        said(SESSION, wire.Lookup(4, 1000, identity.identity_id, "", chain)),
        said(SESSION, wire.Release(5, [])),
    )
    assert isinstance(refused, wire.Error) and refused.code == "refused"
    assert "0 requests that take time" in refused.message
    assert isinstance(released, wire.Ok)


def test_a_session_that_holds_much_gets_no_more_until_it_gives_some_back(server, identity, monkeypatch):
    chain = chain_of(identity.root, 1)
    server.store(SESSION, 2, identity, chain)
    monkeypatch.setattr(requests, "MAX_GRANTS", 1)
    lookups = [wire.Lookup(seq, 1000, identity.identity_id, "", chain) for seq in (4, 5, 7)]
    found, refused, _, again = server.feed(
        said(SESSION, lookups[0]),
        said(SESSION, lookups[1]),
        said(SESSION, wire.Release(6, [(SESSION, 4)])),
        said(SESSION, lookups[2]),
    )
    assert isinstance(found, wire.LookupReply) and isinstance(again, wire.LookupReply)
    assert isinstance(refused, wire.Error) and (refused.code, refused.retryable) == ("refused", True)


def test_a_process_promises_only_its_share_and_gets_it_back(server, identity, monkeypatch):
    monkeypatch.setattr(promises, "MAX_PROMISED_CHUNKS", 6)

    def promise(seq: int, n_chunks: int) -> wire.Ok | wire.Error:
        chain = chain_of(identity.root, n_chunks)
        [reply] = server.feed(said(SESSION, wire.Promise(seq, identity.identity_id, chain)))
        return reply

    assert promise(2, 4).count == 4
    refused = promise(3, 3)
    assert (refused.code, refused.field) == ("refused", "chain")
    server.feed(said(SESSION, wire.Cancel(4, 2)))
    assert promise(5, 6).count == 6


def test_a_number_that_was_used_names_nothing_new_and_takes_nothing(server, identity):
    chain = chain_of(identity.root, 1)
    server.store(SESSION, 2, identity, chain)
    lookup = said(SESSION, wire.Lookup(4, 1000, identity.identity_id, "", chain))
    found, again, back = server.feed(lookup, lookup, said(SESSION, wire.Ping(3)))
    assert isinstance(found, wire.LookupReply)
    for refused in (again, back):
        assert isinstance(refused, wire.Error) and (refused.code, refused.field) == ("bad_request", "seq")
    assert server.pool.stats()["leases"] == 1
    server.check()


def test_a_running_request_is_counted_where_it_began_though_its_process_shows_another_token(server, identity):
    [process] = server.parts.processes
    begun = process.uses
    chain = chain_of(identity.root, KEYS_ON_LOOP + 1)
    message = wire.Reserve(2, 1000, identity.identity_id, b"", chain, RECORD_BYTES)

    async def arrive() -> None:
        server.requests.on_frame(server.line(SESSION), wire.encode(message))
        process.uses = (Use(), Use())
        await server.supervisor.idle()

    server.loop.run_until_complete(arrive())
    assert [use.n_tasks for use in (*begun, *process.uses)] == [0, 0, 0]
    process.uses = begun
    server.check()


def test_a_lease_that_was_handed_on_is_not_asked_back(server, identity):
    server.attach(b"w" * 16, b"g" * 16)
    chain = chain_of(identity.root, 2)
    server.store(SESSION, 2, identity, chain)
    server.feed(
        said(SESSION, wire.Lookup(4, 1000, identity.identity_id, "", chain)),
        said(SESSION, wire.Release(5, [(SESSION, 4)])),
    )
    assert server.parts.grants.n_leases == 1 and server.parts.grants.revoke(server.pool.extents_bytes) == 0
    server.feed(said(SESSION, wire.Lookup(6, 1000, identity.identity_id, "", chain)))
    server.feed(said(b"w" * 16, wire.Release(1, [(SESSION, 4)])))
    assert server.parts.grants.revoke(server.pool.extents_bytes) == 1
    [pong] = server.feed(said(SESSION, wire.Ping(7)))
    assert isinstance(pong, wire.Pong) and pong.revoked == [6]
    server.check()


def test_after_a_cut_a_session_keeps_what_it_names_and_what_others_use(server, identity):
    worker = b"w" * 16
    server.attach(worker, b"g" * 16)
    chain = chain_of(identity.root, 4)
    server.store(SESSION, 2, identity, chain)
    server.feed(
        *(said(SESSION, wire.Lookup(seq, 1000, identity.identity_id, "", chain)) for seq in (4, 5, 6))
    )
    new = chain_of(identity.root, 1, 9000), chain_of(identity.root, 1, 9900)
    for seq, keys in zip((7, 8), new, strict=True):
        server.feed(said(SESSION, wire.Reserve(seq, 1000, identity.identity_id, b"", keys, RECORD_BYTES)))
    server.feed(said(SESSION, wire.Release(9, [(SESSION, 4)])))  # handed on to the worker
    [ended] = server.feed(said(SESSION, wire.Resume(10, [5, 7, 77])))
    assert isinstance(ended, wire.Ok) and ended.count == 2
    kept = server.parts.processes.get(SESSION)
    assert kept is not None and sorted(kept.grants) == [5, 7]
    assert sorted(lease.name[1] for lease in server.parts.grants.leases()) == [4, 5]
    server.check()


HEAD = b"\xdd\x00\x00\x00\x03\xa4ping\x09"
COUNT = wire.MAX_MESSAGE_BYTES - 100
BODIES = {
    "nested": b"\x91" * COUNT,
    "many": b"\xdd" + COUNT.to_bytes(4, "big") + b"\x01" * COUNT,
    "empty lists": b"\xdd" + COUNT.to_bytes(4, "big") + b"\x90" * COUNT,
    "text": b"\xdb" + COUNT.to_bytes(4, "big") + b"\xf0" * COUNT,
}


@pytest.mark.parametrize("body", BODIES)
def test_a_long_bad_message_costs_the_loop_little(server: InstanceInProcess, body: str) -> None:
    """A bad message of 8 MiB was decoded whole, only to find its number: that stopped the loop for seconds."""
    begun_s = time.thread_time()
    [reply] = server.feed(Said(SESSION, HEAD + BODIES[body]))
    assert time.thread_time() - begun_s < 0.2
    assert isinstance(reply, wire.Error) and reply.code == "bad_request"


def test_a_client_without_a_row_counts_and_reads_chunks_and_is_refused_the_rest_by_name(server, identity):
    chain = chain_of(identity.root, 3)
    server.store(SESSION, 2, identity, chain)
    nobody, digest = b"", part().digest()
    asked = (
        wire.Identify(1, RequestIdentity()),
        wire.Identify(2, RequestIdentity(), layout(), [digest]),
        wire.Lookup(3, 1000, 1, "", chain + bytes(KEY_BYTES)),
        wire.Retrieve(4, 1, chain[:KEY_BYTES], digest, 0, 100),
        wire.Retrieve(5, 2, chain[:KEY_BYTES], digest, 0, 100),
        wire.Ping(6),
        wire.Reserve(7, 1000, 1, b"", chain, 8192),
    )
    unnamed, named, found, read, unknown, pong, refused = server.feed(
        *(said(nobody, request) for request in asked)
    )
    assert isinstance(unnamed, wire.Error) and unnamed.field == "layout"
    assert isinstance(named, wire.IdentifyReply) and named.root == identity.root
    assert isinstance(found, wire.LookupReply) and (found.n_chunks, found.extents) == (3, b"")
    assert isinstance(read, wire.RetrieveReply) and len(read.body) == 100
    assert isinstance(unknown, wire.Error) and unknown.code == "unknown_identity"
    assert isinstance(pong, wire.Pong)
    assert (
        isinstance(refused, wire.Error) and refused.code == "not_permitted" and "reserve" in refused.message
    )
    assert server.pool.stats()["leases"] == 0


def test_a_refusal_for_lack_of_index_entries_names_the_setting() -> None:
    server = InstanceInProcess(l1_bytes=64 << 20, entries=64)
    session = b"s" * 16
    server.attach(session, b"g" * 16)
    [identity] = server.feed(said(session, wire.Identify(1, RequestIdentity())))
    assert isinstance(identity, wire.IdentifyReply)
    chain = chain_of(identity.root, 120)
    reserve = wire.Reserve(2, 1000, identity.identity_id, b"", chain, RECORD_BYTES)
    [reply] = server.feed(said(session, reserve))
    assert isinstance(reply, wire.ReserveReply) and wire.ReserveOutcome.ENTRIES_FULL in reply.outcomes
    keys = chain[32 * reply.outcomes.index(wire.ReserveOutcome.ENTRIES_FULL) :]
    server.feed(said(session, wire.Lookup(3, 1000, identity.identity_id, "request", keys)))
    [lookup] = server.parts.explainer.explain("request")["lookups"]
    assert lookup["first_miss"]["reason"] == "refused"
    assert (
        lookup["first_miss"]["detail"]
        == "entries_full: every entry of L1's index is in use; raise l1.entries"
    )
    server.close()


def test_an_adapter_that_raises_repeatedly_fills_no_log_and_keeps_nothing_alive(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvstrata")

    class Held:
        pass

    def load(held: Held) -> None:
        raise RuntimeError("broken")

    errors = []
    for _ in range(100):
        held = Held()
        there = weakref.ref(held)
        try:
            load(held)
        except RuntimeError as error:
            errors.append(error)
            del held
            log_broken_contract("an adapter of this test", "load", error)
        assert there() is None
    log_broken_contract("an adapter of this test", "put", RuntimeError("broken too"))
    first, second = [text for text in caplog.messages if "an adapter of this test" in text]
    assert "in load" in first and "put raised" in second


MEASURED = 600


def session_comes_and_goes(server: InstanceInProcess, number: int) -> None:
    """A session stores, aborts a store, looks up and ends, all under names that were not used before."""
    name = number.to_bytes(16, "big")[::-1]
    server.attach(name, name)
    [identity] = server.feed(said(name, wire.Identify(1, RequestIdentity(salt=f"salt {number}"))))
    assert isinstance(identity, wire.IdentifyReply)
    chain, probe = chain_of(identity.root, 2), number.to_bytes(8, "big")
    reserve = wire.Reserve(2, 1000, identity.identity_id, b"", chain, RECORD_BYTES, probe)
    server.feed(said(name, reserve), said(name, wire.Abort(3, 2)))
    server.store(name, 4, identity, chain)
    server.feed(
        said(name, wire.Lookup(8, 1000, identity.identity_id, f"request {number}", chain, probe)),
        said(name, wire.Release(9, [(name, 8)])),
    )
    server.gone(name)


def bytes_a_session(server: InstanceInProcess, first: int) -> float:
    """What each of MEASURED sessions leaves behind."""
    tracemalloc.start()
    try:
        for number in range(first, first + MEASURED):
            # The first 300 sessions replace entries from before the tracing, and allocate what tracing itself needs.
            if number == first + 300:
                gc.collect()
                before_bytes, _ = tracemalloc.get_traced_memory()
            session_comes_and_goes(server, number)
        gc.collect()
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after_bytes - before_bytes) / (MEASURED - 300)


@alone
def test_ended_sessions_leave_no_memory_behind() -> None:
    explain.MAX_NOTES = explain.MAX_PROBES = explain.MAX_LOOKUPS = 32  # in a process of its own
    server = InstanceInProcess()
    for number in range(1, 1 + MEASURED):
        session_comes_and_goes(server, number)
    rounds = [bytes_a_session(server, first * MEASURED + 1) for first in range(1, 1 + amount(1, 4))]
    assert max(rounds) < 64, rounds
    server.close()
