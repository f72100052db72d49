"""Writes the records of a storage again, with the codecs and the key that new records get.

One record at a time: load, decode and verify, encode, delete, put.  A record that already names the writing key stays
as it is, so an interrupted run can be repeated and goes on where it ended.  A record that cannot be decoded or
authenticated here stays as it is too.  If the process ends between delete and put, that one record is lost and its
chunk is computed again.
"""

from __future__ import annotations

import asyncio
import collections
import time
from typing import cast

from kvstrata.errors import ConfigError, StorageError
from kvstrata.native import record as native_record
from kvstrata.native.copying import buffer_address
from kvstrata.native.pool import Hold
from kvstrata.storage.base import LoadItem, LoadStatus, Presence, PutItem, PutStatus, nothing_known
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.storage.wrap.codec_lengths import read_head
from kvstrata.storage.wrap.codec_seal import ID_BYTES, BadRecord, CannotDecode
from kvstrata.storage.wrap.staging import Staging, pages

PAGE_KEYS = 256
LISTS_WITHIN_S = 600.0
"""Longest wait for a storage that cannot list yet, because it reads its directory."""


async def rewrite(adapter: CodecAdapter, staging_bytes: int) -> dict[str, int]:
    """Write all records of an open adapter again; returns the number of records by outcome.

    Raises ConfigError if the adapter has no key to write with or cannot list, StorageError if listing fails.
    """
    if not adapter.chain.seals.writes:
        raise ConfigError(
            f"{adapter.name}: codec: names no key to write with; give aes-gcm or mac with key_files, the new key first",
            field="codec",
        )
    capabilities = adapter.inner.capabilities
    if not (capabilities.lists and capabilities.can_delete):
        raise ConfigError(
            f"{adapter.name}: type: this kind of storage cannot list its records; let them be evicted, or clear it",
            field="type",
        )
    staging = Staging(staging_bytes)
    counts: collections.Counter[str] = collections.Counter()
    cursor, until_s = 0, time.monotonic() + LISTS_WITHIN_S
    while True:
        page = await adapter.inner.list_keys(cursor, PAGE_KEYS)
        if page is None:
            if time.monotonic() > until_s:
                raise StorageError(f"{adapter.name}: its records could not be listed", field=adapter.name)
            await asyncio.sleep(0.05)  # the storage contract has no event for "can list now"
            continue
        for key in page.keys:
            counts[await _rewrite_one(adapter, staging, key)] += 1
        cursor = page.cursor
        if cursor == 0:
            return dict(counts)


async def _rewrite_one(adapter: CodecAdapter, staging: Staging, key: bytes) -> str:
    """Write one record again; returns its outcome: `rewritten`, `current`, or a short reason."""
    chain, inner = adapter.chain, adapter.inner
    [found], [head] = await inner.exists([key]), await inner.heads([key])
    if found.presence is not Presence.PRESENT:
        return "absent"
    stored_bytes = found.record_bytes
    known = read_head(key, head, stored_bytes)
    if known is None or stored_bytes > chain.longest_stored_bytes(known.codecs, known.decoded_bytes):
        return "corrupt"
    if cannot := known.cannot or chain.cannot_decode(known.codecs):
        return cannot
    decoded_bytes = known.decoded_bytes
    scratch_bytes = chain.scratch_bytes(known.codecs, decoded_bytes)
    encoded_bytes = chain.staging_bytes(decoded_bytes)
    block = staging.take_now(
        pages(stored_bytes) + pages(decoded_bytes) + pages(scratch_bytes) + encoded_bytes, for_put=False
    )
    if block is None:
        return "staging_too_small"
    try:
        [loaded] = await inner.load([LoadItem(key, cast("Hold", block.hold(key, stored_bytes)))])
        if loaded.status is not LoadStatus.LOADED:
            return loaded.reason or loaded.status.name.lower()
        whole = block.view(block.room)
        stored, rest = whole[:stored_bytes], whole[pages(stored_bytes) :]
        decoded, rest = rest[:decoded_bytes], rest[pages(decoded_bytes) :]
        scratch, encoded = rest[:scratch_bytes], rest[pages(scratch_bytes) :][:encoded_bytes]
        header = native_record.record_header(buffer_address(stored), stored_bytes)
        named = bytes(stored[header.header_bytes :][:ID_BYTES])
        if header.codecs[-1:] == bytes([chain.seals.writes]) and named == chain.seals.writing_id:
            return "current"
        try:
            chain.decode(stored, decoded, key, scratch)
        except CannotDecode as error:
            return error.reason
        except BadRecord:
            return "corrupt"
        length = chain.encode(decoded, encoded, nothing_known).length
        whole[:length] = encoded[:length]  # a hold begins where its block does
        await inner.delete([key])
        [put] = await inner.put([PutItem(key, cast("Hold", block.hold(key, length)))])
        return (
            "rewritten" if put.status is PutStatus.STORED else f"lost_{put.reason or put.status.name.lower()}"
        )
    finally:
        block.let_go()
