# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The registry of the controller's directory: which instance holds which chunk, and in which tier.
#
# A *placement* is (tag, slot).  A *tag* is the first 8 bytes of a 32-byte storage key, little-endian; batches of tags
# are bytes-like objects of 8 bytes each.  Only the upper 57 bits count: tags that differ only in the lowest 7 are
# one tag.  With n tags present, a tag that nobody holds is found with odds of n / 2**57 (6.9e-10 for 10**8).  The
# instance that is asked for the chunk compares the full key, so such a find costs a refused lease and never gives wrong
# KV.
#
# A *slot* is a number from 1 to `MAX_SLOTS` that stands for one (incarnation of an instance, tier), or for a full sync
# of that tier in progress.  Its states:
#
#     free → hidden (`open_slot`: being filled, not found) → visible (`publish`) → retired (`retire`) → free (`sweep`)
#
# 1. A lookup finds a placement only if it was admitted and not evicted since, and its slot is visible.
# 2. `retire` costs the same for any number of placements, and no lookup that begins after it finds one of them.
# 3. A retired slot becomes free when a pass of `sweep` over all placements that began after its retirement has ended.
#    `open_slot` answers None while no slot is free.
# 4. Admitting a placement that is present changes nothing, nor does evicting one that is absent.
# 5. Every method may be called from any thread.  Lookups never wait for a batch that another thread admits; batches are
#    cut into pieces of some microseconds between which other writers get their turn.  The GIL is released while a batch
#    is worked on.
#
# A *group* is any number below 65,536 that the slots of one instance share (each of its incarnations may have its own).
# Slot numbers are used again: translate a lookup's slots to instances before the next `open_slot`.

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "registry/registry.h" namespace "kvstrata" nogil:
    unsigned int kMaxSlots
    unsigned int kPartitions "kvstrata::kRegistryPartitions"

    cdef cppclass TagSpan:
        TagSpan() noexcept
        TagSpan(const void*, size_t) noexcept

    cdef enum class SlotState(unsigned char):
        kFree

    cdef cppclass SlotRow:
        uint16_t slot
        SlotState state
        uint16_t group
        uint64_t keys

    cdef cppclass PrefixQuery:
        size_t n_slices
        ByteSpan allowed
        cbool all_allowed
        int32_t except_group
        size_t best

    cdef cppclass CCandidate "kvstrata::Candidate":
        uint16_t group
        size_t chunks

    cdef cppclass CUsage "kvstrata::RegistryUsage":
        uint64_t bytes
        uint64_t placements
        uint64_t shared_tags
        uint64_t slots
        uint64_t retired
        uint64_t rebuilds
        uint64_t refused

    cdef cppclass CRegistry "kvstrata::Registry":
        @staticmethod
        Status create(uint64_t, unsigned int, unique_ptr[CRegistry]*) noexcept
        uint16_t open_slot(uint16_t) noexcept
        Status publish(uint16_t, uint16_t) noexcept
        Status retire(uint16_t) noexcept
        Status admit(uint16_t, TagSpan, uint64_t*) noexcept
        Status evict(uint16_t, TagSpan, uint64_t*) noexcept
        Status restore(const string&, uint64_t, uint64_t, U16Span, uint64_t*) noexcept
        uint64_t sweep(uint64_t) noexcept
        void lookup(TagSpan, vector[uint16_t]*, vector[size_t]*) noexcept
        vector[CCandidate] lookup_prefix(TagSpan, const PrefixQuery&) noexcept
        SlotRow slot(uint16_t) noexcept
        void dump(unsigned int, vector[uint8_t]*) noexcept
        CUsage usage() noexcept


MAX_SLOTS: int = kMaxSlots  # 65,534
cdef tuple SLOT_STATES = ("free", "hidden", "visible", "retired")
cdef enum:
    TAG_BYTES = 8
cdef uint64_t MIN_BYTES = 64 << 20
cdef uint64_t MAX_BYTES = <uint64_t>1 << 40


class RegistryError(MediumError):
    """`reason`: `no_space` (the bound on bytes), `bad_slot` (its state forbids the call), `damaged` (a snapshot)."""

    reason: str

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message, field=reason)
        self.reason = reason


class Slot(NamedTuple):
    """A slot that is not free. `state`: `hidden`, `visible` or `retired`. `keys`: its placements that are not swept."""

    slot: int
    group: int
    state: str
    keys: int


class RegistryUsage(NamedTuple):
    """Numbers of the whole registry.

    `bytes`: memory taken from the system and not given back: placements, lists of holders, slots, and room to grow.
    `placements`: those in all slots, including retired slots until they are swept.  `shared_tags`: tags with so many
    holders that a separate list names them.  `slots`: those that are not free, `retired` of them not yet swept.
    `rebuilds`: how often a partition grew or shrank.  `refused`: placements refused because too many others have nearly
    the same tag, which never happens by chance.
    """

    bytes: int
    placements: int
    shared_tags: int
    slots: int
    retired: int
    rebuilds: int
    refused: int


# After this many changes, which take about 50 µs, a writer yields the processor to threads that wait for it. Otherwise
# the scheduler would let the writer run for milliseconds, whatever its priority.
cdef size_t TURN_TAGS = 512


cdef uint16_t _number(str name, value, int limit) except? 0xFFFF:
    if not 0 <= value <= limit:
        raise ValueError(f"{name}: must be 0 to {limit}, not {value}")
    return value


cdef class Registry:
    cdef unique_ptr[CRegistry] core

    def __cinit__(self, *, max_bytes: int = 4 << 30, max_slots: int = MAX_SLOTS) -> None:
        """An empty registry that takes at most about `max_bytes` (64 MiB to 1 TiB) of memory, as it needs it.

        Raises ValueError naming the argument, and MemoryError if the address space cannot be reserved.
        """
        if not MIN_BYTES <= max_bytes <= MAX_BYTES:
            raise ValueError(f"max_bytes: must be {MIN_BYTES} to {MAX_BYTES}, not {max_bytes}")
        if not 1 <= max_slots <= MAX_SLOTS:
            raise ValueError(f"max_slots: must be 1 to {MAX_SLOTS}, not {max_slots}")
        cdef Status status = CRegistry.create(max_bytes, max_slots, &self.core)
        raise_for(status, CALL)

    def open_slot(self, group: int) -> int | None:
        """Take a free slot, which becomes hidden and empty; None if no slot is free (`sweep` frees retired ones).

        `group` is below 65,536.
        """
        cdef uint16_t slot = self.core.get().open_slot(_number("group", group, 65_535))
        return slot if slot else None

    def publish(self, slot: int, *, retire: int | None = None) -> None:
        """Make a hidden slot visible, then retire another one, so that every lookup finds at least one of the two.

        Raises RegistryError(bad_slot), and changes nothing, if `slot` is not hidden or `retire` is neither hidden nor
        visible.
        """
        cdef uint16_t published = _number("slot", slot, MAX_SLOTS)
        cdef uint16_t retired = 0
        if retire is not None:
            retired = _number("retire", retire, MAX_SLOTS)
            if not retired:
                raise ValueError("retire: must be a slot or None, not 0")
        cdef Status status = self.core.get().publish(published, retired)
        raise_for(status, REGISTRY)

    def retire(self, slot: int) -> None:
        """Forget all placements of a hidden or visible slot. O(1). Raises RegistryError(bad_slot) for any other."""
        cdef Status status = self.core.get().retire(_number("slot", slot, MAX_SLOTS))
        raise_for(status, REGISTRY)

    def admit(self, slot: int, tags: Buffer) -> int:
        """Add placements; returns how many of them are new.

        Raises RegistryError: `bad_slot` if the slot is neither hidden nor visible (even if it is retired meanwhile),
        `no_space` at the bound on bytes.  Tags of the batch that were added before the error stay; repeating the batch
        is harmless.  After every 512 tags, other threads that wait for this processor run first.
        """
        return self._change(slot, tags, True)

    def evict(self, slot: int, tags: Buffer) -> int:
        """Remove placements; returns how many were present. Raises as `admit`, except for `no_space`."""
        return self._change(slot, tags, False)

    cdef _change(self, slot, tags, bint admits):
        cdef uint16_t number = _number("slot", slot, MAX_SLOTS)
        cdef BorrowedBuffer items
        cdef size_t n_tags = borrow(items, tags, TAG_BYTES, "tags")
        cdef const unsigned char* first = items.data()
        cdef size_t at = 0, count
        cdef uint64_t changed = 0
        cdef Status status
        with nogil:
            while True:
                count = min(TURN_TAGS, n_tags - at)
                if admits:
                    status = self.core.get().admit(number, TagSpan(first + 8 * at, count), &changed)
                else:
                    status = self.core.get().evict(number, TagSpan(first + 8 * at, count), &changed)
                at += count
                if at == n_tags or not status.ok():
                    break
                sched_yield()
        raise_for(status, REGISTRY)
        return changed

    def sweep(self, uint64_t max_cells=65_536) -> int:
        """Run one step of the background pass that frees retired slots; returns how many cells (8 bytes each) it read.

        A step reads at most one partition (1/1024 of all placements) beyond `max_cells`; after each partition, other
        threads that wait for this processor run first.  0: no slot is retired; call again when one is.
        """
        cdef uint64_t looked_at = 0, more
        with nogil:
            while True:
                more = self.core.get().sweep(1)  # one partition
                looked_at += more
                if not more or looked_at >= max_cells:
                    break
                sched_yield()
        return looked_at

    def holders(self, tags: Buffer) -> list[tuple[int, ...]]:
        """The visible slots that hold each tag of a batch, in no order."""
        cdef BorrowedBuffer items
        cdef size_t n_tags = borrow(items, tags, TAG_BYTES, "tags")
        cdef TagSpan span = TagSpan(items.data(), n_tags)
        cdef vector[uint16_t] found
        cdef vector[size_t] ends
        cdef size_t at, i
        with nogil:
            self.core.get().lookup(span, &found, &ends)
        cdef list made = []
        at = 0
        for i in range(ends.size()):
            made.append(tuple([found[j] for j in range(at, ends[i])]))
            at = ends[i]
        return made

    def lookup_prefix(
        self, tags: Buffer, *, n_slices: int = 1, allowed: Buffer | None = None,
        except_group: int | None = None, best: int = 1
    ) -> list[tuple[int, int]]:
        """The groups that each hold the longest leading part of a chain, and its chunks; the longest part first.

        `tags` are those of the chunks in order, the `n_slices` of each chunk one after another; a group holds a chunk
        if it holds all its slices.  A slot counts if it is visible, is not of `except_group` (usually the asking
        instance) and, with `allowed`, has its bit set there (bit slot & 7 of byte slot >> 3; missing bytes are zero).
        Returns at most `best` groups, all of which hold the first chunk; of groups with equally long prefixes, any.
        """
        cdef BorrowedBuffer items
        cdef size_t n_tags = borrow(items, tags, TAG_BYTES, "tags")
        cdef BorrowedBuffer mask
        cdef size_t n_allowed
        cdef TagSpan span = TagSpan(items.data(), n_tags)
        cdef PrefixQuery query
        cdef vector[CCandidate] found
        cdef size_t i
        if n_slices < 1 or n_tags % n_slices:
            raise ValueError(f"tags: {n_tags} tags do not make whole chunks of {n_slices} slices")
        if best < 1:
            raise ValueError(f"best: must be at least 1, not {best}")
        query.n_slices = n_slices
        query.best = best
        if allowed is not None:
            n_allowed = borrow(mask, allowed, 1, "allowed")
            query.all_allowed = False
            query.allowed = ByteSpan(mask.data(), n_allowed)
        if except_group is not None:
            query.except_group = _number("except_group", except_group, 65_535)
        with nogil:
            found = self.core.get().lookup_prefix(span, query)
        return [(found[i].group, found[i].chunks) for i in range(found.size())]

    def slot(self, slot: int) -> Slot | None:
        """The slot's facts; None if it is free."""
        cdef SlotRow row = self.core.get().slot(_number("slot", slot, MAX_SLOTS))
        if row.state == SlotState.kFree:
            return None
        return Slot(row.slot, row.group, SLOT_STATES[<int>row.state], row.keys)

    def dump(self, partition: int) -> bytes:
        """The placements of partition 0, 1, …, of all slots, as `restore` reads them; empty after the last partition."""
        cdef vector[uint8_t] dumped
        cdef unsigned int number
        if not 0 <= partition < kPartitions:
            return b""
        number = partition
        with nogil:
            self.core.get().dump(number, &dumped)
        return (<char*>dumped.data())[:dumped.size()]

    def restore(self, path: str, uint64_t begin, uint64_t end, slot_of: Buffer) -> int:
        """Add the placements of dumps of all partitions, in the bytes from `begin` to `end` of a file.

        Those of slot s get the slot `slot_of[s]` (65,536 native u16).  Returns how many they are.  The registry must be
        without placements; nothing else may change them, or retire these slots, meanwhile.  Raises ValueError for a
        slot that is not open, and RegistryError(damaged, no_space); then any of them may have been added.
        """
        cdef BorrowedBuffer numbers
        cdef vector[uint16_t] slots
        cdef string name = os.fsencode(path)
        cdef uint64_t added = 0
        cdef Status status
        slots.resize(borrow(numbers, slot_of, 2, "slot_of"))
        memcpy(slots.data(), numbers.data(), 2 * slots.size())
        with nogil:
            status = self.core.get().restore(name, begin, end, U16Span(slots.data(), slots.size()), &added)
        raise_for(status, REGISTRY)
        return added

    def usage(self) -> RegistryUsage:
        """The numbers now. Never waits for other threads."""
        cdef CUsage usage = self.core.get().usage()
        return RegistryUsage(
            usage.bytes,
            usage.placements,
            usage.shared_tags,
            usage.slots,
            usage.retired,
            usage.rebuilds,
            usage.refused,
        )
