"""Encodes records on their way to a medium and decodes them on their way back.

This wrapper lies around every adapter, even where no codec is configured.  Each record names the codecs that it is
encoded with, and is decoded by them whatever is configured now, so a change of the chain loses no stored record.
Without a codec nothing is staged or copied.

    put    extent ─(lane)─▶ staging ─▶ medium        the extent's hold ends with the encoding
    load   medium ─▶ staging ─(lane)─▶ extent        verified there, section by section

Invariants
1. Bytes between the codecs and the medium lie in a staging pool of fixed size outside L1.  Whoever touches a block of
   it holds the block.
2. `exists` answers with lengths in L1.  A key whose length is not known yet costs one read of its headers.
3. A record that cannot be decoded (unknown codec, missing or different key, missing library) is a miss and is counted.
   It stays stored; a put replaces it only if it does not authenticate.  A record that decodes to other bytes than the
   original is removed.  A value whose headers are not those of a record of its key is a miss too (`corrupt`), and a put
   replaces it.
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
from kvstrata.policy import reasons
from kvstrata.policy.reasons import BAD_ITEM, CODEC, ENCODED, LENGTH, QUEUE_FULL, STAGING_TOO_SMALL, THROTTLED
from kvstrata.storage.base import (
    AdapterContext,
    Counts,
    Found,
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
from kvstrata.storage.wrap.codec_chain import Chain, Encoded
from kvstrata.storage.wrap.codec_heads import Heads
from kvstrata.storage.wrap.codec_hold import SideHold
from kvstrata.storage.wrap.codec_lengths import CODECS, KnownLengths, Lengths, Undecodable
from kvstrata.storage.wrap.codec_seal import BadRecord, CannotDecode
from kvstrata.storage.wrap.staging import Block, Staging, pages
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.core import Hold

log = logging.getLogger(__name__)
_thinning = Thinning()


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
        self._lengths = KnownLengths()
        self._asks_heads = chain.encodes
        """Some records on this medium may be encoded."""
        self._work = Work(inner.name)
        self._closed = False
        self._undecodable = Undecodable(inner.name)
        self._heads = Heads(inner, chain, self._lengths, self._undecodable)
        self._element_bytes_of: Callable[[bytes], int] = two_bytes

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter. Also raises ConfigError if the adapter cannot work with the configured codec."""
        if self.chain.encodes and not self.inner.capabilities.has_heads:
            raise ConfigError(
                f"{self.name}: codec: this kind of storage cannot tell how long encoded records are; remove codec, or"
                " let the adapter implement `heads`",
                field="codec",
            )
        if self.chain.encodes and self.inner.capabilities.wants_registered_memory:
            raise ConfigError(
                f"{self.name}: codec: this kind of storage moves bytes of L1 only; remove codec",
                field="codec",
            )
        self._element_bytes_of = context.element_bytes_of
        evicted = context.record_evicted

        def record_evicted(key: bytes) -> None:
            self._lengths.forget(key)
            evicted(key)

        await self.inner.open(context._replace(record_evicted=record_evicted))
        self.capabilities = self.inner.capabilities

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

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the inner adapter, with lengths in L1; UNKNOWN for a record that cannot be decoded."""
        found = list(await self.inner.exists(keys))
        if not self._asks_heads:
            self._asks_heads = await self._heads.shows_codecs(keys, found)
        if not self._asks_heads and not self._lengths:
            return found
        lengths = await self._heads.look_up(keys, found, ask=self._asks_heads)
        for i, known in enumerate(lengths):
            if known is None:
                continue
            if known.cannot:
                found[i] = Found(Presence.UNKNOWN, 0, known.cannot)
                self.counts[known.cannot] += 1
            else:
                found[i] = Found(Presence.PRESENT, known.decoded_bytes)
        return found

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the inner adapter."""
        return await self.inner.list_keys(cursor, most)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Encode the records that the medium lacks, and put them into the inner adapter."""
        if self._closed or not items or not (self.chain.encodes or self._asks_heads):
            return await self.inner.put(items)
        return await self._work.own(self._put(list(items)))

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """Load from the inner adapter, then decode."""
        if self._closed or not items:
            return await self.inner.load(items)
        return await self._work.own(self._load(list(items)))

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the inner adapter."""
        try:
            return await self.inner.delete(keys)
        finally:
            for key in keys:
                self._lengths.forget(key)

    async def clear(self) -> int:
        """As the inner adapter."""
        try:
            return await self.inner.clear()
        finally:
            self._lengths.clear()

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

    async def _make_way(self, keys: list[bytes]) -> list[Found]:
        """As `exists`, once forged records and values that are no records have been removed: a put replaces them."""
        found = await self.exists(keys)
        forged = [
            i for i, one in enumerate(found) if one.reason in (reasons.UNAUTHENTICATED, reasons.CORRUPT)
        ]
        if forged:
            await self.delete([keys[i] for i in forged])
            for i in forged:
                found[i] = Found(Presence.ABSENT)
        return found

    async def _put(self, items: list[PutItem]) -> list[PutOutcome]:
        outcomes = [PutOutcome(PutStatus.FAILED, BAD_ITEM)] * len(items)
        found = await self._make_way([item.key for item in items])
        if not self.chain.encodes:
            return await self.inner.put(items)
        waiting: list[tuple[int, Block, asyncio.Future[Encoded]]] = []
        for i, item in enumerate(items):
            if len(item.key) != KEY_BYTES:
                item.hold.drop()
                continue
            known = self._lengths.get(item.key)
            if found[i].presence is Presence.PRESENT and found[i].record_bytes == item.hold.length:
                item.hold.drop()
                outcomes[i] = PutOutcome(PutStatus.EXISTS)
                continue
            if found[i].presence is Presence.UNKNOWN and known is not None and known.cannot:
                item.hold.drop()
                outcomes[i] = PutOutcome(PutStatus.FAILED, known.cannot)
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

    def _encode(self, item: PutItem, block: Block) -> Encoded:
        """In a thread: encode the record into the block. Drops the hold, unless the record is to be stored as it is."""
        need_bytes = self.chain.staging_bytes(item.hold.length)
        try:
            with item.hold.view() as source:
                encoded = self.chain.encode(source, block.view(need_bytes), self._element_bytes_of)
        except BaseException:
            item.hold.drop()
            raise
        if encoded.length:
            item.hold.drop()
        return encoded

    async def _put_encoded(
        self,
        items: list[PutItem],
        waiting: list[tuple[int, Block, asyncio.Future[Encoded]]],
        outcomes: list[PutOutcome],
    ) -> None:
        """Wait for the encoding of some items and put them."""
        ended = await asyncio.gather(*(work for _, _, work in waiting), return_exceptions=True)
        batch: list[tuple[int, PutItem, Lengths | None]] = []
        for (i, block, _), encoded in zip(waiting, ended, strict=True):
            item = items[i]
            if isinstance(encoded, BaseException):
                block.let_go()
                outcomes[i] = PutOutcome(PutStatus.FAILED, CODEC)
                self.counts["encode_failed"] += 1
                text = "%s: a record cannot be encoded: %s"
                _thinning.log(log, logging.ERROR, f"encode {self.name}", text, self.name, encoded)
                continue
            length = encoded.length
            if length == 0:
                block.let_go()
                self.counts["incompressible"] += 1
                batch.append((i, item, None))
            else:
                block.shrink(length)
                hold = block.hold(item.key, length)
                block.let_go()
                lengths = Lengths(length, item.hold.length, encoded.codecs)
                batch.append((i, PutItem(item.key, cast("Hold", hold)), lengths))
        if not batch:
            return
        put = await self.inner.put([item for _, item, _ in batch])
        for (i, item, known), outcome in zip(batch, put, strict=True):
            outcomes[i] = outcome
            if outcome.status is PutStatus.STORED:
                if known is None:
                    length = items[i].hold.length
                    known = Lengths(length, length, b"")
                else:
                    self.counts["encoded"] += 1
                    self.counts["encoded_from_bytes"] += known.decoded_bytes
                    self.counts["encoded_to_bytes"] += known.stored_bytes
                self._lengths.note(item.key, known)

    # -- load ----------------------------------------------------------------------------------------------

    async def _load(self, items: list[LoadItem]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome(LoadStatus.FAILED, BAD_ITEM)] * len(items)
        good = [i for i, item in enumerate(items) if len(item.key) == KEY_BYTES]
        for i in set(range(len(items))).difference(good):
            items[i].hold.drop()
        lengths = {items[i].key: self._lengths.get(items[i].key) for i in good}
        if self._asks_heads:
            ask = [key for key, known in lengths.items() if known is None]
            found = dict(zip(ask, await self.inner.exists(ask), strict=True)) if ask else {}
            known_now = await self._heads.look_up(ask, list(found.values()), ask=True)
            lengths.update(zip(ask, known_now, strict=True))
        plain: list[int] = []
        encoded: list[tuple[int, int]] = []
        for i in good:
            key, hold = items[i].key, items[i].hold
            known = lengths[key]
            if known is None and self._asks_heads:
                presence, stored_bytes, reason = found[key]
                if presence is Presence.PRESENT:  # the medium has no `heads`
                    encoded.append((i, stored_bytes))
                    continue
                hold.drop()
                outcomes[i] = LoadOutcome(LoadStatus.ABSENT)
                if presence is Presence.UNKNOWN:
                    outcomes[i] = LoadOutcome(LoadStatus.FAILED, reason)
            elif known is None or (
                not known.codecs and not known.cannot and known.decoded_bytes == hold.length
            ):
                plain.append(i)
            elif known.cannot == reasons.CORRUPT:  # a load makes the medium notice it and remove the value
                encoded.append((i, known.stored_bytes))
            elif known.cannot or known.decoded_bytes != hold.length:
                hold.drop()
                reason = known.cannot or LENGTH
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, reason)
                self.counts[reason] += 1
            else:
                encoded.append((i, known.stored_bytes))
        await asyncio.gather(
            self._load_plain(items, plain, outcomes), self._load_encoded(items, encoded, outcomes)
        )
        for i in good:
            if outcomes[i].status in (LoadStatus.ABSENT, LoadStatus.CORRUPT):
                self._lengths.forget(items[i].key)
        return outcomes

    async def _load_plain(
        self, items: list[LoadItem], places: list[int], outcomes: list[LoadOutcome]
    ) -> None:
        """Load straight into the extents. A record that proves to be encoded is a miss; from then on heads are read."""
        if not places:
            return
        sides = [SideHold(items[i].hold) for i in places]
        try:
            batch = [
                LoadItem(items[i].key, cast("Hold", side)) for i, side in zip(places, sides, strict=True)
            ]
            loaded = await self.inner.load(batch)
            for i, side, outcome in zip(places, sides, loaded, strict=True):
                outcomes[i] = outcome
                if outcome.status is LoadStatus.LOADED and any(side.view()[CODECS]):
                    self._asks_heads = self.capabilities.has_heads
                    outcomes[i] = LoadOutcome(LoadStatus.FAILED, ENCODED)
                    side.view()[:8] = bytes(8)
        finally:
            for side in sides:
                side.end("codec")

    async def _load_encoded(
        self, items: list[LoadItem], places: list[tuple[int, int]], outcomes: list[LoadOutcome]
    ) -> None:
        """Load through staging, in groups that fit into it."""
        group: list[tuple[int, int, Block]] = []
        for i, stored_bytes in places:
            staging = self._staged()
            need_bytes = pages(stored_bytes)
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
            group.append((i, stored_bytes, block))
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
                known = self._lengths.get(key)
                if result.reason == LENGTH:
                    self._lengths.forget(key)
                elif known is not None:  # remember it, so that later lookups do not promise this record
                    self._lengths.note(key, known._replace(cannot=result.reason))
        if bad:
            await self.inner.delete(bad)

    def _decode(self, item: LoadItem, block: Block, length: int) -> LoadOutcome:
        """In a thread: decode the stored record in the block into the extent."""
        try:
            with item.hold.view() as target:
                self.chain.decode(block.view(length), target, item.key)
            return LoadOutcome(LoadStatus.LOADED)
        except CannotDecode as error:
            self._undecodable.note(error.reason, item.key, error)
            return LoadOutcome(LoadStatus.FAILED, error.reason)
        except BadRecord as error:
            text = "%s: removing the corrupt record %s: %s"
            _thinning.log(log, logging.WARNING, self.name, text, self.name, item.key.hex()[:16], error)
            return LoadOutcome(LoadStatus.CORRUPT, CODEC)
        finally:
            item.hold.drop()
            block.let_go()

    # -- life ----------------------------------------------------------------------------------------------

    def _staged(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self._staging_bytes)
        return self._staging
