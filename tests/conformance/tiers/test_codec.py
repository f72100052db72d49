"""A tier with a codec keeps the storage contract for every chain, and its own promises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError
from kvstrata.testing.adapter_contract import ABSENT, EXISTS, LOADED, SIZE, STORED, AdapterContract, Medium
from kvstrata.testing.strategies import Settled, key_of, load_item, put_item, record_hold, settled, watched
from kvstrata.tiers.base import AdapterContext, Capabilities, Item, Outcome, StorageAdapter
from kvstrata.tiers.codec import ChainSettings, ZstdOptions
from kvstrata.tiers.config import CommonFields, TierConfig
from kvstrata.tiers.media.fs import FsAdapter
from kvstrata.tiers.tier import Tier, TierLimits
from tests.conformance.tiers.test_fs import Folder
from tests.conformance.tiers.test_suite_itself import Forgets, Records
from tests.harness.records import loaded_record, resealed, soft_payload
from tests.harness.shelf import ShelfAdapter

PLAIN = ChainSettings()
ZSTD = ChainSettings(zstd=ZstdOptions())
ZSTD_BYTES = ChainSettings(zstd=ZstdOptions(planes=1))
AES = ChainSettings(master_key=b"k" * 32)
BOTH = ChainSettings(zstd=ZstdOptions(), master_key=b"k" * 32)
MAC = ChainSettings(mac_key=b"k" * 32)
OTHER_KEY = ChainSettings(zstd=ZstdOptions(), master_key=b"o" * 32)


def soft_put_item(key: bytes, length: int) -> Item:
    """Return an item that puts a compressible payload under this key."""
    return Item(key, cast("object", record_hold(key, soft_payload(key, length))))  # type: ignore[arg-type]


def tier_of(medium: StorageAdapter, chain: ChainSettings, staging_bytes: int = 8 << 20) -> Tier:
    config = TierConfig(
        medium.name,
        lambda: medium,
        chain=chain,
        common=CommonFields(type="fs", codec_staging_mb=staging_bytes / (1 << 20)),
    )
    return Tier(config, TierLimits(max_stuck_bytes=1 << 40), SystemClock())


class CodecOnFs(AdapterContract):
    """The suite's payloads are noise: zstd leaves them as they are, AES-GCM encrypts them."""

    waits_in_threads = False  # the connector of `fs` reads memory and calls no Python object for it
    ends_first = True
    chain = PLAIN

    def make_medium(self, folder: Path) -> Folder:
        return Folder(folder / "base")

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Folder)
        inner = FsAdapter(base_path=str(medium.base), capacity_bytes=capacity_bytes, min_free_bytes=0)
        return cast("StorageAdapter", tier_of(inner, self.chain, 1 << 20))


class TestBothOnFs(CodecOnFs):
    chain = BOTH


@pytest.mark.long
class TestMacOnFs(CodecOnFs):
    chain = MAC


class CodecOnShelf(AdapterContract):
    has_cap = False
    waits_in_threads = False
    chain = PLAIN

    def make_medium(self, folder: Path) -> Records:
        return Records()

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Records)
        return cast("StorageAdapter", tier_of(Forgets(medium), self.chain, 1 << 20))


class TestZstdOnShelf(CodecOnShelf):
    chain = ZSTD


# -- its own promises --------------------------------------------------------------------------------------

Opener = Callable[..., "contextlib.AbstractAsyncContextManager[Tier]"]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Opens tiers with a given chain over `fs`, all in one directory."""

    @contextlib.asynccontextmanager
    async def open_one(
        chain: ChainSettings, staging_bytes: int = 8 << 20, **settings: object
    ) -> AsyncIterator[Tier]:
        inner = FsAdapter(base_path=str(tmp_path / "kv"), min_free_bytes=0, **settings)
        adapter = tier_of(inner, chain, staging_bytes)
        await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
        try:
            yield adapter
        finally:
            await adapter.close()
            assert adapter.codec_stats().get("staging_used_bytes", 0) == 0

    return open_one


async def put_soft(adapter: Tier, *numbers: int, size: int = 200_000) -> dict[int, bytes]:
    """Put records that compress well; return their bytes."""
    items = {n: soft_put_item(key_of(n), size) for n in numbers}
    records = {n: watched(item).bytes() for n, item in items.items()}
    assert await settled(adapter.put, list(items.values())) == [STORED] * len(numbers)
    for item in items.values():
        watched(item).check()
    return records


async def load_soft(adapter: Tier, records: dict[int, bytes], size: int = 200_000) -> list[Settled]:
    """Load records; assert that every LOADED one has the bytes that were put."""
    items = {n: load_item(key_of(n), size) for n in records}
    outcomes = await settled(adapter.load, list(items.values()))
    for (n, item), outcome in zip(items.items(), outcomes, strict=True):
        watched(item).check()
        if outcome == LOADED:
            assert loaded_record(item) == records[n]
    return outcomes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(PLAIN, ZSTD, id="plain-zstd"),
        pytest.param(ZSTD, ZSTD_BYTES, id="zstd-zstd1", marks=pytest.mark.long),
    ],
)
async def test_a_change_of_the_chain_loses_nothing(opened, before, after):
    async with opened(before) as adapter:
        records = await put_soft(adapter, 1, 2)
    async with opened(after) as adapter:
        assert await load_soft(adapter, records) == [LOADED] * 2
        assert await settled(adapter.put, [soft_put_item(key_of(1), 200_000)]) == [EXISTS]


async def test_without_a_codec_an_encoded_record_is_a_counted_miss_and_stays(opened, tmp_path):
    async with opened(ZSTD) as adapter:
        records = await put_soft(adapter, 1)
    before = Folder(tmp_path / "kv").read(key_of(1))
    async with opened(PLAIN) as adapter:
        assert await load_soft(adapter, records) == [Settled(Outcome.FAILED, "encoded")]
        assert adapter.by_operation["load"].items == {"failed:encoded": 1}
    assert Folder(tmp_path / "kv").read(key_of(1)) == before


async def test_a_record_that_does_not_become_shorter_is_stored_unencoded(opened, tmp_path):
    async with opened(ZSTD) as adapter:
        item = put_item(key_of(1), SIZE)
        record = watched(item).bytes()
        assert await settled(adapter.put, [item]) == [STORED]
        assert Folder(tmp_path / "kv").read(key_of(1)) == record
        assert adapter.codec_stats()["incompressible"] == 1


@pytest.mark.parametrize("after", [OTHER_KEY, ZSTD], ids=["other key", "no key"])
async def test_a_wrong_key_is_a_counted_miss_that_deletes_nothing(opened, tmp_path, after, caplog):
    async with opened(BOTH) as adapter:
        records = await put_soft(adapter, 1, 2)
    before = {n: Folder(tmp_path / "kv").read(key_of(n)) for n in records}
    async with opened(after) as adapter:
        outcomes = await load_soft(adapter, records)
        reason = "wrong_key" if after is OTHER_KEY else "no_key"
        assert [(o.outcome, o.reason) for o in outcomes] == [(Outcome.FAILED, reason)] * 2
        assert adapter.codec_stats()[reason] == 2
        assert sum("Give all its servers" in record.getMessage() for record in caplog.records) == 1
        item = soft_put_item(key_of(1), 200_000)
        assert await settled(adapter.put, [item]) == [EXISTS]
        watched(item).check()
    assert {n: Folder(tmp_path / "kv").read(key_of(n)) for n in records} == before
    async with opened(BOTH) as adapter:
        assert await load_soft(adapter, records) == [LOADED] * 2


async def test_a_forged_record_is_never_served(opened: Opener, tmp_path: Path) -> None:
    """It claims to be stored without a codec, in place of a genuine record of the same length."""
    folder = Folder(tmp_path / "kv")
    async with opened(AES) as adapter:
        records = await put_soft(adapter, 1)
        forged = bytearray(folder.read(key_of(1)))
        forged[80:88] = bytes(8)
        folder.write(key_of(1), resealed(bytes(forged)))
        [outcome] = await load_soft(adapter, records)
        assert outcome.outcome in (Outcome.FAILED, Outcome.CORRUPT)


async def test_puts_wait_for_staging_and_leave_room_for_loads(opened: Opener) -> None:
    size = 200_000
    async with opened(AES, staging_bytes=5 * 210_000) as adapter:  # two puts at a time
        records = await put_soft(adapter, *range(6), size=size)
        many = await asyncio.gather(
            put_soft(adapter, *range(10, 16), size=size),
            load_soft(adapter, records, size),
            put_soft(adapter, *range(20, 26), size=size),
            load_soft(adapter, records, size),
        )
        assert many[1] == many[3] == [LOADED] * 6


async def test_a_record_that_staging_can_never_hold_is_refused_with_its_reason(opened: Opener) -> None:
    async with opened(AES, staging_bytes=300_000) as adapter:
        item = soft_put_item(key_of(1), 200_000)
        assert await settled(adapter.put, [item]) == [Settled(Outcome.FAILED, "staging_too_small")]
        watched(item).check()
        assert await settled(adapter.load, [load_item(key_of(1), 200_000)]) == [ABSENT]


async def test_a_codec_is_refused_to_an_adapter_that_turns_out_to_move_registered_memory_only() -> None:
    class Registers(ShelfAdapter):
        async def open(self, context: AdapterContext) -> None:
            await super().open(context)
            self.capabilities = Capabilities(persistent=False, shared=False, wants_registered_memory=True)

    shelf = Records()
    adapter = tier_of(Registers(shelf), ZSTD)
    with pytest.raises(ConfigError, match=r"codec: .* moves bytes of L1 only; remove codec"):
        await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
    assert shelf.closed == 1
    await adapter.close()


async def test_the_hold_of_a_put_is_dropped_when_its_record_is_encoded(opened, tmp_path, monkeypatch):
    """However long the medium keeps the staged bytes, the extent is free meanwhile."""
    async with opened(ZSTD) as adapter:
        begun, go_on = asyncio.Event(), asyncio.Event()
        real = adapter.medium.put

        async def slow(items):
            begun.set()
            await go_on.wait()
            return await real(items)

        monkeypatch.setattr(adapter.medium, "put", slow)
        item = soft_put_item(key_of(1), 200_000)
        wait = asyncio.create_task(settled(adapter.put, [item]))
        await begun.wait()
        assert watched(item).dropped.is_set()
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        go_on.set()
    assert Folder(tmp_path / "kv").keys() == {key_of(1)}
