"""Models of full attention, and those whose KV has windows, states or chunks of attention: another process hits, with
the tokens of a run without cache."""

from __future__ import annotations

import random

import pytest

from tests.harness.amount import ALL, amount
from tests.tools.families import draw_lengths, measure

pytestmark = pytest.mark.vllm

IN_GATE = ("19m", "gemma3")
"""Full attention, and windows. Everything reads them from a peer too: records of all families take the same way."""
RARE = [pytest.param(name, marks=pytest.mark.long) for name in ("gpt-oss", "mistral", "llama4", "qwen3-next")]


@pytest.mark.parametrize("family", [*IN_GATE, *RARE])
def test_a_family_hits_from_l1_after_a_kill_from_disk_and_from_a_peer(family, tmp_path, vllm_python):
    seed = amount(1, random.randrange(10_000))
    lengths = draw_lengths(amount(2, 3), seed)
    ways = measure(family, lengths, tmp_path, outages=ALL, peer=ALL and family in IN_GATE)
    assert all(way.good for way in ways), (seed, lengths, ways)
