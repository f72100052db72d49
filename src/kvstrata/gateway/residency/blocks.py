"""The blocks that one engine has in one tier, as its events tell them, in the registry of all engines.

They have up to two slots in the registry: `exact`, for what was heard without a gap up to now, and `doubtful`, for what
was heard before events were lost, and may have been removed unheard.

1. A block counts once for each time that it was stored: engines store it twice if two requests compute it at once, and
   tell each removal.  What was stored before events were lost counts no more once it is stored again.
2. What is removed or cleared is in neither slot, and what is denied is not in `doubtful`.
3. A block whose parent is unknown, because it was stored before this gateway listened, has no key; it is counted as an
   orphan and otherwise left out, as are its children.
4. At most MAX_BLOCKS blocks by events, and as many that the engine only reported; beyond them these are forgotten.
"""

from __future__ import annotations

import random
import statistics
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from kvstrata.gateway.residency.batches import (
    NOTHING,
    BlockRemoved,
    BlockStored,
    Hash,
)
from kvstrata.gateway.residency.prompt import extra_of, extras_of, keys_of, root_of
from kvstrata.native.registry import Registry, RegistryError

MAX_BLOCKS = 1 << 21
MAX_SIZES = 4
"""Block sizes of one engine, whose groups of layers may have different ones."""
KEY, TAG = 32, 8
LIFE_SAMPLE = 16
"""One block of so many has its life measured."""
SAMPLES = 256
MAX_AWAITED = 4_096

Slot = Literal["exact", "doubtful"]
RANKS: dict[Slot, int] = {"exact": 0, "doubtful": 1}


class Blocks:
    """See the module. Belongs to the thread of the watcher; others read only the plain numbers and `slots`."""

    def __init__(self, registry: Registry, group: int, now_s: Callable[[], float]) -> None:
        self._registry = registry
        self.group = group
        self._now_s = now_s
        self.slots: dict[Slot, int] = {}
        """Those that hold something."""
        self.doubtful_since_s = 0.0
        """When events were lost: of several times, the mean by blocks."""
        self.sizes: tuple[int, ...] = ()
        """Tokens of a block, as far as chains have begun with them."""
        self._keys: dict[Hash, bytes] = {}
        self._old_keys: dict[Hash, bytes] = {}
        """Those of before the last loss: each may have been removed unheard."""
        self._more: dict[Hash, int] = {}
        """How often a block was stored beyond the first time."""
        self._born_s: dict[Hash, float] = {}
        self._draw = random.Random(group)
        self._lives: deque[float] = deque(maxlen=SAMPLES)
        self._awaited: dict[bytes, float] = {}
        self._lags: deque[float] = deque(maxlen=SAMPLES)
        self.orphans = 0
        self.life_s = 0.0
        """Median life of a block; 0: none has been removed yet."""
        self.lag_s = 0.0
        """Time in which nine of ten blocks were told after their request's first token; 0: not known yet."""

    def __len__(self) -> int:
        """Blocks that are known by the engine's name."""
        return len(self._keys) + len(self._old_keys)

    def apply(self, event: BlockStored | BlockRemoved) -> None:
        """Take in an event. Raises ValueError for one that contradicts itself."""
        if isinstance(event, BlockStored):
            self._stored(event)
        else:
            self._removed(event.block_hashes)

    def forget(self) -> None:
        """Nothing is there."""
        for which in list(self.slots):
            self._registry.retire(self.slots.pop(which))
        for known in (self._keys, self._old_keys, self._more, self._born_s, self._awaited):
            known.clear()

    def doubt(self) -> None:
        """Events were lost: what is known may have been removed unheard."""
        self._born_s.clear()
        if not self._keys:
            return
        before, fresh = self._in("doubtful"), len(self._keys)
        self.doubtful_since_s = (self.doubtful_since_s * before + self._now_s() * fresh) / (before + fresh)
        self._admit("doubtful", b"".join([key[:TAG] for key in self._keys.values()]))
        if "exact" in self.slots:
            self._registry.retire(self.slots.pop("exact"))
        self._old_keys.update(self._keys)
        self._keys.clear()
        self._more.clear()

    def told(self, keys: bytes) -> None:
        """The engine reports a hit on these blocks, whose events were not heard."""
        before, fresh = self._in("doubtful"), len(keys) // KEY
        if before + fresh > 2 * MAX_BLOCKS:  # those of events are at most half of them
            self._registry.retire(self.slots.pop("doubtful"))
            self._old_keys.clear()
            before = 0
        if fresh:
            self.doubtful_since_s = (self.doubtful_since_s * before + self._now_s() * fresh) / (
                before + fresh
            )
            self._admit("doubtful", _tags(keys))

    def denied(self, keys: bytes) -> None:
        """The engine has computed these blocks although they were taken for cached: a removal was not heard.

        They are there now, since it has computed them; what counts once more than that counts no longer.  Those that
        were told once stay: their removal and their new storing may both have been heard since the choice.
        """
        gone = {keys[at : at + KEY] for at in range(0, len(keys), KEY)}
        self._removed([name for name in self._more if self._keys[name] in gone])
        self._removed([name for name, key in self._old_keys.items() if key in gone])
        if "doubtful" in self.slots:
            self._registry.evict(self.slots["doubtful"], _tags(keys))

    def expect(self, tag: bytes, at_s: float) -> None:
        """A request whose last whole block is this had its first token at this time; its event is to come."""
        if len(self._awaited) >= MAX_AWAITED:
            self._awaited.clear()
        self._awaited[tag] = at_s

    # -- events ----------------------------------------------------------------------------------------------

    def _stored(self, event: BlockStored) -> None:
        names, size = event.block_hashes, event.block_size
        if not names:
            return
        if len(event.token_ids) != len(names) * size:
            raise ValueError(
                f"{len(event.token_ids)} tokens do not make {len(names)} blocks of {size} tokens"
            )
        if event.parent_block_hash is None:
            start = root_of(size)
            if size not in self.sizes and len(self.sizes) < MAX_SIZES:
                self.sizes += (size,)
        else:
            parent = event.parent_block_hash
            found = self._keys.get(parent) or self._old_keys.get(parent)
            if found is None:
                self.orphans += len(names)
                return
            start = found
        try:
            tokens = array("I", event.token_ids)
        except OverflowError:
            raise ValueError("token_ids: a token is negative or above 2^32 - 1") from None
        keys = keys_of(start, tokens, size, _extras(event))
        if len(self) + len(names) > MAX_BLOCKS:
            self.forget()
            raise ValueError(f"more than {MAX_BLOCKS} blocks in one cache")
        self._note(names, keys, again=event.again)

    def _note(self, names: Sequence[Hash], keys: bytes, *, again: bool) -> None:
        known, more, now_s = self._keys, self._more, self._now_s()
        tags = []
        for number, name in enumerate(names):
            key = keys[number * KEY : number * KEY + KEY]
            tag = key[:TAG]
            if name in known:
                if not again:
                    more[name] = more.get(name, 0) + 1
            else:
                self._old_keys.pop(name, None)
                known[name] = key
                if not again and not self._draw.randrange(LIFE_SAMPLE):
                    self._born_s[name] = now_s
            tags.append(tag)
        if self._awaited and not again and (since_s := self._awaited.pop(tags[-1], None)) is not None:
            self._lags.append(max(0.0, now_s - since_s))
            self.lag_s = sorted(self._lags)[int(0.9 * len(self._lags))]
        joined = b"".join(tags)
        self._admit("exact", joined)
        if "doubtful" in self.slots:
            self._registry.evict(self.slots["doubtful"], joined)

    def _removed(self, names: Sequence[Hash]) -> None:
        gone = []
        for name in names:
            left = self._more.get(name, 0)
            if left > 1:
                self._more[name] = left - 1
            elif left:
                del self._more[name]
            elif (key := self._drop(name)) is not None:
                gone.append(key[:TAG])
        if gone:
            self._evict(b"".join(gone))

    def _drop(self, name: Hash) -> bytes | None:
        self._more.pop(name, None)
        if (born_s := self._born_s.pop(name, None)) is not None:
            self._lives.append(self._now_s() - born_s)
            self.life_s = statistics.median(self._lives)
        old = self._old_keys.pop(name, None)
        return self._keys.pop(name, old)

    # -- the registry ----------------------------------------------------------------------------------------

    def _in(self, which: Slot) -> int:
        """Blocks in a slot."""
        row = self._registry.slot(self.slots[which]) if which in self.slots else None
        return row.keys if row is not None else 0

    def _admit(self, which: Slot, tags: bytes) -> None:
        if which not in self.slots:
            slot = self._registry.open_slot(self.group, rank=RANKS[which])
            if slot is None:
                raise ValueError("no slot of the registry is free")
            self._registry.publish(slot)
            self.slots[which] = slot
        try:
            self._registry.admit(self.slots[which], tags)
        except RegistryError as error:
            raise ValueError(f"the index of the fleet's caches refuses blocks: {error.reason}") from None

    def _evict(self, tags: bytes) -> None:
        for slot in self.slots.values():
            self._registry.evict(slot, tags)


def _extras(event: BlockStored) -> dict[int, bytes] | None:
    """The extras of an event's blocks by their numbers."""
    given = event.extra_keys
    if given is None:
        # Older engines tell only the adapter. Their salts stay unknown, so a salted prompt never finds its blocks.
        return extras_of(event.lora_name or "", "", len(event.block_hashes))
    if len(given) != len(event.block_hashes):
        raise ValueError(f"extra_keys: {len(given)} for {len(event.block_hashes)} blocks")
    found = {number: extra_of(bytes(one)) for number, one in enumerate(given) if bytes(one) != NOTHING}
    return found or None


def _tags(keys: bytes) -> bytes:
    return b"".join(keys[at : at + TAG] for at in range(0, len(keys), KEY))
