"""Encodes records on their way to a medium and decodes them on their way back.

Lies around every adapter, also where no codec is configured: what a record says, not what is configured now, decides
how it is read, so a change of the chain loses nothing that is stored.  Without a codec nothing is staged or copied.

    put    extent ─(lane)─▶ staging ─▶ medium        the extent's hold ends with the encoding
    load   medium ─▶ staging ─(lane)─▶ extent        verified there, section by section

Invariants
1. Bytes between the codecs and the medium lie in a staging pool of fixed size, whose blocks are held by whoever
   touches them; L1 pays for none of it.
2. `exists` answers with lengths in L1.  A key whose length is not known yet costs one read of its headers.
3. What cannot be decoded (unknown codec, no or another key, no library) is a miss, is counted, and is never
   deleted or overwritten for it.  What decodes to anything else than the original record is removed.
4. A batch that was taken runs to its end, whoever waits.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from kvstrata.errors import StorageError
from kvstrata.native.copying import crc32c
from kvstrata.storage.base import (
    HEAD_BYTES,
    AdapterContext,
    Counts,
    Found,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    PayloadKind,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    Remarks,
    StorageAdapter,
    Usage,
    log_broken_contract,
    nothing_known,
)
from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.storage.wrap.codec_chain import FP8, BadRecord, CannotDecode, Chain, Encoded
from kvstrata.storage.wrap.staging import Block, Staging, pages
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

log = logging.getLogger(__name__)

T = TypeVar("T")

KNOWN_LENGTHS = 1 << 17
"""Keys whose lengths are remembered (about 200 bytes each)."""
LARGEST_RECORD_BYTES = 1 << 32
_OUTER = struct.Struct("<8sHHI32s32s8sQII")
_OUTER_CRC = struct.Struct("<I")
_OUTER_CRC_AT = 252
_PAYLOAD_BYTES = struct.Struct("<Q")
_PAYLOAD_BYTES_AT = 280
_INNER_MAGIC = slice(256, 264)
_CODECS = slice(80, 88)


class _Lengths(NamedTuple):
    """What is known of a stored record."""

    stored_bytes: int
    decoded_bytes: int
    codecs: bytes
    cannot: str = ""
    """Why it cannot be decoded here."""


class _SideHold:
    """A hold of which the medium lets go by itself, while another side still looks at the bytes."""

    def __init__(self, hold: Hold) -> None:
        self.key, self.length, self.address = hold.key, hold.length, hold.address
        self.offset, self.generation = hold.offset, hold.generation
        self._hold: Hold | None = hold
        self._sides = {"medium", "codec"}
        self._lock = threading.Lock()

    @property
    def is_held(self) -> bool:
        """The medium has not let go."""
        return "medium" in self._sides

    def view(self) -> memoryview:
        """The bytes."""
        hold = self._hold
        if hold is None:
            raise ValueError("the hold was dropped")
        return hold.view()

    def drop(self) -> None:
        """The medium's side ends. Idempotent; any thread."""
        self.end("medium")

    def end(self, side: str) -> None:
        """One side ends; the last one drops the hold."""
        with self._lock:
            self._sides.discard(side)
            hold = None if self._sides else self._hold
            if hold is not None:
                self._hold = None
        if hold is not None:
            hold.drop()


class CodecAdapter(StorageAdapter):
    """See the module. `workers` threads encode and decode."""

    def __init__(
        self, inner: StorageAdapter, chain: Chain, *, staging_bytes: int = 256 << 20, workers: int = 2
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.chain = chain
        self.counts: collections.Counter[str] = collections.Counter()
        """Records (and bytes where the name says so) by what became of them, each time they were asked for."""
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._lanes = Lanes(f"{inner.name[:5]}-codec", num_workers=workers)
        self._lengths: dict[bytes, _Lengths] = {}
        self._asks_heads = chain.encodes
        """Some records here may be encoded."""
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._numbers_are_broken = False
        self._said: set[str] = set()
        """Reasons why records cannot be decoded that the log has named."""
        self._kind_of: Callable[[bytes, bytes], PayloadKind | None] = nothing_known

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter. Raises StorageError too where it cannot work with encoded records."""
        if self.chain.encodes and not self.inner.capabilities.has_heads:
            raise StorageError(
                f"{self.name}: codec: this kind of storage cannot tell how long encoded records are; remove codec, or"
                " let the adapter implement `heads`",
                field="codec",
            )
        if self.chain.encodes and self.inner.capabilities.wants_registered_memory:
            raise StorageError(
                f"{self.name}: codec: this kind of storage moves bytes of L1 only; remove codec",
                field="codec",
            )
        self._kind_of = context.payload_kind
        evicted = context.record_evicted

        def record_evicted(key: bytes) -> None:
            self._lengths.pop(key, None)
            evicted(key)

        await self.inner.open(context._replace(record_evicted=record_evicted))

    def stats(self) -> dict[str, int]:
        """What is counted here."""
        used_bytes = 0 if self._staging is None else self._staging.used_bytes
        return {"staging_used_bytes": used_bytes, **self.counts}

    def numbers(self) -> dict[str, int]:
        """As the inner adapter; nothing where that breaks its contract, which costs no page its other numbers."""
        try:
            return msgspec.convert(self.inner.numbers(), Counts)
        except Exception as error:  # the plugin boundary
            if not self._numbers_are_broken:
                self._numbers_are_broken = True
                log_broken_contract(self.name, "numbers", error)
            return {}

    def remarks(self) -> dict[str, str]:
        """As the inner adapter; nothing where that breaks its contract."""
        try:
            return msgspec.convert(self.inner.remarks(), Remarks)
        except Exception as error:  # the plugin boundary
            log_broken_contract(self.name, "remarks", error)
            return {}

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the inner adapter, with lengths in L1; UNKNOWN for what cannot be decoded."""
        found = list(await self.inner.exists(keys))
        if not self._asks_heads and not self._lengths:
            return found
        lengths = await self._look_up(keys, found)
        for i, known in enumerate(lengths):
            if known is None:
                continue
            if known.cannot:
                found[i] = Found(Presence.UNKNOWN, 0, known.cannot)
                self.counts[known.cannot] += 1
            else:
                found[i] = Found(Presence.PRESENT, known.decoded_bytes)
        return found

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """As the inner adapter."""
        return await self.inner.heads(keys)

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the inner adapter."""
        return await self.inner.list_keys(cursor, most)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Encode, then as the inner adapter. What is there already is not encoded."""
        if not self.chain.encodes or self._closed or not items:
            return await self.inner.put(items)
        return await self._own(self._put(list(items)))

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the inner adapter, then decode."""
        if self._closed or not items:
            return await self.inner.load(items)
        return await self._own(self._load(list(items)))

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the inner adapter."""
        try:
            return await self.inner.delete(keys)
        finally:
            for key in keys:
                self._lengths.pop(key, None)

    async def clear(self) -> int:
        """As the inner adapter."""
        try:
            return await self.inner.clear()
        finally:
            self._lengths.clear()

    def advertisement(self) -> bytes:
        """As the inner adapter."""
        return self.inner.advertisement()

    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """As the inner adapter."""
        self.inner.prefer(keys, source)

    async def usage(self) -> Usage:
        """As the inner adapter: bytes as stored."""
        return await self.inner.usage()

    async def close(self) -> None:
        """Wait for what is in flight, close the inner adapter, end the threads. Idempotent."""
        self._closed = True
        while self._running:
            await asyncio.wait(set(self._running))
        await self.inner.close()
        await self._lanes.close()

    # -- lengths -------------------------------------------------------------------------------------------

    async def _look_up(self, keys: Sequence[bytes], found: Sequence[Found]) -> list[_Lengths | None]:
        """Lengths of what was found, read from the medium where they are not known; None: not there, or unsound."""
        lengths: list[_Lengths | None] = [None] * len(keys)
        unknown: list[int] = []
        for i, (key, (presence, stored_bytes, _)) in enumerate(zip(keys, found, strict=True)):
            if presence is Presence.PRESENT:
                known = self._lengths.get(key)
                if known is not None and known.stored_bytes == stored_bytes:
                    lengths[i] = known
                elif self._asks_heads:
                    unknown.append(i)
        if unknown and self.inner.capabilities.has_heads:
            heads = await self.inner.heads([keys[i] for i in unknown])
            for i, head in zip(unknown, heads, strict=True):
                known = self._read_head(keys[i], bytes(head), found[i].record_bytes)
                if known is not None:
                    lengths[i] = known
                    self._note(keys[i], known)
        return lengths

    def _read_head(self, key: bytes, head: bytes, stored_bytes: int) -> _Lengths | None:
        """What the headers of a record of this stored length say; None when they are not sound."""
        if len(head) < HEAD_BYTES:
            return None
        magic, version, flags, header_bytes, of, _, codecs, body_bytes, _, _ = _OUTER.unpack_from(head, 0)
        if magic != b"KVSTRATA" or of != key:
            return None
        if version != 1:
            return _Lengths(stored_bytes, 0, b"", "mismatch")
        (payload_bytes,) = _PAYLOAD_BYTES.unpack_from(head, _PAYLOAD_BYTES_AT)
        if (
            crc32c(head[:_OUTER_CRC_AT]) != _OUTER_CRC.unpack_from(head, _OUTER_CRC_AT)[0]
            or head[_INNER_MAGIC] != b"KVCHUNK1"
            or header_bytes + body_bytes != stored_bytes
            or header_bytes + payload_bytes >= LARGEST_RECORD_BYTES
        ):
            return None
        codecs = codecs.rstrip(b"\0")
        cannot = "mismatch" if flags else self.chain.cannot_decode(codecs)
        if cannot:
            self._say_once(
                cannot, key, f"written with codecs {list(codecs)}, which this server cannot decode"
            )
        return _Lengths(stored_bytes, header_bytes + payload_bytes, codecs, cannot)

    def _note(self, key: bytes, lengths: _Lengths) -> None:
        self._lengths.pop(key, None)
        self._lengths[key] = lengths
        while len(self._lengths) > KNOWN_LENGTHS:
            self._lengths.pop(next(iter(self._lengths)), None)

    # -- put -----------------------------------------------------------------------------------------------

    async def _put(self, items: list[PutItem]) -> list[PutOutcome]:
        outcomes = [PutOutcome(PutStatus.FAILED, "bad_item")] * len(items)
        found = await self.exists([item.key for item in items])
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
                # What was staged so far must leave before this one has room for certain.
                await self._put_encoded(items, waiting, outcomes)
                waiting = []
                block = await self._staged().take(need_bytes, for_put=True)
                if block is None:
                    item.hold.drop()
                    outcomes[i] = PutOutcome(PutStatus.THROTTLED, "staging")
                    continue
            if block is None:
                item.hold.drop()
                outcomes[i] = PutOutcome(PutStatus.FAILED, "staging_too_small")
                continue
            work = self._lanes.submit(Lane.PUT, functools.partial(self._encode, item, block))
            if work is None:
                item.hold.drop()
                block.let_go()
                outcomes[i] = PutOutcome(PutStatus.THROTTLED, "queue_full")
                continue
            waiting.append((i, block, work))
        await self._put_encoded(items, waiting, outcomes)
        return outcomes

    def _encode(self, item: PutItem, block: Block) -> Encoded:
        """In a thread: the record into the block. The hold is dropped, unless it is to be stored as it is."""
        need_bytes = self.chain.staging_bytes(item.hold.length)
        try:
            with item.hold.view() as source:
                encoded = self.chain.encode(source, block.view(need_bytes), self._kind_of)
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
        batch: list[tuple[int, PutItem, _Lengths | None]] = []
        for (i, block, _), encoded in zip(waiting, ended, strict=True):
            item = items[i]
            if isinstance(encoded, BaseException):
                block.let_go()
                outcomes[i] = PutOutcome(PutStatus.FAILED, "codec")
                self.counts["encode_failed"] += 1
                log.error("%s: a record cannot be encoded: %s", self.name, encoded)
                continue
            length = encoded.length
            if self.chain.settings.fp8 and FP8 not in encoded.codecs:
                self.counts["fp8_skipped"] += 1
            if length == 0:
                block.let_go()
                self.counts["incompressible"] += 1
                batch.append((i, item, None))
            else:
                block.shrink(length)
                hold = block.hold(item.key, length)
                block.let_go()
                lengths = _Lengths(length, item.hold.length, encoded.codecs)
                batch.append((i, PutItem(item.key, cast("Hold", hold)), lengths))
        if not batch:
            return
        put = await self.inner.put([item for _, item, _ in batch])
        for (i, item, known), outcome in zip(batch, put, strict=True):
            outcomes[i] = outcome
            if outcome.status is PutStatus.STORED:
                if known is None:
                    length = items[i].hold.length
                    known = _Lengths(length, length, b"")
                else:
                    self.counts["encoded"] += 1
                    self.counts["encoded_from_bytes"] += known.decoded_bytes
                    self.counts["encoded_to_bytes"] += known.stored_bytes
                self._note(item.key, known)

    # -- load ----------------------------------------------------------------------------------------------

    async def _load(self, items: list[LoadItem]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome(LoadStatus.FAILED, "bad_item")] * len(items)
        good = [i for i, item in enumerate(items) if len(item.key) == KEY_BYTES]
        for i in set(range(len(items))).difference(good):
            items[i].hold.drop()
        lengths = {items[i].key: self._lengths.get(items[i].key) for i in good}
        if self._asks_heads:
            ask = [key for key, known in lengths.items() if known is None]
            found = dict(zip(ask, await self.inner.exists(ask), strict=True)) if ask else {}
            lengths.update(zip(ask, await self._look_up(ask, list(found.values())), strict=True))
        plain: list[int] = []
        encoded: list[tuple[int, int, int]] = []
        for i in good:
            key, hold = items[i].key, items[i].hold
            known = lengths[key]
            if known is None and self._asks_heads:
                presence, stored_bytes, reason = found[key]
                if presence is Presence.PRESENT:  # unsound headers: the medium itself shall find out and heal
                    encoded.append((i, stored_bytes, 0))
                    continue
                hold.drop()
                outcomes[i] = LoadOutcome(LoadStatus.ABSENT)
                if presence is Presence.UNKNOWN:
                    outcomes[i] = LoadOutcome(LoadStatus.FAILED, reason)
            elif known is None or (not known.codecs and known.decoded_bytes == hold.length):
                plain.append(i)
            elif known.cannot or known.decoded_bytes != hold.length:
                hold.drop()
                reason = known.cannot or "length"
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, reason)
                self.counts[reason] += 1
            else:
                scratch_bytes = self.chain.scratch_bytes(known.codecs, known.decoded_bytes)
                encoded.append((i, known.stored_bytes, scratch_bytes))
        await asyncio.gather(
            self._load_plain(items, plain, outcomes), self._load_encoded(items, encoded, outcomes)
        )
        for i in good:
            if outcomes[i].status in (LoadStatus.ABSENT, LoadStatus.CORRUPT):
                self._lengths.pop(items[i].key, None)
        return outcomes

    async def _load_plain(
        self, items: list[LoadItem], places: list[int], outcomes: list[LoadOutcome]
    ) -> None:
        """Straight into the extents. What turns out to be encoded is a miss, once."""
        if not places:
            return
        sides = [_SideHold(items[i].hold) for i in places]
        try:
            batch = [
                LoadItem(items[i].key, cast("Hold", side)) for i, side in zip(places, sides, strict=True)
            ]
            loaded = await self.inner.load(batch)
            for i, side, outcome in zip(places, sides, loaded, strict=True):
                outcomes[i] = outcome
                if outcome.status is LoadStatus.LOADED and any(side.view()[_CODECS]):
                    self._asks_heads = True
                    outcomes[i] = LoadOutcome(LoadStatus.FAILED, "encoded")
                    side.view()[:8] = bytes(8)
        finally:
            for side in sides:
                side.end("codec")

    async def _load_encoded(
        self, items: list[LoadItem], places: list[tuple[int, int, int]], outcomes: list[LoadOutcome]
    ) -> None:
        """Through staging, in groups that it has room for."""
        group: list[tuple[int, int, Block]] = []
        for i, stored_bytes, scratch_bytes in places:
            staging = self._staged()
            need_bytes = pages(stored_bytes) + scratch_bytes
            if not staging.fits(need_bytes, for_put=False):
                items[i].hold.drop()
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, "staging_too_small")
                continue
            block = staging.take_now(need_bytes, for_put=False)
            if block is None:
                await self._load_group(items, group, outcomes)
                group = []
                block = await staging.take(need_bytes, for_put=False)
            if block is None:
                items[i].hold.drop()
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, "throttled")
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
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, "throttled")
            if work is None:
                items[i].hold.drop()
                block.let_go()
            else:
                decoding.append((i, work))
        bad: list[bytes] = []
        ended = await asyncio.gather(*(work for _, work in decoding), return_exceptions=True)
        for (i, _), result in zip(decoding, ended, strict=True):
            if isinstance(result, BaseException):
                log.error("%s: a record cannot be decoded, by our own mistake", self.name, exc_info=result)
                result = LoadOutcome(LoadStatus.FAILED, "codec")
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
                if result.reason == "length":
                    self._lengths.pop(key, None)
                elif known is not None:  # ask no more for what cannot be had
                    self._lengths[key] = known._replace(cannot=result.reason)
        if bad:
            await self.inner.delete(bad)

    def _say_once(self, reason: str, key: bytes, error: object) -> None:
        """From any thread. Where servers share a storage and not a codec, every record of the others comes here."""
        if reason not in self._said:
            self._said.add(reason)
            what = (
                "%s: record %s: %s; more are only counted (%s). Give all servers of a storage the same codec"
            )
            log.warning(what, self.name, key.hex()[:16], error, reason)

    def _decode(self, item: LoadItem, block: Block, length: int) -> LoadOutcome:
        """In a thread: the stored record in the block into the extent."""
        try:
            with item.hold.view() as target:
                scratch = block.view(block.room)[pages(length) :]
                self.chain.decode(block.view(length), target, item.key, scratch)
            return LoadOutcome(LoadStatus.LOADED)
        except CannotDecode as error:
            self._say_once(error.reason, item.key, error)
            return LoadOutcome(LoadStatus.FAILED, error.reason)
        except BadRecord as error:
            log.warning("%s: record %s is corrupt and is removed: %s", self.name, item.key.hex()[:16], error)
            return LoadOutcome(LoadStatus.CORRUPT, "codec")
        finally:
            item.hold.drop()
            block.let_go()

    # -- life ----------------------------------------------------------------------------------------------

    def _staged(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self._staging_bytes)
        return self._staging

    async def _own(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which goes on where the caller is cancelled."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)
