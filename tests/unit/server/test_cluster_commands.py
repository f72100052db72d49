"""The answers of an instance to a controller's commands."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstrata.errors import BadRequest
from kvstrata.native.core import storage_keys
from kvstrata.rpc.cluster_wire import (
    MAX_PEER_KEYS,
    TO_INSTANCE,
    Claim,
    Clear,
    Do,
    Drain,
    Evict,
    Freeze,
    Owner,
    Pull,
    encode,
)
from kvstrata.server.cluster.commands import Actions, check
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
    pull = Pull(keys, identity.root)
    outcome = server.loop.run_until_complete(actions.carry_out(Do(1, pull, 60_000)))
    assert outcome.body == {"count": 1, "loaded": 2, "reason": ""}


KEY, ROOT = b"k" * 32, b"r" * 32
OWNER = Owner("other", 1, "", 1, True, "k" * 40)


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (Freeze(60_001), r"`int` <= 60000 - at `\$\[2\].freeze_ms`"),
        (Clear("l3"), r"'l3' - at `\$\[2\].tier`"),  # type: ignore[arg-type]
        (Evict(b""), r"length >= 32 - at `\$\[2\].keys`"),
        (Evict(bytes(32 * MAX_PEER_KEYS + 1)), "length <= 131072"),
        (Claim(KEY, 0.0), r"`float` > 0.0 - at `\$\[2\].ttl_s`"),
        (Pull(KEY, b"r"), r"length >= 32 - at `\$\[2\].identity`"),
        (Pull(KEY, ROOT, owner=msgspec.structs.replace(OWNER, peer_key="k")), r"\$\[2\].owner"),
        (Drain("yes"), r"Expected `bool`, got `str`"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_operation_is_no_message_and_the_reason_names_the_field(operation, says):
    with pytest.raises(msgspec.ValidationError, match=says):
        TO_INSTANCE.decode(encode(Do(1, operation, 1_000)))


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (Pull(KEY, ROOT, 2), r"keys: must be whole keys of 32 bytes, and a multiple of n_slices \(2\)"),
        (Evict(KEY + b"k"), "keys: must be whole keys of 32 bytes"),
        (Pull(KEY, None), "tokens: chunks that are named by keys cannot be copied"),
        (Pull(KEY, ROOT, spans=[0, 1]), "spans: found 2 for 1 slices"),
        (Pull(KEY, ROOT, record_bytes=[1, 1]), "record_bytes: found 2 for 1 slices"),
    ],
)
def test_keys_and_numbers_must_fit_the_slices(operation, says):
    with pytest.raises(BadRequest, match=says) as refused:
        check(operation)
    assert refused.value.field == says.partition(":")[0]
