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
from kvstrata.testing.strategies import (
    ask_for,
    key_of,
    load_item,
    put_item,
    record_hold,
    watched,
)
from kvstrata.tiers.base import (
    AdapterContext,
    Capabilities,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
)
from kvstrata.tiers.codec import ChainSettings, ZstdOptions
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.media.fs.adapter import FsAdapter
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


def soft_put_item(key: bytes, length: int) -> PutItem:
    """Return an item that puts a compressible payload under this key."""
    return PutItem(key, cast("object", record_hold(key, soft_payload(key, length))))  # type: ignore[arg-type]


def tier_of(medium: StorageAdapter, chain: ChainSettings, staging_bytes: int = 8 << 20) -> Tier:
    """A tier of this medium, not open."""
    config = TierConfig(medium.name, lambda: medium, chain=chain, codec_staging_bytes=staging_bytes)
    return Tier(config, TierLimits(max_stuck_bytes=1 << 40), SystemClock())


class CodecOnFs(AdapterContract):
    """The suite's payloads are noise: zstd leaves them as they are, AES-GCM encrypts them."""

    waits_in_threads = False  # the connector of `fs` reads memory and calls no Python object for it
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
    assert await adapter.put(list(items.values())) == [STORED] * len(numbers)
    for item in items.values():
        watched(item).check()
    return records


async def load_soft(adapter: Tier, records: dict[int, bytes], size: int = 200_000) -> list[LoadOutcome]:
    """Load records; assert that every LOADED one has the bytes that were put."""
    items = {n: load_item(key_of(n), size) for n in records}
    outcomes = await adapter.load(list(items.values()))
    for (n, item), outcome in zip(items.items(), outcomes, strict=True):
        watched(item).check()
        if outcome == LOADED:
            assert loaded_record(item) == records[n]
    return outcomes


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(BOTH, id="both"),
        pytest.param(MAC, id="mac"),
        pytest.param(ZSTD_BYTES, id="zstd1", marks=pytest.mark.long),
    ],
)
async def test_an_encoded_record_comes_back_byte_for_byte_after_a_restart(
    opened: Opener, tmp_path: Path, chain: ChainSettings
) -> None:
    folder = Folder(tmp_path / "kv")
    async with opened(chain) as adapter:
        records = await put_soft(adapter, 1, 2, 3)
        assert await load_soft(adapter, records) == [LOADED] * 3
    for n in records:
        stored = folder.read(key_of(n))
        assert any(stored[80:88])
        assert (records[n][4096:] in stored) == (chain is MAC), "mac does not encrypt"
        if chain.zstd is not None:
            assert len(stored) < len(records[n]) * 0.8
    async with opened(chain) as adapter:
        found = await ask_for(adapter, [key_of(n) for n in (1, 9, 2, 3)])
        assert [f.presence for f in found] == [Presence.PRESENT, Presence.ABSENT, *[Presence.PRESENT] * 2]
        assert await load_soft(adapter, records) == [LOADED] * 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(PLAIN, ZSTD, id="plain-zstd"),
        pytest.param(ZSTD, ZSTD_BYTES, id="zstd-zstd1", marks=pytest.mark.long),
    ],
)
async def test_a_change_of_the_chain_loses_nothing(
    opened: Opener, before: ChainSettings, after: ChainSettings
) -> None:
    async with opened(before) as adapter:
        records = await put_soft(adapter, 1, 2)
    async with opened(after) as adapter:
        assert await load_soft(adapter, records) == [LOADED] * 2
        assert await adapter.put([soft_put_item(key_of(1), 200_000)]) == [EXISTS]


async def test_without_a_codec_an_encoded_record_is_a_counted_miss_and_stays(
    opened: Opener, tmp_path: Path
) -> None:
    async with opened(ZSTD) as adapter:
        records = await put_soft(adapter, 1)
    before = Folder(tmp_path / "kv").read(key_of(1))
    async with opened(PLAIN) as adapter:
        assert await load_soft(adapter, records) == [LoadOutcome(LoadStatus.FAILED, "encoded")]
        assert adapter.by_operation["load"].items == {"failed:encoded": 1}
    assert Folder(tmp_path / "kv").read(key_of(1)) == before


async def test_a_record_that_does_not_become_shorter_is_stored_unencoded(
    opened: Opener, tmp_path: Path
) -> None:
    async with opened(ZSTD) as adapter:
        item = put_item(key_of(1), SIZE)
        record = watched(item).bytes()
        assert await adapter.put([item]) == [STORED]
        assert Folder(tmp_path / "kv").read(key_of(1)) == record
        assert adapter.codec_stats()["incompressible"] == 1


@pytest.mark.parametrize("after", [OTHER_KEY, ZSTD], ids=["other key", "no key"])
async def test_a_wrong_key_is_a_counted_miss_that_deletes_nothing(
    opened: Opener, tmp_path: Path, after: ChainSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(BOTH) as adapter:
        records = await put_soft(adapter, 1, 2)
    before = {n: Folder(tmp_path / "kv").read(key_of(n)) for n in records}
    async with opened(after) as adapter:
        outcomes = await load_soft(adapter, records)
        reason = "wrong_key" if after is OTHER_KEY else "no_key"
        assert [(o.status, o.reason) for o in outcomes] == [(LoadStatus.FAILED, reason)] * 2
        assert adapter.codec_stats()[reason] == 2
        assert sum("Give all its servers" in record.getMessage() for record in caplog.records) == 1
        item = soft_put_item(key_of(1), 200_000)
        assert await adapter.put([item]) == [EXISTS]
        watched(item).check()
    assert {n: Folder(tmp_path / "kv").read(key_of(n)) for n in records} == before
    async with opened(BOTH) as adapter:
        assert await load_soft(adapter, records) == [LOADED] * 2


@pytest.mark.parametrize("before", [ZSTD, pytest.param(PLAIN, marks=pytest.mark.long)], ids=["zstd", "plain"])
async def test_with_a_key_a_record_that_nobody_authenticated_is_a_counted_miss_and_removed(
    opened: Opener, tmp_path: Path, before: ChainSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(before) as adapter:
        records = await put_soft(adapter, 1, 2)
    async with opened(BOTH) as adapter:
        assert await load_soft(adapter, records) == [
            LoadOutcome(LoadStatus.FAILED, "unauthenticated"),
            LoadOutcome(LoadStatus.FAILED, "unauthenticated"),
        ]
        assert adapter.codec_stats()["unauthenticated"] == 2
        assert sum("written without a key" in record.getMessage() for record in caplog.records) == 1
        again = await put_soft(adapter, 1)
        assert await load_soft(adapter, again) == [LOADED]
    assert 5 in Folder(tmp_path / "kv").read(key_of(1))[80:88], "the record was replaced by an encrypted one"


def other_values(record: bytes, other: bytes) -> dict[str, bytes]:
    """Values that are no record of a key, by what they are: the key's own record and that of another key are given."""
    return {
        "another chunk's record": other,
        "a longer one": resealed(other + bytes(8)),
        "one as long as this record": resealed(other.ljust(len(record), b"\0")[: len(record)]),
        "a record cut short": record[:5000],
        "half a header": record[:100],
        "a byte": b"x",
    }


@pytest.mark.parametrize("what", other_values(b"", b""))
@pytest.mark.parametrize("chain", [BOTH, pytest.param(MAC, marks=pytest.mark.long)], ids=["both", "mac"])
async def test_a_value_that_is_no_record_of_its_key_is_removed_by_a_load(
    chain: ChainSettings, what: str
) -> None:
    shelf = Records()
    adapter = tier_of(ShelfAdapter(shelf), chain)
    await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
    records = await put_soft(adapter, 1, 2)
    shelf.write(key_of(1), other_values(shelf.read(key_of(1)), shelf.read(key_of(2)))[what])
    assert await load_soft(adapter, {1: records[1]}) == [LoadOutcome(LoadStatus.CORRUPT)]
    assert shelf.keys() == {key_of(2)}
    records |= await put_soft(adapter, 1)
    assert await load_soft(adapter, records) == [LOADED] * 2
    await adapter.close()


async def test_a_forged_record_is_never_served(opened: Opener, tmp_path: Path) -> None:
    """It claims to be stored without a codec, in place of a genuine record of the same length."""
    folder = Folder(tmp_path / "kv")
    async with opened(AES) as adapter:
        records = await put_soft(adapter, 1)
        forged = bytearray(folder.read(key_of(1)))
        forged[80:88] = bytes(8)
        folder.write(key_of(1), resealed(bytes(forged)))
        [outcome] = await load_soft(adapter, records)
        assert outcome.status in (LoadStatus.FAILED, LoadStatus.CORRUPT)


@pytest.mark.parametrize("number", [1, pytest.param(200, marks=pytest.mark.long)])
async def test_an_unknown_codec_is_a_counted_miss_that_deletes_nothing(
    opened: Opener, tmp_path: Path, number: int
) -> None:
    async with opened(ZSTD) as adapter:
        await put_soft(adapter, 1)
    folder = Folder(tmp_path / "kv")
    stored = bytearray(folder.read(key_of(1)))
    stored[80:88] = bytes([number]) + bytes(7)
    stored = bytearray(resealed(bytes(stored)))
    folder.write(key_of(1), bytes(stored))
    async with opened(ZSTD) as adapter:
        assert await load_soft(adapter, {1: b""}) == [LoadOutcome(LoadStatus.FAILED, "codec_unknown")]
        assert adapter.codec_stats()["codec_unknown"] == 1
    assert folder.read(key_of(1)) == bytes(stored)


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
        assert await adapter.put([item]) == [PutOutcome(PutStatus.FAILED, "staging_too_small")]
        watched(item).check()
        assert await adapter.load([load_item(key_of(1), 200_000)]) == [ABSENT]


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


async def test_the_hold_of_a_put_is_dropped_when_its_record_is_encoded(
    opened: Opener, tmp_path: Path, monkeypatch
) -> None:
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
        wait = asyncio.create_task(adapter.put([item]))
        await begun.wait()
        assert watched(item).dropped.is_set()
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        go_on.set()
    assert Folder(tmp_path / "kv").keys() == {key_of(1)}
