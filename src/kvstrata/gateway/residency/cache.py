"""Applies the KV events of one engine to the registry of all engines' cached blocks.

vLLM encodes a batch of events as a msgpack array [time, events, rank] and each event as a tagged map.  Fields that are
not needed, and fields of newer versions, are ignored.

1. A block has a count of how often it was stored: engines store it twice if two requests compute it at once, and
   announce each removal.
2. After a loss of events all blocks of the engine are forgotten: the engine replays its events (zmq_watcher.py), or
   kvstrata's connector announces the blocks again.
3. A block whose parent is unknown, because it was stored before this gateway listened, has no key; it is counted as an
   orphan and otherwise left out, as are its children.
4. At most MAX_BLOCKS blocks are kept; if there are more, all blocks of the engine are forgotten.

Events about media other than the engine's own (GPU) are ignored: instances report the chunks in L1 and L2.
"""

from __future__ import annotations

import random
import statistics
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.gateway.residency.prompt import extra_of, extras_of, root_of
from kvstrata.native.core import Registry, RegistryError, chain_keys

MAX_BLOCKS = 1 << 21
MAX_SIZES = 4
"""Maximum number of block sizes of one engine, whose groups of layers may have different ones."""
MAX_ALL_SIZES = 16
MASK_BYTES = 8_192
KEY, TAG = 32, 8
LIFE_SAMPLE = 16
"""The life of one block in LIFE_SAMPLE is measured."""
SAMPLES = 256
OWN_MEDIA = (None, "GPU")


MAX_BLOCK_TOKENS = 8_192
MAX_EVENTS = 65_536

NOTHING = b"\xc0"
"""msgpack's null."""

MAX_HASH_BYTES = 64
Hash = Annotated[bytes, Meta(max_length=MAX_HASH_BYTES)] | int
"""The engine's own hash of a block, which only the engine can compute."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks that are now in the prefix cache. They form one chain below `parent_block_hash`."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[msgspec.Raw] | None = None
    """For each block, the other inputs of its KV besides tokens: an array, or NOTHING."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    again: bool = False
    """Whether kvstrata's connector re-announces the blocks for late subscribers: known blocks are not counted again."""


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks that were removed from the cache."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The whole cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """The changes of one step of an engine."""

    ts: float
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)]


_decode = msgspec.msgpack.Decoder(Batch).decode


def decoded(payload: bytes) -> Batch:
    """Decode a batch. Raises ValueError if the payload is invalid."""
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"invalid batch of KV events: {error}") from None


class Cache:
    """One engine's blocks. Belongs to the watcher's thread; other threads read only its numbers and `slot`."""

    def __init__(
        self,
        registry: Registry,
        group: int,
        now_s: Callable[[], float],
        mask: bytearray | None = None,
        all_sizes: list[int] | None = None,
    ) -> None:
        """`mask` and `all_sizes`: slots and block sizes of all engines, shared and updated by all caches."""
        self._registry = registry
        self._mask = mask if mask is not None else bytearray(MASK_BYTES)
        self._all_sizes = all_sizes if all_sizes is not None else []
        self.group = group
        self._now_s = now_s
        self.slot: int | None = None
        """The engine's slot in the registry; None: no blocks are known."""
        self.sizes: tuple[int, ...] = ()
        """Block sizes, in tokens, of the engine's chains."""
        self.emptied_s = float("-inf")
        """Time of the last event that emptied the cache, or of the last restart that was noticed."""
        self.missed_s = float("-inf")
        """Time of the last loss of events that could not be repaired."""
        self._keys: dict[Hash, bytes] = {}
        self._more: dict[Hash, int] = {}
        """By block: how often it was stored beyond the first time."""
        self._born_s: dict[Hash, float] = {}
        self._draw = random.Random(group)
        self._lives: deque[float] = deque(maxlen=SAMPLES)
        self.orphans = 0
        self.life_s = 0.0
        """Median life of a block; 0: no measured block has been removed yet."""

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, batch: Batch) -> None:
        """Apply a batch. Raises ValueError for an invalid event; the events before it stay applied."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.emptied()
            elif event.medium not in OWN_MEDIA:
                continue
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                self._removed(event.block_hashes)

    def emptied(self) -> None:
        """Forget all blocks, since the engine has cleared its cache or may have restarted."""
        self.forget()
        self.emptied_s = self._now_s()

    def missed(self) -> None:
        """Forget all blocks, since events were lost and cannot be replayed."""
        self.forget()
        self.missed_s = self._now_s()

    def forget(self) -> None:
        """Forget all blocks."""
        if self.slot is not None:
            self._mask[self.slot >> 3] &= ~(1 << (self.slot & 7))
            self._registry.retire(self.slot)
            self.slot = None
        for known in (self._keys, self._more, self._born_s):
            known.clear()

    def _stored(self, event: BlockStored) -> None:
        names, size = event.block_hashes, event.block_size
        if not names:
            return
        if len(event.token_ids) != len(names) * size:
            raise ValueError(f"{len(event.token_ids)} tokens are not {len(names)} blocks of {size} tokens")
        if event.parent_block_hash is None:
            start = root_of(size)
            if size not in self.sizes and len(self.sizes) < MAX_SIZES:
                self.sizes += (size,)
                if size not in self._all_sizes and len(self._all_sizes) < MAX_ALL_SIZES:
                    self._all_sizes.append(size)
        else:
            found = self._keys.get(event.parent_block_hash)
            if found is None:
                self.orphans += len(names)
                return
            start = found
        try:
            tokens = array("I", event.token_ids)
        except OverflowError:
            raise ValueError("token_ids: a token is negative or above 2^32 - 1") from None
        keys = chain_keys(start, tokens, size, _extras(event))
        if len(self) + len(names) > MAX_BLOCKS:
            self.forget()
            raise ValueError(f"more than {MAX_BLOCKS} blocks in one cache")
        self._note(names, keys, again=event.again)

    def _note(self, names: Sequence[Hash], keys: bytes, *, again: bool) -> None:
        known, more, now_s = self._keys, self._more, self._now_s()
        tags = []
        for number, name in enumerate(names):
            key = keys[number * KEY : number * KEY + KEY]
            if name not in known:
                known[name] = key
                if not again and not self._draw.randrange(LIFE_SAMPLE):
                    self._born_s[name] = now_s
            elif not again:
                more[name] = more.get(name, 0) + 1
            tags.append(key[:TAG])
        if self.slot is None:
            self.slot = self._registry.open_slot(self.group)
            if self.slot is None:
                raise ValueError("no slot of the registry is free")
            self._registry.publish(self.slot)
            self._mask[self.slot >> 3] |= 1 << (self.slot & 7)
        try:
            self._registry.admit(self.slot, b"".join(tags))
        except RegistryError as error:
            raise ValueError(f"the index of all engines' caches refuses blocks: {error.reason}") from None

    def _removed(self, names: Sequence[Hash]) -> None:
        gone = []
        for name in names:
            left = self._more.pop(name, 0)
            if left > 1:
                self._more[name] = left - 1
            elif not left and (key := self._keys.pop(name, None)) is not None:
                gone.append(key[:TAG])
                if (born_s := self._born_s.pop(name, None)) is not None:
                    self._lives.append(self._now_s() - born_s)
                    self.life_s = statistics.median(self._lives)
        if gone and self.slot is not None:
            self._registry.evict(self.slot, b"".join(gone))


def _extras(event: BlockStored) -> dict[int, bytes] | None:
    """The extras of an event's blocks, by their positions; None: no block has extras."""
    given = event.extra_keys
    if given is None:
        # Older engines report only the adapter. Their salts stay unknown, so a salted prompt never finds its blocks.
        return extras_of(event.lora_name or "", "", len(event.block_hashes))
    if len(given) != len(event.block_hashes):
        raise ValueError(f"extra_keys: {len(given)} for {len(event.block_hashes)} blocks")
    found = {number: extra_of(bytes(one)) for number, one in enumerate(given) if bytes(one) != NOTHING}
    return found or None
