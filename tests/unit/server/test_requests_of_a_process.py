"""One process takes only its share of the tasks in which requests run, and of the numbers of its session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstrata.keys.chunking import ChunkHasher
from kvstrata.rpc import frame as frames
from kvstrata.rpc import wire
from kvstrata.rpc.frame import MAX_UNPROVEN_BYTES, prove
from kvstrata.rpc.session import MAX_SEQ_STEP
from kvstrata.server.admin import prewarm
from kvstrata.server.requests import boundary, running
from kvstrata.types import MissReason, RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess
from tests.harness.rpc_client import CHUNK_TOKENS, chain_of

SESSION = b"s" * 16


def test_a_prewarm_finds_the_chunks_of_an_engine_with_draft_layers() -> None:
    server = InstanceInProcess()
    server.attach(SESSION, b"g" * 16, lookahead_tokens=3)
    tokens = list(range(4 * CHUNK_TOKENS + 2))
    [identity] = server.feed(wire.encode(wire.Identify(SESSION, 1, RequestIdentity())))
    hasher = ChunkHasher(identity.root, CHUNK_TOKENS, lookahead_tokens=3)
    hasher.feed(tokens)
    server.store(SESSION, 2, identity, hasher.chain)
    assert prewarmed(server, tokens) == (3, 3)  # the last chunk's key covers tokens that are not known
    server.close()


@pytest.mark.parametrize("adapter", ["", "lora"])
def test_a_prewarm_is_for_the_weights_that_the_engines_newest_requests_name(
    server: InstanceInProcess, adapter: str
) -> None:
    tokens = list(range(3 * CHUNK_TOKENS))
    named = [f'["lora","{content}"]' if adapter else "" for content in "ab"]
    for number, within in enumerate(named):
        request = RequestIdentity(adapter=json.dumps(["weights", "a mark", within]))
        [identity] = server.feed(wire.encode(wire.Identify(SESSION, number + 1, request)))
    server.store(SESSION, 3, identity, chain_of(identity.root, 3))
    assert prewarmed(server, tokens, adapter=adapter) == (3, 3)
    assert prewarmed(server, tokens, adapter=request.adapter) == (3, 3)
    assert prewarmed(server, tokens, adapter="other") == (3, 0)


def prewarmed(server: InstanceInProcess, tokens: list[int], adapter: str = "") -> tuple[int, int]:
    """(chunks of a prewarm, those that are in L1)"""
    prewarms = server.admin.prewarms

    async def run() -> dict[str, Any] | None:
        job = await prewarms.prewarm(
            model="", request=RequestIdentity(adapter=adapter), tokens=tokens, budget_bytes=1, ttl_ms=1_000
        )
        await server.supervisor.idle()
        return prewarms.job(job)

    found = server.loop.run_until_complete(run()) or {}
    return found["chunks"], found["l1_chunks"]


def test_a_prewarm_goes_on_when_its_engine_leaves_before_it_has_begun(server: InstanceInProcess) -> None:
    prewarms, group = server.admin.prewarms, server.tables.processes.groups[0]
    wanted = group.packed_slices

    async def run() -> list[bytes]:
        asked: list[bytes] = []
        derive = prewarms._lane.run
        prewarms._lane.run = lambda work, root, chain, slices: (  # type: ignore[method-assign, assignment]
            asked.append(slices),
            derive(work, root, chain, slices),
        )[1]
        number = prewarms.start(group, bytes(32), 0, chain_of(bytes(32), 1), 0, 1_000)
        server.tables.processes.gone(SESSION)
        assert not group.complete
        await server.supervisor.idle()
        done = prewarms.job(number)
        assert done is not None and (done["state"], done["reason"]) == ("done", MissReason.NEVER_STORED)
        return asked

    assert server.loop.run_until_complete(run()) == [wanted], (
        "all slices of the engine, not those that are left"
    )


def test_a_job_that_fails_is_done_and_says_so(
    server: InstanceInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    prewarms, group = server.admin.prewarms, server.tables.processes.groups[0]

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(prewarm, "peek", fails)

    async def run() -> None:
        number = prewarms.start(group, bytes(32), 0, chain_of(bytes(32), 1), 0, 1_000)
        await server.supervisor.idle()
        assert (prewarms.job(number) or {})["reason"] == "internal"
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
        [identity] = server.feed(wire.encode(wire.Identify(first, seq - 1, RequestIdentity())))
        assert isinstance(identity, wire.IdentifyReply)
        nonlocal chain
        if not chain:
            chain = chain_of(identity.root, 1)
            server.store(second, 2, identity, chain)
        groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
        [reply] = server.feed(wire.encode(wire.Lookup(first, seq, 1000, identity.identity_id, "", groups)))
        return reply

    [own] = server.feed(wire.encode(wire.Identify(second, 1, RequestIdentity())))
    assert isinstance(own, wire.IdentifyReply)
    assert isinstance(leased := look_up(6), wire.LookupReply) and leased.n_chunks == 1
    server.gone(first)
    server.attach(first, group)
    refused = look_up(6)
    assert isinstance(refused, wire.Error) and (refused.code, refused.field) == ("bad_request", "seq")
    assert isinstance(again := look_up(8), wire.LookupReply) and again.n_chunks == 1
    server.check()


def test_a_process_with_too_many_running_requests_may_still_give_back(
    server: InstanceInProcess, identity: wire.IdentifyReply, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(identity.root, 1)
    groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
    server.store(SESSION, 2, identity, chain)
    monkeypatch.setattr(running, "MAX_TASKS_OF_PROCESS", 0)
    refused, released = server.feed(
        wire.encode(wire.Lookup(SESSION, 4, 1000, identity.identity_id, "", groups)),
        wire.encode(wire.Release(SESSION, 5, [])),
    )
    assert isinstance(refused, wire.Error) and refused.code == "refused"
    assert "0 requests that take time" in refused.message
    assert isinstance(released, wire.Ok)


def test_one_request_cannot_use_up_the_numbers_of_its_session(server: InstanceInProcess) -> None:
    """1,100 requests near 2^62 once made every later number of the session too old."""
    [first] = server.feed(wire.encode(wire.Release(SESSION, 10, [])))
    assert isinstance(first, wire.Ok)
    far = 100 + MAX_SEQ_STEP
    for attempt, number in enumerate((far, 1 << 62)):
        for request in (
            wire.Release(SESSION, number, []),
            wire.Ping(SESSION, number),
            wire.Ping(SESSION, number, []),
            wire.Cancel(SESSION, 11 + attempt, number),
        ):
            [reply] = server.feed(wire.encode(request))
            assert isinstance(reply, wire.Error) and reply.code == "bad_request", request
            assert reply.field in ("seq", "target") and "one counter" in reply.message
    replies = server.feed(*(wire.encode(wire.Release(SESSION, 20 + n, [])) for n in range(1_100)))
    assert all(isinstance(reply, wire.Ok) for reply in replies)
    [pong] = server.feed(wire.encode(wire.Ping(SESSION, 1_200 + MAX_SEQ_STEP // 2)))
    assert isinstance(pong, wire.Pong), "a session that only pings moves on, too"


HEAD = b"\xdd\x00\x00\x00\x04\xa4ping\xc4\x10"
BODIES = {
    "nested": b"\x91" * (8 << 20),
    "many": b"\xdd\x00\x7f\x00\x00" + b"\x01" * (8 << 20),
    "empty lists": b"\xdd\x00\x7f\x00\x00" + b"\x90" * (8 << 20),
    "text": b"\xdb\x00\x7f\x00\x00" + b"\xf0" * (8 << 20),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("sender", ["nobody", "a session without its proof", "a session"])
def test_a_long_frame_of_anybody_is_never_decoded(
    server: InstanceInProcess, monkeypatch: pytest.MonkeyPatch, body: str, sender: str
) -> None:
    """A bad frame of 8 MiB was decoded whole, only to find its number: that stopped the loop for seconds."""
    decoded: list[int] = []
    monkeypatch.setattr(boundary, "decode_request", lambda message: decoded.append(len(message)))
    session = wire.NO_SESSION if sender == "nobody" else SESSION
    message = HEAD + session + b"\x09" + BODIES[body]
    frame = server.proven(message) if sender == "a session" else message
    [reply] = server.feed_frames(frame)
    assert isinstance(reply, wire.Error) and reply.seq == 9
    assert reply.code == ("not_permitted" if "without" in sender else "bad_request")
    assert decoded == []


def test_without_a_session_only_short_frames_are_decoded(server: InstanceInProcess) -> None:
    for session in (wire.NO_SESSION, b""):
        head = b"\x94\xa4ping\xc4" + bytes([len(session)]) + session + b"\x05\xc5\xff\xff"
        short = head + bytes(MAX_UNPROVEN_BYTES - len(head))
        for message, says in ((short, ""), (short + b"\0", "a frame without a session has at most 65536")):
            [reply] = server.feed_frames(message)
            assert isinstance(reply, wire.Error) and says in reply.message, reply
    assert prove(bytes(32), b"")[: len(frames.PROOF_PREFIX)] == frames.PROOF_PREFIX
