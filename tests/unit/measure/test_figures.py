"""measure/: statistics, prompts and blocks from which `kvstrata bench` and the benchmarks make their figures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.measure.blocks import PagedBlocks
from kvstrata.measure.figures import chain_of, median_spread, percentile


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_with_that_share_of_the_values_below_it(values, share):
    found = percentile(values, share)
    assert found in values
    assert sum(value < found for value in values) <= share * len(values)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_the_median_lies_in_its_spread(values):
    median, (least, greatest) = median_spread(values)
    assert min(values) == least <= median <= greatest == max(values)


def test_chains_of_other_prompts_or_identities_share_no_key():
    chains = [chain_of(root, prompt, 5) for root in (b"a" * 32, b"b" * 32) for prompt in range(3)]
    keys = [chain[i : i + 32] for chain in chains for i in range(0, len(chain), 32)]
    assert len(set(keys)) == len(keys) == 30
    assert chain_of(b"a" * 32, 1, 2) == chains[1][:64]


def test_the_bytes_of_blocks_depend_only_on_the_seed():
    blocks = PagedBlocks(layers=2, num_blocks=6, block_bytes=100)
    blocks.fill([1, 4], "seed")
    first = blocks.read([1, 4])
    assert len(first) == 400 and blocks.read([0, 2, 3, 5]) == bytes(800)
    blocks.touch(5)
    assert blocks.read([1, 4]) == first
    blocks.fill([1, 4], "another")
    assert blocks.read([1, 4]) != first
    blocks.close()
