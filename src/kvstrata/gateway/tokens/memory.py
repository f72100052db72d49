"""What was tokenised before, by tenant, so that a conversation's next turn tokenises its new text only.

A part's ids depend on nothing but the part (cuts.py), so each is remembered by itself, under a hash over tenant, model
and text.  No text is kept, and no tenant can learn by time what another one has sent.  The longest unused entry is
forgotten first, once all take more than `most_bytes`.  Threads may use it at once.
"""

from __future__ import annotations

import collections
import hashlib
import secrets
import threading
from array import array
from collections.abc import Iterable

ENTRY_BYTES = 400
"""Approximate size of an entry beside its ids: its key, its head, and its place in the dict."""
_SECRET = secrets.token_bytes(32)


class Memory:
    """See the module."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[bytes, array[int]] = collections.OrderedDict()

    def __len__(self) -> int:
        """Parts that are remembered."""
        return len(self._entries)

    def keys(self, context: bytes, parts: Iterable[str]) -> list[bytes]:
        """The keys of parts. `context`: tenant and tokenizer."""
        start = hashlib.blake2b(context, key=_SECRET, digest_size=16)
        keys = []
        for part in parts:
            one = start.copy()
            one.update(part.encode("utf-8", "surrogatepass"))
            keys.append(one.digest())
        return keys

    def find(self, keys: Iterable[bytes]) -> list[array[int] | None]:
        """The ids of each part; None: not remembered."""
        with self._lock:
            found: list[array[int] | None] = []
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                found.append(ids)
            return found

    def add(self, key: bytes, ids: array[int]) -> None:
        """Remember a part's ids, which nobody changes any more."""
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.bytes += _size(ids)
            while self.bytes > self.most_bytes:
                _, forgotten = self._entries.popitem(last=False)
                self.bytes -= _size(forgotten)


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)
