"""Real engines of the oldest and the newest version of vLLM that run on a CPU, with one server."""

from __future__ import annotations

import random

import pytest

from tests.tools import vllm_python as pythons
from tests.tools.families import as_it_should, draw_lengths, run_for_real

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def test_versions_hit_their_own_records_and_those_of_each_other_exactly_if_the_facts_agree(
    vllm_python, tmp_path
):
    seed = random.randrange(10_000)
    try:
        ways = list(run_for_real(pythons.for_real(), draw_lengths(2, seed), tmp_path))
    except pythons.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    assert {name for _, way in ways for name in [way.name]} >= {
        f"records of {pythons.for_real()[0]}",
        f"records of {pythons.for_real()[0]}, with other facts",
    }
    assert all(as_it_should(way) for _, way in ways), (seed, ways)
