"""What the scheduler side loads: which blocks, under which lease; and what follows when a load fails."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, WorkerReport
from kvstrata.types import EXTENT
from tests.harness.scheduler_side import ask, planned_loads, scene, step


def test_a_load_names_the_missing_blocks_and_skips_the_computed_ones():
    _client, side, request = scene(31, hits=4)
    tokens, _ = ask(side, request, computed=12)
    assert tokens == 12  # three whole chunks are cached; vLLM has computed the first one and a half of them
    (load,) = planned_loads(side, request, tokens, [list(range(101, 109))])
    assert load.blocks == [SKIP_BLOCK, 104, 105, 106]
    assert len(load.chain) == 2 * 32
    assert [e[0] for e in EXTENT.iter_unpack(load.extents)] == [2, 3, 4, 5]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_stays_synchronous_or_asynchronous_as_promised_when_vllm_takes_fewer_tokens(asynchronous):
    """Otherwise vLLM would wait for ever for the end of a load that was promised as asynchronous."""
    _, side, request = scene(40, hits=4, sync_load_bytes=399 if asynchronous else 400)
    assert ask(side, request) == (32, asynchronous)
    (load,) = planned_loads(side, request, 20, [list(range(1, 20))])
    assert load.asynchronous == asynchronous and load.blocks == [1, 2, 3, 4, 5, SKIP_BLOCK]


def test_what_is_computed_again_after_a_failed_load_is_stored_again_and_not_loaded_again():
    _, side, request = scene(40, hits=4)
    tokens, _ = ask(side, request)
    planned_loads(side, request, tokens, [list(range(1, 20))])
    side.heard([WorkerReport(1)], [], {5})
    (store,) = step(side, [(request, 16, 24)]).stores
    assert store.blocks == list(range(5, 11))
    step(side, preempted=[request.request_id])
    assert ask(side, request) == (0, False)
