"""When a prefix is copied ahead, and where to.

An engine that lacks a prefix reads it from a peer if that is the cheapest way, and has a copy afterwards.  A second
read of the same prefix within the life of a block shows that its holder cannot serve all who want it.  From then on
each read has it copied to one more instance, so that the next request finds it in that instance's memory.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

MAX_PREFIXES = 4_096
MAX_READS = 64


class Reads:
    """The prefixes that were read from peers lately. Has no lock: it belongs to one event loop."""

    def __init__(self) -> None:
        self._at_s: collections.OrderedDict[bytes, collections.deque[float]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._at_s)

    def read(self, prefix: bytes, now_s: float, life_s: float) -> int:
        """A prefix is read at a peer; return how many times it was within `life_s`, this time included."""
        at_s = self._at_s.pop(prefix, None) or collections.deque(maxlen=MAX_READS)
        while at_s and now_s - at_s[0] > life_s:
            at_s.popleft()
        at_s.append(now_s)
        self._at_s[prefix] = at_s
        if len(self._at_s) > MAX_PREFIXES:
            self._at_s.popitem(last=False)
        return len(at_s)


def target(lacking: Mapping[str, float]) -> str | None:
    """Return which of the instances that lack a prefix gets it, by their shortest queues in seconds."""
    return min(lacking, key=lambda name: (lacking[name], name), default=None)
