"""The codec wrapper and values whose headers are not those of a record of their key, or cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from kvstrata.clock import SystemClock
from kvstrata.policy.reasons import blames_medium, miss_reason
from kvstrata.storage.base import AdapterContext, LoadOutcome, LoadStatus, PutOutcome, PutStatus
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.storage.wrap.codec_chain import Chain
from kvstrata.storage.wrap.codec_fields import ChainSettings
from kvstrata.testing.adapter_contract import EXISTS, LOADED, STORED
from kvstrata.testing.strategies import key_of, put_item, record_length, watched
from kvstrata.types import MissReason
from tests.conformance.storage.test_codec import (
    BOTH,
    MAC,
    PLAIN,
    ZSTD,
    HeadedShelf,
    load_soft,
    put_soft,
    soft_put_item,
)
from tests.conformance.storage.test_suite_itself import Records
from tests.harness.records import resealed

CORRUPT = LoadOutcome(LoadStatus.CORRUPT)
CHAINS = [
    pytest.param(BOTH, id="zstd and aes-gcm"),
    pytest.param(MAC, id="mac", marks=pytest.mark.long),
]


class SilentShelf(HeadedShelf):
    """Reads no headers while it is `silent`, as a medium whose lookup lane is full."""

    silent = False

    async def heads(self, keys):
        return [b""] * len(keys) if self.silent else await super().heads(keys)


@contextlib.asynccontextmanager
async def opened(chain: ChainSettings, inner: HeadedShelf) -> AsyncIterator[CodecAdapter]:
    adapter = CodecAdapter(inner, Chain(chain), staging_bytes=8 << 20)
    await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
    try:
        yield adapter
    finally:
        await adapter.close()
        assert adapter.stats()["staging_used_bytes"] == 0


async def answer(adapter: CodecAdapter, number: int) -> tuple[str, int, str]:
    """What `exists` answers for a key: its presence, the record's length, the reason."""
    [(presence, record_bytes, reason)] = await adapter.exists([key_of(number)])
    return presence.name, record_bytes, reason


def other_values(record: bytes, other: bytes) -> dict[str, bytes]:
    """Values that are no record of a key, by what they are: the key's own record and that of another key are given."""
    return {
        "another chunk's record": other,
        "a longer one": resealed(other + bytes(8)),
        "one as long as a record in L1": resealed(other.ljust(record_length(200_000), b"\0")),
        "one as long as this record": resealed(other.ljust(len(record), b"\0")[: len(record)]),
        "a record cut short": record[:5000],
        "half a header": record[:100],
        "a byte": b"x",
    }


@pytest.mark.parametrize("what", other_values(b"", b""))
@pytest.mark.parametrize("chain", CHAINS)
async def test_a_value_that_is_no_record_of_its_key_is_corrupt_and_the_next_put_replaces_it(
    chain: ChainSettings, what: str
) -> None:
    """What the wrapper knows of the record that it has put says nothing about the value that has replaced it."""
    shelf = Records()
    async with opened(chain, HeadedShelf(shelf)) as adapter:
        records = await put_soft(adapter, 1, 2)
        genuine = shelf.read(key_of(1))
        shelf.write(key_of(1), other_values(genuine, shelf.read(key_of(2)))[what])
        if len(shelf.read(key_of(1))) == len(genuine):  # headers are not read again, but the load sees it
            assert await load_soft(adapter, {1: records[1]}) == [CORRUPT]
        else:
            assert await answer(adapter, 1) == ("UNKNOWN", 0, "corrupt")
        records |= await put_soft(adapter, 1)
        assert await answer(adapter, 1) == ("PRESENT", record_length(200_000), "")
        assert await load_soft(adapter, records) == [LOADED] * 2
    assert miss_reason("corrupt") is MissReason.CORRUPT
    assert not blames_medium("corrupt"), "the value of somebody else opens no breaker"


@pytest.mark.parametrize(
    "asks",
    [pytest.param(False, id="loads at once", marks=pytest.mark.long), pytest.param(True, id="asks first")],
)
@pytest.mark.parametrize("chain", CHAINS)
async def test_a_load_removes_a_value_that_is_no_record_of_its_key(chain: ChainSettings, asks: bool) -> None:
    shelf = Records()
    async with opened(chain, HeadedShelf(shelf)) as adapter:
        records = await put_soft(adapter, 1, 2)
        shelf.write(key_of(1), resealed(shelf.read(key_of(2)) + bytes(8)))
        if asks:
            assert await answer(adapter, 1) == ("UNKNOWN", 0, "corrupt")
        assert await load_soft(adapter, {1: records[1]}) == [CORRUPT]
        assert await answer(adapter, 1) == ("ABSENT", 0, "")


async def test_a_wrapper_without_a_codec_replaces_such_a_value_once_it_reads_headers() -> None:
    shelf = Records()
    async with opened(ZSTD, HeadedShelf(shelf)) as other_server:
        await put_soft(other_server, 2)
        async with opened(PLAIN, HeadedShelf(shelf)) as adapter:
            assert await answer(adapter, 2) == ("PRESENT", record_length(200_000), "")
            shelf.write(key_of(1), bytes(record_length(200_000)))
            assert await answer(adapter, 1) == ("UNKNOWN", 0, "corrupt")
            records = await put_soft(adapter, 1)
            assert await adapter.put([put_item(key_of(1), 200_000)]) == [EXISTS]
            assert await load_soft(adapter, records) == [LOADED]


async def test_a_record_whose_headers_cannot_be_read_is_a_miss_and_stays() -> None:
    """Its length in L1 is not known: the length on the medium must not stand in for it."""
    shelf = Records()
    inner = SilentShelf(shelf)
    async with opened(BOTH, inner) as first:
        records = await put_soft(first, 1)
        async with opened(BOTH, inner) as adapter:
            inner.silent = True
            assert await answer(adapter, 1) == ("UNKNOWN", 0, "no_head")
            assert await load_soft(adapter, records) == [LoadOutcome(LoadStatus.FAILED, "no_head")]
            item = soft_put_item(key_of(1), 200_000)
            assert await adapter.put([item]) in ([STORED], [PutOutcome(PutStatus.EXISTS)])
            watched(item).check()
            inner.silent = False
            assert await load_soft(adapter, records) == [LOADED]
            assert adapter.stats()["no_head"] >= 2
    assert not blames_medium("no_head")
