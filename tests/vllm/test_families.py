"""Models of full attention, and those whose KV has windows, states or chunks of attention: another process hits, with
the tokens of a run without cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.tools.families import draw_lengths, measure

pytestmark = pytest.mark.vllm

PEERS = ("19m", "gemma3")
"""The families that are read from a peer, too: records of all families take the same way."""


@pytest.mark.parametrize("family", ["19m", "gemma3", "gpt-oss", "mistral", "llama4", "qwen3-next"])
def test_a_family_hits_from_l1_after_a_kill_from_disk_and_from_a_peer(
    family: str, tmp_path: Path, vllm_python: Path
) -> None:
    seed = random.randrange(10_000)
    lengths = draw_lengths(3, seed)
    ways = measure(family, lengths, tmp_path, peer=family in PEERS)
    assert all(way.good for way in ways), (seed, lengths, ways)
