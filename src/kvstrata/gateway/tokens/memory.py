"""What was tokenised before: ids of parts of texts, by tenant, so that a conversation's next turn costs its new text.

A part's ids depend on nothing but the part (cuts.py), so each is remembered by itself, under a hash over tenant, model
and text: no text is kept, and no tenant can learn by time what another one has sent.  The longest unused part is
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
"""What a part takes beside its ids, about: its key, the array's head, and its place in the dict."""
_SECRET = secrets.token_bytes(32)


class Memory:
    """See the module."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._lock = threading.Lock()
        self._parts: collections.OrderedDict[bytes, array[int]] = collections.OrderedDict()

    def __len__(self) -> int:
        """Parts that are remembered."""
        return len(self._parts)

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
            found = []
            for key in keys:
                ids = self._parts.get(key)
                if ids is not None:
                    self._parts.move_to_end(key)
                found.append(ids)
            return found

    def add(self, key: bytes, ids: array[int]) -> None:
        """Remember a part's ids, which nobody changes any more."""
        with self._lock:
            if key in self._parts:
                return
            self._parts[key] = ids
            self.bytes += _size(ids)
            self._shrink()

    def resize(self, most_bytes: int) -> None:
        """Have another bound."""
        with self._lock:
            self.most_bytes = most_bytes
            self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self.most_bytes:
            _, ids = self._parts.popitem(last=False)
            self.bytes -= _size(ids)


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)
