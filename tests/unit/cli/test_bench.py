"""Figures of `kvstrata bench` and the benchmarks, and arguments of `bench l2`; tests/integration measures adapters."""

from __future__ import annotations

import asyncio
import ctypes
import os
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli import bench
from kvstrata.clock import SystemClock
from kvstrata.errors import InternalError, Refused
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.measure.figures import chain_of, median_spread, percentile
from kvstrata.measure.l2 import Records, Work
from kvstrata.testing.strategies import Settled
from kvstrata.tiers.base import Ask, Outcome, Presence
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.tier import Tier, limits_of


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


PAYLOAD = 8192
FS = '{"type": "fs", "base_path": "%s", "min_free_gb": 0}'


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(Exit status, text on standard error) of the command."""
    status = bench.main(["l2", *arguments])
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return status, err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--l2-adapter", "none"), "--l2-adapter: must name one adapter, found 0"),
        (("--l2-adapter", '{"type": "fs", "base": 1}'), "l2_adapters[0].base_path"),
        (("--l2-adapter", FS, "--chunk-mb", "x"), "--chunk-mb: must be MiB from 1/256 to 2048"),
        (("--l2-adapter", FS, "--chunk-mb", "0.001"), "whole pages of 4096 bytes"),
        (("--l2-adapter", FS, "--count", "0"), "--count: must be a whole number from 1 to 65536, found '0'"),
        (("--l2-adapter", FS, "--count", "65536", "--chunk-mb", "2048"), "give a smaller --count"),
    ],
)
def test_wrong_arguments_are_named_before_the_adapter_is_opened(capsys, arguments, says):
    status, err = ended(capsys, *arguments)
    assert status in (1, 2) and says in err


class Inner:
    """A real adapter of which one operation goes wrong."""

    def __init__(self, inner: Any, wrong: str = "") -> None:
        self.inner, self.wrong = inner, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def put(self, items: Any) -> Any:
        outcomes = await self.inner.put(items)
        return [Settled(Outcome.FAILED, "io"), *outcomes[1:]] if self.wrong == "put" else outcomes

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        found = await self.inner.exists(keys, ask)
        return bytes([Presence.PRESENT]) * len(found) if self.wrong == "exists" else found

    async def load(self, items: Any) -> Any:
        outcomes = await self.inner.load(items)
        if self.wrong == "load":
            return [*outcomes[:-1], Settled(Outcome.ABSENT)]
        if self.wrong == "bytes":
            hold = items[-1].hold  # dropped, but the reservation still keeps its bytes
            ctypes.memset(hold.address + hold.length - 1, 0xA5, 1)
            ctypes.memset(hold.address + hold.length - 2, 0xA4, 1)
        return outcomes


async def measure(folder: Any, wrong: str) -> None:
    config = configure_tier(FS % folder, 0)
    records = Records(PAYLOAD, 5, 2)
    tier = Tier(config, limits_of(config, 1 << 20), SystemClock())
    await tier.open(records.context())
    inner = Inner(tier, wrong)
    work = Work(cast("Tier", inner), records)
    try:
        await work.run()
    finally:
        inner.wrong = ""
        assert await work.end() == 0
        await tier.close()
        assert records.pool.stats()["holds"] == 0
        records.close()


def stored(folder: Any) -> int:
    return sum(name.endswith(".kvc") for _, _, names in os.walk(folder) for name in names)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ("put", Refused, r"put: 1 of 2 records: failed \(io\)"),
        ("load", Refused, "load: 1 of 2 records: absent"),
        ("bytes", InternalError, "load gave other bytes than were stored"),
        ("exists", InternalError, "keys that were never stored are present"),
    ],
)
def test_wrong_answers_of_an_adapter_are_caught_and_no_record_stays(tmp_path, wrong, kind, says):
    with pytest.raises(kind, match=says):
        asyncio.run(measure(tmp_path, wrong))
    assert stored(tmp_path) == 0
