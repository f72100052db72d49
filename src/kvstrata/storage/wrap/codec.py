"""Encodes records on their way to a medium and decodes them on their way back.

This wrapper lies around every adapter; without a configured codec nothing is staged or copied, and encoded records are
misses.  With one, each record is decoded by the codecs that it names, so a change of the chain loses no stored record.

    put    extent ─(lane)─▶ staging ─▶ medium        the extent's hold ends with the encoding
    load   medium ─▶ staging ─(lane)─▶ extent        verified there, section by section

Invariants
1. Bytes between the codecs and the medium lie in a staging pool of fixed size outside L1.  Whoever touches a block of
   it holds the block.
2. A record to load gets as much staging as the longest encoding of a record that fits into its extent.
3. A record that cannot be decoded (unknown codec, another key, missing library) is a miss, is counted and stays stored.
   A record that does not authenticate, is too long, or decodes to other bytes than the original, is removed, so that a
   put replaces it.
4. A batch that was taken runs to its end, even if nobody waits for it.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from kvstrata.errors import ConfigError
from kvstrata.observability.logging import Thinning
from kvstrata.policy.reasons import (
    BAD_ITEM,
    CODEC,
    ENCODED,
    LENGTH,
    QUEUE_FULL,
    STAGING_TOO_SMALL,
    THROTTLED,
    UNAUTHENTICATED,
)
from kvstrata.storage.base import (
    AdapterContext,
    Ask,
    Counts,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    Remarks,
    StorageAdapter,
    Usage,
    log_broken_contract,
    told,
    two_bytes,
)
from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.storage.work import Work
from kvstrata.storage.wrap.codec_chain import Chain
from kvstrata.storage.wrap.codec_hold import SideHold
from kvstrata.storage.wrap.codec_seal import BadRecord, CannotDecode
from kvstrata.storage.wrap.staging import Block, Staging
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.core import Hold

log = logging.getLogger(__name__)
_thinning = Thinning()

CODECS = slice(80, 88)
"""The field of a record's header with the numbers of the codecs that encoded its payload, padded with zeros."""


class CodecAdapter(StorageAdapter):
    """See the module. It has `workers` threads that encode and decode."""

    def __init__(
        self, inner: StorageAdapter, chain: Chain, *, staging_bytes: int = 256 << 20, workers: int = 2
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.chain = chain
        self.counts: collections.Counter[str] = collections.Counter()
        """Records (bytes where the name says so) by outcome, counted each time they were put or loaded."""
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._lanes = Lanes(f"{inner.name[:5]}-codec", num_workers=workers)
        self._work = Work(inner.name)
        self._closed = False
        self._undecodable: set[str] = set()
        """The reasons with which records could not be decoded, and which are logged."""
        self._element_bytes_of: Callable[[bytes], int] = two_bytes

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter. Also raises ConfigError if the adapter cannot work with the configured codec."""
        self._element_bytes_of = context.element_bytes_of
        await self.inner.open(context)
        self.capabilities = self.inner.capabilities
        if self.chain.encodes and self.capabilities.wants_registered_memory:
            await self.inner.close()
            raise ConfigError(
                f"{self.name}: codec: this kind of storage moves bytes of L1 only; remove codec",
                field="codec",
            )

    def stats(self) -> dict[str, int]:
        """The counters of this wrapper."""
        used_bytes = 0 if self._staging is None else self._staging.used_bytes
        return {"staging_used_bytes": used_bytes, **self.counts}

    def numbers(self) -> dict[str, int]:
        """As the inner adapter; empty if it breaks its contract, so that status pages still show everything else."""
        return told(self.name, "numbers", self.inner.numbers, Counts)

    def remarks(self) -> dict[str, str]:
        """As the inner adapter; empty if it breaks its contract."""
        return told(self.name, "remarks", self.inner.remarks, Remarks)

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """As the inner adapter: a record that cannot be decoded is present too."""
        return await self.inner.exists(keys, ask)

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the inner adapter."""
        return await self.inner.list_keys(cursor, most)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Encode the records that the medium lacks, and put them into the inner adapter."""
        if self._closed or not items or not self.chain.encodes:
            return await self.inner.put(items)
        return await self._work.own(self._put(list(items)))

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """Load from the inner adapter, then decode."""
        if self._closed or not items:
            return await self.inner.load(items)
        return await self._work.own(self._load(list(items)))

    async def delete(self, keys: bytes) -> int:
        """As the inner adapter."""
        return await self.inner.delete(keys)

    async def clear(self) -> int:
        """As the inner adapter."""
        return await self.inner.clear()

    async def usage(self) -> Usage:
        """As the inner adapter: bytes count as stored."""
        return await self.inner.usage()

    async def close(self) -> None:
        """Wait for the operations in flight, close the inner adapter, end the threads. Idempotent."""
        self._closed = True
        await self._work.ended()
        await self.inner.close()
        await self._lanes.close()

    # -- put -----------------------------------------------------------------------------------------------

    async def _put(self, items: list[PutItem]) -> list[PutOutcome]:
        outcomes = [PutOutcome(PutStatus.FAILED, BAD_ITEM)] * len(items)
        good = [i for i, item in enumerate(items) if len(item.key) == KEY_BYTES]
        there = await self.inner.exists(b"".join(items[i].key for i in good), Ask())
        present = {i for i, presence in zip(good, there, strict=True) if presence == Presence.PRESENT}
        waiting: list[tuple[int, Block, asyncio.Future[int]]] = []
        for i, item in enumerate(items):
            if len(item.key) != KEY_BYTES:
                item.hold.drop()
                continue
            if i in present:
                item.hold.drop()
                outcomes[i] = PutOutcome(PutStatus.EXISTS)
                continue
            need_bytes = self.chain.staging_bytes(item.hold.length)
            block = self._staged().take_now(need_bytes, for_put=True)
            if block is None and self._staged().fits(need_bytes, for_put=True):
                # Room for this record is certain only once the records staged before it have left staging.
                await self._put_encoded(items, waiting, outcomes)
                waiting = []
                block = await self._staged().take(need_bytes, for_put=True)
                if block is None:
                    item.hold.drop()
                    outcomes[i] = PutOutcome(PutStatus.THROTTLED, "staging")
                    continue
            if block is None:
                item.hold.drop()
                outcomes[i] = PutOutcome(PutStatus.FAILED, STAGING_TOO_SMALL)
                continue
            work = self._lanes.submit(Lane.PUT, functools.partial(self._encode, item, block))
            if work is None:
                item.hold.drop()
                block.let_go()
                outcomes[i] = PutOutcome(PutStatus.THROTTLED, QUEUE_FULL)
                continue
            waiting.append((i, block, work))
        await self._put_encoded(items, waiting, outcomes)
        return outcomes

    def _encode(self, item: PutItem, block: Block) -> int:
        """In a thread: encode the record into the block; returns the length of the result, 0: store it as it is.

        Drops the hold, unless the record is to be stored as it is.
        """
        need_bytes = self.chain.staging_bytes(item.hold.length)
        try:
            with item.hold.view() as source:
                length = self.chain.encode(source, block.view(need_bytes), self._element_bytes_of)
        except BaseException:
            item.hold.drop()
            raise
        if length:
            item.hold.drop()
        return length

    async def _put_encoded(
        self,
        items: list[PutItem],
        waiting: list[tuple[int, Block, asyncio.Future[int]]],
        outcomes: list[PutOutcome],
    ) -> None:
        """Wait for the encoding of some items and put them."""
        ended = await asyncio.gather(*(work for _, _, work in waiting), return_exceptions=True)
        batch: list[tuple[int, PutItem, int]] = []
        for (i, block, _), length in zip(waiting, ended, strict=True):
            item = items[i]
            if isinstance(length, BaseException):
                block.let_go()
                outcomes[i] = PutOutcome(PutStatus.FAILED, CODEC)
                self.counts["encode_failed"] += 1
                text = "%s: a record cannot be encoded: %s"
                _thinning.log(log, logging.ERROR, f"encode {self.name}", text, self.name, length)
                continue
            if length == 0:
                block.let_go()
                self.counts["incompressible"] += 1
                batch.append((i, item, 0))
            else:
                block.shrink(length)
                hold = block.hold(item.key, length)
                block.let_go()
                batch.append((i, PutItem(item.key, cast("Hold", hold)), length))
        if not batch:
            return
        put = await self.inner.put([item for _, item, _ in batch])
        for (i, _, length), outcome in zip(batch, put, strict=True):
            outcomes[i] = outcome
            if length and outcome.status is PutStatus.STORED:
                self.counts["encoded"] += 1
                self.counts["encoded_from_bytes"] += items[i].hold.length
                self.counts["encoded_to_bytes"] += length

    # -- load ----------------------------------------------------------------------------------------------

    async def _load(self, items: list[LoadItem]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome(LoadStatus.FAILED, BAD_ITEM)] * len(items)
        good = [i for i, item in enumerate(items) if len(item.key) == KEY_BYTES]
        for i in set(range(len(items))).difference(good):
            items[i].hold.drop()
        if self.chain.encodes:
            await self._load_encoded(items, good, outcomes)
        else:
            await self._load_plain(items, good, outcomes)
        return outcomes

    async def _load_plain(
        self, items: list[LoadItem], places: list[int], outcomes: list[LoadOutcome]
    ) -> None:
        """Load straight into the extents. A record that proves to be encoded is a miss."""
        if not places:
            return
        sides = [SideHold(items[i].hold) for i in places]
        try:
            batch = [
                items[i]._replace(hold=cast("Hold", side)) for i, side in zip(places, sides, strict=True)
            ]
            loaded = await self.inner.load(batch)
            for i, side, outcome in zip(places, sides, loaded, strict=True):
                outcomes[i] = outcome
                if outcome.status is LoadStatus.LOADED and any(side.view()[CODECS]):
                    outcomes[i] = LoadOutcome(LoadStatus.FAILED, ENCODED)
                    self.counts[ENCODED] += 1
                    side.view()[:8] = bytes(8)
        finally:
            for side in sides:
                side.end("codec")

    async def _load_encoded(
        self, items: list[LoadItem], places: list[int], outcomes: list[LoadOutcome]
    ) -> None:
        """Load through staging, in groups that fit into it."""
        group: list[tuple[int, int, Block]] = []
        for i in places:
            staging = self._staged()
            need_bytes = self.chain.staging_bytes(items[i].hold.length)
            if not staging.fits(need_bytes, for_put=False):
                items[i].hold.drop()
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, STAGING_TOO_SMALL)
                continue
            block = staging.take_now(need_bytes, for_put=False)
            if block is None:
                await self._load_group(items, group, outcomes)
                group = []
                block = await staging.take(need_bytes, for_put=False)
            if block is None:
                items[i].hold.drop()
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, THROTTLED)
                continue
            group.append((i, need_bytes, block))
        await self._load_group(items, group, outcomes)

    async def _load_group(
        self, items: list[LoadItem], group: list[tuple[int, int, Block]], outcomes: list[LoadOutcome]
    ) -> None:
        if not group:
            return
        batch = [
            LoadItem(items[i].key, cast("Hold", block.hold(items[i].key, length)))
            for i, length, block in group
        ]
        try:
            loaded = await self.inner.load(batch)
        except BaseException:
            for i, _, block in group:
                items[i].hold.drop()
                block.let_go()
            raise
        del batch
        decoding: list[tuple[int, asyncio.Future[LoadOutcome]]] = []
        for (i, length, block), outcome in zip(group, loaded, strict=True):
            outcomes[i] = outcome
            work = None
            if outcome.status is LoadStatus.LOADED:
                work = self._lanes.submit(Lane.LOAD, functools.partial(self._decode, items[i], block, length))
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, THROTTLED)
            if work is None:
                items[i].hold.drop()
                block.let_go()
            else:
                decoding.append((i, work))
        bad: list[bytes] = []
        ended = await asyncio.gather(*(work for _, work in decoding), return_exceptions=True)
        for (i, _), result in zip(decoding, ended, strict=True):
            if isinstance(result, BaseException):
                log_broken_contract(self.name, "a codec", result)
                result = LoadOutcome(LoadStatus.FAILED, CODEC)
            outcomes[i] = result
            key = items[i].key
            if result.status is LoadStatus.LOADED:
                self.counts["decoded"] += 1
            elif result.status is LoadStatus.CORRUPT:
                bad.append(key)
                self.counts["decoded_corrupt"] += 1
            else:
                self.counts[result.reason] += 1
                if result.reason in (UNAUTHENTICATED, LENGTH):
                    bad.append(key)
        if bad:
            await self.inner.delete(b"".join(bad))

    def _decode(self, item: LoadItem, block: Block, room: int) -> LoadOutcome:
        """In a thread: decode the stored record at the start of the block into the extent."""
        try:
            with item.hold.view() as target:
                self.chain.decode(block.view(room), target, item.key)
            return LoadOutcome(LoadStatus.LOADED)
        except CannotDecode as error:
            self._note_undecodable(error, item.key)
            return LoadOutcome(LoadStatus.FAILED, error.reason)
        except BadRecord as error:
            text = "%s: removing the corrupt record %s: %s"
            _thinning.log(log, logging.WARNING, self.name, text, self.name, item.key.hex()[:16], error)
            return LoadOutcome(LoadStatus.CORRUPT, CODEC)
        finally:
            item.hold.drop()
            block.let_go()

    def _note_undecodable(self, error: CannotDecode, key: bytes) -> None:
        """Log this, once for each reason: of a storage shared with other codecs, all their records are noted here."""
        if error.reason not in self._undecodable:
            self._undecodable.add(error.reason)
            what = "%s: record %s: %s; more such records are only counted (%s). Give all its servers the same codec"
            log.warning(what, self.name, key.hex()[:16], error, error.reason)

    # -- life ----------------------------------------------------------------------------------------------

    def _staged(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self._staging_bytes)
        return self._staging
