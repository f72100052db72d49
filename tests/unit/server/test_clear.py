"""Clear: dropped chunks are invisible at once, and free when nothing holds them; explain names the reason."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.keys.batch import split
from kvstrata.native.core import storage_keys
from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES
from tests.harness.instance_in_process import InstanceInProcess
from tests.harness.rpc_client import chain_of, part

SESSION = b"s" * 16


def keys_of(server: InstanceInProcess, identity: wire.IdentifyReply, n_chunks: int = 4) -> bytes:
    """Store a prompt; returns its storage keys."""
    chain = chain_of(identity.root, n_chunks)
    server.store(SESSION, 10, identity, chain)
    return storage_keys(identity.root, chain, part().digest())


def test_cleared_chunks_that_a_put_holds_are_invisible_at_once_and_free_once_the_put_has_ended(
    server: InstanceInProcess, identity: wire.IdentifyReply
) -> None:
    keys = keys_of(server, identity)
    put = server.pool.hold(keys[:KEY_BYTES])
    assert put is not None

    async def clear_and_wait() -> None:
        clearing, events = server.parts.clearing, server.parts.events
        at_once = await clearing.clear("l1", None)
        assert at_once.document() == {
            "cleared": {"l1": 4}, "pending": {"held": 1, "leased": 0}, "kept": {"claimed": 0},
        }  # fmt: skip
        assert server.pool.peek(keys, 1) == 0
        assert server.pool.stats()["used_bytes"] > 0
        waiting = asyncio.create_task(clearing.clear("l1", None, wait=True))
        await asyncio.sleep(0)
        events.drain()
        put.drop()
        while not waiting.done():
            events.drain()  # as the heartbeat does
            await asyncio.sleep(0)
        assert waiting.result().held == 0
        assert server.pool.stats()["used_bytes"] == 0

    server.loop.run_until_complete(clear_and_wait())


def test_claimed_chunks_survive_a_clear_and_are_counted(server, identity):
    keys = keys_of(server, identity)
    ticket, *_ = server.pool.lease(keys[: 2 * KEY_BYTES], 1, [0])
    done = server.loop.run_until_complete(server.parts.clearing.clear("l1", None))
    assert (done.n_chunks, done.held, done.leased, done.kept) == (2, 0, 0, 2)
    assert server.pool.peek(keys, 1) == 2
    server.pool.release(ticket)


@pytest.mark.parametrize(
    ("leaves", "by"),
    [
        (lambda pool, keys: pool.clear(), "clear"),
        (lambda pool, keys: pool.remove(keys), "an evict of the controller"),
    ],
)
def test_explain_names_why_a_chunk_left(server, identity, leaves, by):
    keys = keys_of(server, identity)
    leaves(server.pool, keys)
    server.feed()  # hears of the pool's events
    for key in split(keys):
        known = server.parts.explainer.note_of(key)
        assert known is not None and known.reason == "evicted" and known.detail.startswith(by)
