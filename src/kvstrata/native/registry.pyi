"""The registry of the controller's directory: which instance holds which chunk, and in which tier.

A *placement* is (tag, slot).  A *tag* is the first 8 bytes of a 32-byte storage key, little-endian; batches of tags
are bytes-like objects of 8 bytes each.  Only the upper 57 bits count: tags that differ only in the lowest 7 are
one tag.  With n tags present, a tag that nobody holds is found with odds of n / 2**57 (6.9e-10 for 10**8).  The
instance that is asked for the chunk compares the full key, so such a find costs a refused lease and never gives wrong
KV.

A *slot* is a number from 1 to `MAX_SLOTS` that stands for one (incarnation of an instance, tier), or for a full sync
of that tier in progress.  Its states:

    free → hidden (`open_slot`: being filled, not found) → visible (`publish`) → retired (`retire`) → free (`sweep`)

1. A lookup finds a placement only if it was admitted and not evicted since, and its slot is visible.
2. `retire` costs the same for any number of placements, and no lookup that begins after it finds one of them.
3. A retired slot becomes free when a pass of `sweep` over all placements that began after its retirement has ended.
   `open_slot` answers None while no slot is free.
4. Admitting a placement that is present changes nothing, nor does evicting one that is absent.
5. Every method may be called from any thread.  Lookups never wait for a batch that another thread admits; batches are
   cut into pieces of some microseconds between which other writers get their turn.  The GIL is released while a batch
   is worked on.

A *group* is any number below 65,536 that the slots of one instance share (each of its incarnations may have its own).
Slot numbers are used again: translate a lookup's slots to instances before the next `open_slot`.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from typing_extensions import Buffer

from kvstrata.errors import MediumError

MAX_SLOTS: Final[int]
"""65,534."""

class RegistryError(MediumError):
    """A call was refused. `reason`: `no_space` (the bound on bytes), or `bad_slot` (its state forbids the call)."""

    reason: str
    def __init__(self, message: str, *, reason: str) -> None: ...

class Candidate(NamedTuple):
    """One group's answer to `lookup_prefix`."""

    group: int
    chunks: int
    """Length of the longest prefix all of whose keys its allowed slots hold."""
    slots: array[int]
    """Type "H": for each of the prefix's chunks * n_slices keys, the slot of lowest rank that holds it."""

class Slot(NamedTuple):
    """A slot that is not free."""

    slot: int
    group: int
    rank: int
    state: str
    """`hidden`, `visible` or `retired`."""
    keys: int
    """Placements in the slot; for a retired slot, those not yet swept."""

class RegistryUsage(NamedTuple):
    """Numbers of the whole registry."""

    bytes: int
    """Memory taken from the system and not given back: placements, lists of holders, slots, and room to grow."""
    placements: int
    """Placements in all slots, including those of retired slots until they are swept."""
    shared_tags: int
    """Tags with so many holders that a separate list names them."""
    slots: int
    """Slots that are not free."""
    retired: int
    """Slots that are retired and not yet swept."""
    rebuilds: int
    """Times a partition grew or shrank."""
    refused: int
    """Placements refused because too many others have nearly the same tag, which never happens by chance."""

class Registry:
    def __init__(self, *, max_bytes: int = 4 << 30, max_slots: int = MAX_SLOTS) -> None:
        """An empty registry that takes at most about `max_bytes` (64 MiB to 1 TiB) of memory, as it needs it.

        Raises ValueError naming the argument, and MemoryError if the address space cannot be reserved.
        """

    def open_slot(self, group: int, *, rank: int = 0) -> int | None:
        """Take a free slot, which becomes hidden and empty; None if no slot is free (`sweep` frees retired ones).

        `group` is below 65,536. `rank` (0 to 255): of several slots of one group that hold a key, `lookup_prefix` names
        the one of the lowest rank (0 for L1, 1 for the nearest L2 tier, …).
        """

    def publish(self, slot: int, *, retire: int | None = None) -> None:
        """Make a hidden slot visible, then retire another one, so that every lookup finds at least one of the two.

        Raises RegistryError(bad_slot), and changes nothing, if `slot` is not hidden or `retire` is neither hidden nor
        visible.
        """

    def retire(self, slot: int) -> None:
        """Forget all placements of a hidden or visible slot. O(1). Raises RegistryError(bad_slot) for any other."""

    def admit(self, slot: int, tags: Buffer) -> int:
        """Add placements; returns how many of them are new.

        Raises RegistryError: `bad_slot` if the slot is neither hidden nor visible (even if it is retired meanwhile),
        `no_space` at the bound on bytes.  Tags of the batch that were added before the error stay; repeating the batch
        is harmless.  After every 512 tags, other threads that wait for this processor run first.
        """

    def evict(self, slot: int, tags: Buffer) -> int:
        """Remove placements; returns how many were present. Raises as `admit`, except for `no_space`."""

    def sweep(self, max_cells: int = 65_536) -> int:
        """Run one step of the background pass that frees retired slots; returns how many cells (8 bytes each) it read.

        A step reads at most one partition (1/1024 of all placements) beyond `max_cells`; after each partition, other
        threads that wait for this processor run first.  0: no slot is retired; call again when one is.
        """

    def lookup(self, tag: int) -> tuple[int, ...]:
        """The visible slots that hold one tag, in no order."""

    def holders(self, tags: Buffer) -> list[tuple[int, ...]]:
        """The visible slots that hold each tag of a batch, in no order."""

    def lookup_prefix(
        self,
        tags: Buffer,
        *,
        n_slices: int = 1,
        allowed: Buffer | None = None,
        except_group: int | None = None,
        best: int = 1,
    ) -> list[Candidate]:
        """The groups that each hold the longest leading part of a chain, the longest part first.

        `tags` are those of the chunks in order, the `n_slices` of each chunk one after another; a group holds a chunk
        if it holds all its slices.  A slot counts if it is visible, is not of `except_group` (usually the asking
        instance) and, with `allowed`, has its bit set there (bit slot & 7 of byte slot >> 3; missing bytes are zero).
        Returns at most `best` groups, all of which hold the first chunk; of groups with equally long prefixes, any.
        """

    def slot(self, slot: int) -> Slot | None:
        """The slot's facts; None if it is free."""

    def slots(self) -> list[Slot]:
        """All slots that are not free."""

    def dump(self, cursor: int = 0, max_cells: int = 65_536) -> tuple[array[int], array[int], int]:
        """One step through the placements of visible slots: tags (type "Q"), the slot of each ("H"), next cursor.

        Begin with cursor 0 and end when the next one is 0.  Placements that are present from the first step to the last
        come exactly once; those admitted or evicted meanwhile may be missing.  The lowest 7 bits of each tag are zero.
        """

    def restore(self, tags: Buffer, slots: Buffer, slot_of: Buffer) -> int:
        """Admit the placements of a `dump`, each to the slot that `slot_of[slot]` names (0: leave it out).

        Returns how many are new.  `slots` and `slot_of` are native u16.  Raises ValueError if their lengths do not
        agree, and RegistryError as `admit`.
        """

    def usage(self) -> RegistryUsage:
        """The numbers now. Never waits for other threads."""
