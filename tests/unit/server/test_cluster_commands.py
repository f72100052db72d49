"""The answers of an instance to a controller's commands."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.errors import BadRequest
from kvstrata.native.core import storage_keys
from kvstrata.rpc.cluster_wire import CommandKind, Do
from kvstrata.server.cluster.commands import Actions, argument_of
from kvstrata.tiers.fetch import FetchOutcome
from tests.harness.instance_in_process import InstanceInProcess
from tests.harness.rpc_client import chain_of, part

SESSION = b"s" * 16


def actions_of(server: InstanceInProcess, **others: Any) -> Actions:
    """Actions on this instance, some parts replaced."""
    parts = copy.copy(server.parts)
    vars(parts).update(others)
    return Actions(parts, SimpleNamespace(leases=None))  # type: ignore[arg-type]


def test_a_pull_counts_the_chunks_that_are_there_when_it_ends(server, identity):
    chain = chain_of(identity.root, 4)
    server.store(SESSION, 2, identity, chain[:64])
    keys = storage_keys(identity.root, chain, part().digest())
    pool = server.pool

    class PrefetchWhileTheSecondChunkLeaves:
        async def fetch(self, asked: bytes, n_slices: int, **more: Any) -> FetchOutcome:
            assert pool.remove(keys[32:64]) == 1
            return FetchOutcome(2, 2, "")

    actions = actions_of(server, prefetch=PrefetchWhileTheSecondChunkLeaves())
    argument = {"keys": keys, "n_slices": 1, "identity": identity.root}
    outcome = server.loop.run_until_complete(actions.carry_out(Do(1, CommandKind.PULL, argument, 60_000)))
    assert outcome.body == {"count": 1, "loaded": 2, "reason": ""}


KEY, ROOT = b"k" * 32, b"r" * 32
OWNER = {
    "instance": "other",
    "incarnation": 1,
    "peer_endpoint": "",
    "n_keys": 1,
    "confirmed": True,
    "peer_key": "k" * 40,
}


@pytest.mark.parametrize(
    ("kind", "argument", "says"),
    [
        (
            CommandKind.FREEZE,
            {"freeze_ms": 60_001},
            "freeze_ms: must be a whole number from 0 to 60000, found 60001",
        ),
        (
            CommandKind.CLEAR,
            {"tier": "l3"},
            "tier: must be one of l1, l2, all, found 'l3'",
        ),
        (CommandKind.CLEAR, {"tier": "l1", "tenant": 1}, "tenant: must be a string, or null"),
        (CommandKind.EVICT, {}, "keys: must be 1 to 4096 keys of 32 bytes, but is not given"),
        (
            CommandKind.CLAIM,
            {"keys": KEY},
            "ttl_s: must be a number above 0 and at most 2592000, but is not given",
        ),
        (
            CommandKind.PULL,
            {"keys": KEY, "identity": ROOT, "n_slices": 2},
            "keys: must be whole keys of 32 bytes, and a multiple of n_slices (2) of them, found 32 bytes",
        ),
        (
            CommandKind.PULL,
            {"keys": KEY, "identity": ROOT, "owner": {**OWNER, "more": 1}},
            "owner.more: unknown key",
        ),
        (CommandKind.DRAIN, {"on": "yes"}, "on: must be true or false, found 'yes'"),
    ],
)
def test_a_wrong_argument_names_the_field_and_what_it_must_be(kind, argument, says):
    with pytest.raises(BadRequest) as refused:
        argument_of(Do(1, kind, argument, 1_000))
    assert refused.value.message.startswith(says)
    assert refused.value.field == says.partition(":")[0]
