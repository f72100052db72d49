"""The registry in plain Python, as sets of placements: the twin of `core.Registry`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

TAG_MASK = 2**64 - 2**7


class OracleRegistry:
    """The tags of each slot; tags are ints. The caller chooses the slots."""

    def __init__(self) -> None:
        self.state: dict[int, str] = {}
        self.group: dict[int, int] = {}
        self.tags: defaultdict[int, set[int]] = defaultdict(set)

    def open_slot(self, slot: int, group: int) -> None:
        assert slot not in self.state
        self.state[slot], self.group[slot] = "hidden", group

    def can_be_filled(self, slot: int) -> bool:
        return self.state.get(slot) in ("hidden", "visible")

    def publish(self, slot: int, retire: int | None) -> bool:
        """Publish a slot and retire another one; False, and nothing changed, where that is not allowed."""
        if self.state.get(slot) != "hidden" or retire == slot:
            return False
        if retire is not None and not self.retire(retire):
            return False
        self.state[slot] = "visible"
        return True

    def retire(self, slot: int) -> bool:
        """Retire a slot; False, and nothing changed, where that is not allowed."""
        if not self.can_be_filled(slot):
            return False
        self.state[slot] = "retired"
        self.tags[slot].clear()
        return True

    def free(self, slot: int) -> None:
        assert self.state.pop(slot) == "retired"

    def admit(self, slot: int, tags: Sequence[int]) -> int:
        """Add placements; return how many are new."""
        before = len(self.tags[slot])
        self.tags[slot].update(tag & TAG_MASK for tag in tags)
        return len(self.tags[slot]) - before

    def evict(self, slot: int, tags: Sequence[int]) -> int:
        """Remove placements; return how many there were."""
        before = len(self.tags[slot])
        self.tags[slot].difference_update(tag & TAG_MASK for tag in tags)
        return before - len(self.tags[slot])

    def holders(self, tag: int) -> set[int]:
        return {
            slot
            for slot, state in self.state.items()
            if state == "visible" and tag & TAG_MASK in self.tags[slot]
        }

    def lookup_prefix(
        self, tags: Sequence[int], n_slices: int, counts: Callable[[int], bool]
    ) -> dict[int, int]:
        """Return how many leading chunks each group holds in the slots that count, if it holds any."""
        lengths = {}
        for group in set(self.group.values()):
            keys = 0
            while keys < len(tags) and any(
                self.group[slot] == group and counts(slot) for slot in self.holders(tags[keys])
            ):
                keys += 1
            if keys >= n_slices:
                lengths[group] = keys // n_slices
        return lengths

    def placements(self) -> set[tuple[int, int]]:
        """Return (tag, slot) of all placements in visible slots."""
        return {
            (tag, slot) for slot, state in self.state.items() if state == "visible" for tag in self.tags[slot]
        }
