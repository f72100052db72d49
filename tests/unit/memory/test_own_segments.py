"""Segments of tenants with pools of their own: what they cost, what is adopted, and what is left of former tenants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.memory import holder_client, segment
from kvstrata.memory.own_segments import PREFIX, OwnSize, open_own_segments, segment_name
from kvstrata.memory.segment import Segment
from kvstrata.memory.segment_settings import SegmentSettings
from kvstrata.native.pool import Pool
from kvstrata.rpc.wire import ReserveOutcome

MIB = 1 << 20
SIZE = OwnSize(16 * MIB, 16 * MIB)
RECORD_BYTES = 16 << 10
"""As short as records have to be for a pool of this size to have all of its entries in use."""
IDENTITY = bytes(range(32))


@pytest.fixture
def shared(settings: SegmentSettings) -> Iterator[Segment]:
    found = Segment.open(settings)
    yield found
    found.destroy()


def keys(count: int) -> bytes:
    return b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(count))


def fill(pool: Pool) -> int:
    """Reserve extents until the pool is full; returns how many."""
    wanted = pool.extents_bytes // RECORD_BYTES
    _, outcomes, _ = pool.reserve(keys(wanted), b"", RECORD_BYTES, 0, IDENTITY)
    return outcomes.count(ReserveOutcome.RESERVED)


def private_bytes() -> int:
    """Memory of this process that no file has."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Anonymous in smaps_rollup")


def test_a_full_pool_of_16_mib_costs_at_most_a_twentieth_more(
    settings: SegmentSettings, shared: Segment
) -> None:
    count = 8
    before = private_bytes()
    opened = open_own_segments(
        settings, shared.pool.epoch, {f"tenant {number}": SIZE for number in range(count)}
    )
    try:
        for one in opened.values():
            assert fill(one.pool) == SIZE.quota_bytes // RECORD_BYTES
        files = sum(
            file.stat().st_blocks * 512
            for folder in settings.directory.glob(f"{PREFIX}*")
            for file in folder.iterdir()
        )
        assert files >= count * SIZE.quota_bytes, "all extents have memory"
        assert (files + private_bytes() - before) / count <= 1.05 * SIZE.quota_bytes
    finally:
        for one in opened.values():
            one.destroy()


def test_a_pool_with_no_chunk_takes_no_memory_for_extents(settings: SegmentSettings, shared: Segment) -> None:
    [own] = open_own_segments(settings, shared.pool.epoch, {"green": SIZE}).values()
    folder = settings.directory / f"{PREFIX}{segment_name('green')}"
    assert (folder / "extents").stat().st_blocks == 0
    assert own.pool.epoch == shared.pool.epoch
    own.destroy()
    assert not folder.exists()


@pytest.mark.parametrize("backing", ["files", "memfd"])
def test_tenants_segments_are_adopted_and_those_of_former_tenants_removed(
    settings: SegmentSettings, backing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backing == "memfd":
        monkeypatch.setattr(segment, "free_bytes", lambda directory: 0)
    holder = settings.socket_dir / "holder.sock"
    first = Segment.open(settings)
    opened = open_own_segments(settings, first.pool.epoch, {"green": SIZE, "blue": SIZE})
    pool_ids = {name: one.pool.pool_id for name, one in opened.items()}
    assert {one.backing for one in opened.values()} == {backing}
    assert len({first.pool.pool_id, *pool_ids.values()}) == 3
    for one in (*opened.values(), first):
        one.close()
    if backing == "memfd":
        assert sorted(holder_client.names(holder)) == sorted(["", *map(segment_name, opened)])

    again = Segment.open(settings)
    assert again.adopted
    [green] = open_own_segments(settings, again.pool.epoch, {"green": SIZE}).values()
    assert green.adopted and green.pool.pool_id == pool_ids["green"]
    assert green.pool.epoch == again.pool.epoch > 0
    if backing == "memfd":
        assert sorted(holder_client.names(holder)) == ["", segment_name("green")]
    else:
        assert [one.name for one in settings.directory.glob(f"{PREFIX}*")] == [
            f"{PREFIX}{segment_name('green')}"
        ]
    green.destroy()
    if backing == "memfd":
        assert holder_client.names(holder) == [""], "the shared segment is still held"
    again.destroy()
    assert not holder.exists()


def test_a_segment_of_a_later_epoch_or_another_size_is_made_anew(
    settings: SegmentSettings, shared: Segment
) -> None:
    [late] = open_own_segments(settings, shared.pool.epoch + 10, {"green": SIZE}).values()
    late.close()
    [green] = open_own_segments(settings, shared.pool.epoch, {"green": SIZE}).values()
    assert not green.adopted and "epoch" in green.reason
    assert green.pool.epoch == shared.pool.epoch
    green.close()
    wider = OwnSize(16 * MIB, 32 * MIB)
    [green] = open_own_segments(settings, shared.pool.epoch + 1, {"green": wider}).values()
    assert not green.adopted and "extents_bytes" in green.reason
    assert (green.pool.limit_bytes, green.pool.extents_bytes) == (16 * MIB, 32 * MIB)
    green.destroy()
