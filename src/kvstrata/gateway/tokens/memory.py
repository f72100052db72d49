"""What was tokenised before, by tenant, so that a conversation's next turn costs its new text.

*Parts*: a part's ids depend on nothing but the part (cuts.py), so each is remembered by itself, under a hash over
tenant, model and text.  *Stems*: of a conversation's messages before a tail (tails.py), which parts their text has,
under a hash over tenant, model, whatever else decides the prompt, and the messages' JSON; so they are neither decoded
nor rendered again.  No text is kept, and no tenant can learn by time what another one has sent.  The longest unused
entry is forgotten first, once all take more than `most_bytes`.  Threads may use it at once.
"""

from __future__ import annotations

import collections
import hashlib
import secrets
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

ENTRY_BYTES = 400
"""What an entry takes beside ids or keys, about: its key, its head, and its place in the dict."""
KEY_BYTES = 60
"""What a stem's reference to a part takes, about."""
WINDOW = 48
"""Messages at a conversation's end that may lie behind the stem that is looked for."""
_SECRET = secrets.token_bytes(32)


class Stem(NamedTuple):
    """What is known of a conversation's messages before a tail."""

    rule: str
    parts: tuple[bytes, ...]
    """The keys of its text's parts."""
    chars: int
    features: frozenset[str]
    system: bool
    """Whether it begins with a system prompt."""


class Memory:
    """See the module."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[bytes, array[int] | Stem] = collections.OrderedDict()

    def __len__(self) -> int:
        """Parts and stems that are remembered."""
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

    def stem_keys(self, context: bytes, messages: Sequence[Any]) -> dict[int, bytes]:
        """The keys of stems of a conversation, by the number of their messages, the longest first.

        `context`: tenant, tokenizer, and everything else but the messages that decides the prompt.
        `messages`: each as JSON; JSON objects one after the other can be read in one way only.
        """
        chain = hashlib.sha256(_SECRET + context)
        first = max(0, len(messages) - WINDOW)
        chain.update(b"".join(messages[:first]))
        keys = {}
        for number in range(first, len(messages)):
            if number:
                keys[number] = chain.copy().digest()
            chain.update(messages[number])
        return dict(reversed(keys.items()))

    def find(self, keys: Iterable[bytes]) -> list[array[int] | None]:
        """The ids of each part; None: not remembered."""
        with self._lock:
            found: list[array[int] | None] = []
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                found.append(ids if isinstance(ids, array) else None)
            return found

    def stem(self, key: bytes) -> Stem | None:
        """The stem of this key."""
        with self._lock:
            found = self._entries.get(key)
            if not isinstance(found, Stem):
                return None
            self._entries.move_to_end(key)
            return found

    def add(self, key: bytes, entry: array[int] | Stem) -> None:
        """Remember a part's ids, which nobody changes any more, or a stem."""
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = entry
            self.bytes += _size(entry)
            self._shrink()

    def resize(self, most_bytes: int) -> None:
        """Have another bound."""
        with self._lock:
            self.most_bytes = most_bytes
            self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self.most_bytes:
            _, entry = self._entries.popitem(last=False)
            self.bytes -= _size(entry)


def _size(entry: array[int] | Stem) -> int:
    if isinstance(entry, Stem):
        return ENTRY_BYTES + KEY_BYTES * len(entry.parts)
    return ENTRY_BYTES + entry.itemsize * len(entry)
