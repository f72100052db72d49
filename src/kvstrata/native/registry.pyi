"""The registry of the controller's directory: which instance holds which chunk, and in which tier.

A *placement* is (tag, slot).  A *tag* is the first 8 bytes of a 32-byte storage key, little-endian; batches of tags
are bytes-like objects of 8 bytes each.  Of a tag, `TAG_BITS` bits count (the lowest 7 do not): two tags that differ in
those only are one.  With n tags present, a tag that nobody holds is found with odds of n / 2**57 (6.9e-10 for 10**8);
the owner confirms by the full key, so that is a refused lease and never wrong KV.

A *slot* is a number from 1 to `MAX_SLOTS` that stands for one (incarnation of an instance, tier), or for a full sync
of it in progress.  Its states:

    free → hidden (`open_slot`: filled, and not found) → visible (`publish`) → retired (`retire`) → free (`sweep`)

1. A lookup finds a placement only where it was admitted, was not evicted since, and its slot is visible.
2. `retire` costs the same for any number of placements, and no lookup that begins after it finds one of them.
3. A retired slot becomes free when a pass of `sweep` over all placements that began after its retirement has ended.
   `open_slot` answers None while no slot is free.
4. Admitting what is there and evicting what is not there changes nothing.
5. Every method may be called from any thread.  Lookups never wait for a batch that another thread admits; batches are
   cut into pieces of some microseconds between which other writers get their turn.  The GIL is released while a batch
   is worked on.

A *group* is any number below 65,536 that the slots of one instance share (its incarnations may have another one each).
Slot numbers are used again: resolve what a lookup answered before the next `open_slot`.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from typing_extensions import Buffer

from kvstrata.errors import KvstrataError

TAG_BITS: Final[int]
MAX_SLOTS: Final[int]
"""65,534."""

class RegistryError(KvstrataError):
    """A call was refused. `reason`: `no_space` (the bound on bytes), or `bad_slot` (not in a state that allows it)."""

    reason: str
    def __init__(self, message: str, *, reason: str) -> None: ...

class Candidate(NamedTuple):
    """One group's answer to `lookup_prefix`."""

    group: int
    chunks: int
    """Length of the longest prefix all of whose keys its allowed slots hold."""
    slots: array[int]
    """Type "H": for each key of that prefix (chunks * n_slices) the slot that holds it, that of the lowest rank."""

class Slot(NamedTuple):
    """A slot that is not free."""

    slot: int
    group: int
    rank: int
    state: str
    """`hidden`, `visible` or `retired`."""
    keys: int
    """Placements in it; of a retired one those not yet swept."""

class RegistryUsage(NamedTuple):
    """Numbers of the whole registry."""

    bytes: int
    """Memory taken from the system and not given back: placements, lists of holders, slots, what growth needs."""
    placements: int
    """Of all slots, retired ones until they are swept included."""
    shared_tags: int
    """Tags with so many holders that these are listed apart."""
    slots: int
    """Not free."""
    retired: int
    """Of these, retired and not yet swept."""
    rebuilds: int
    """Times a partition grew or shrank."""
    refused: int
    """Placements refused because too many others of nearly the same tag are there; keys never do that by chance."""

class Registry:
    def __init__(self, *, max_bytes: int = 4 << 30, max_slots: int = MAX_SLOTS) -> None:
        """An empty registry that takes at most about `max_bytes` (64 MiB to 1 TiB) of memory, as it needs it.

        Raises ValueError naming the argument, and MemoryError where the address space is not to be had.
        """

    def open_slot(self, group: int, *, rank: int = 0) -> int | None:
        """A free slot, now hidden and empty; None where none is free (`sweep` frees retired ones).

        `group` is below 65,536. `rank` (0 to 255): of several slots of one group that hold a key, `lookup_prefix` names
        the one of the lowest rank (0 for L1, 1 for the nearest L2 tier, …).
        """

    def publish(self, slot: int, *, retire: int | None = None) -> None:
        """Make a hidden slot visible, then retire another one: no moment finds neither.

        Raises RegistryError(bad_slot), and changes nothing, where `slot` is not hidden or `retire` neither hidden nor
        visible.
        """

    def retire(self, slot: int) -> None:
        """Forget all placements of a hidden or visible slot. O(1). Raises RegistryError(bad_slot) for any other."""

    def admit(self, slot: int, tags: Buffer) -> int:
        """Add placements; how many of them are new.

        Raises RegistryError: `bad_slot` where the slot is neither hidden nor visible (also when it is retired
        meanwhile), `no_space` at the bound on bytes.  What came before in the batch stays; repeating it is harmless.
        Every 512 tags other threads that wait for this processor go first.
        """

    def evict(self, slot: int, tags: Buffer) -> int:
        """Remove placements; how many were there. Raises as `admit`, except for `no_space`."""

    def sweep(self, max_cells: int = 65_536) -> int:
        """One step of the background pass that makes retired slots free; the cells (8 bytes each) it looked at.

        A step looks at no more than one partition (1/1024 of all placements) beyond `max_cells`; after each one other
        threads that wait for this processor go first.  0: nothing is retired; call again when something is.
        """

    def lookup(self, tag: int) -> tuple[int, ...]:
        """The visible slots that hold one tag, in no order."""

    def holders(self, tags: Buffer) -> list[tuple[int, ...]]:
        """The same for each of a batch."""

    def lookup_prefix(
        self,
        tags: Buffer,
        *,
        n_slices: int = 1,
        allowed: Buffer | None = None,
        except_group: int | None = None,
        best: int = 1,
    ) -> list[Candidate]:
        """The groups that hold the longest leading part of a chain by themselves, the longest first.

        `tags` are those of the chunks in order, the `n_slices` of each chunk behind one another; a chunk counts where
        all of its slices are held.  Slots count when they are visible and, where `allowed` is given, when their bit
        (slot & 7 of byte slot >> 3; bytes that are not there are zero) is set; those of `except_group`, usually the
        asking instance itself, do not.  At most `best` groups, none that does not hold the first chunk; which of
        equally long ones is not said.
        """

    def slot(self, slot: int) -> Slot | None:
        """None where it is free."""

    def slots(self) -> list[Slot]:
        """All that are not free."""

    def dump(self, cursor: int = 0, max_cells: int = 65_536) -> tuple[array[int], array[int], int]:
        """One step through the placements of visible slots: tags (type "Q"), the slot of each ("H"), next cursor.

        Begin with cursor 0 and end when the next one is 0.  What is there all the while comes exactly once; what is
        admitted or evicted meanwhile may come or not.  Tags come with the bits that do not count as zeros.
        """

    def restore(self, tags: Buffer, slots: Buffer, slot_of: Buffer) -> int:
        """Admit what `dump` gave, each placement to the slot that `slot_of[slot]` names (0: leave it out).

        `slots` and `slot_of` are native u16. How many are new.  Raises ValueError where lengths do not agree, and
        RegistryError as `admit`.
        """

    def usage(self) -> RegistryUsage:
        """Never waits."""
