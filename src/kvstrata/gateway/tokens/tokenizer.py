"""A model's tokenizer: its `tokenizer.json` and chat template, read from a local folder.

It computes the ids of a prompt by itself; engines.py verifies that an engine computes the same ids.

A text is cut so that the parts' tokens, joined, are those of the whole, and the tokens of each part are cached.  A
tokenizer first searches its added tokens in the raw text, from left to right, and takes the longest where several
begin.  The text between two of them is tokenised separately.  So a text may be cut before each occurrence of an added
token that is *certain*, that is, found whatever text surrounds it.  An added token T is certain if

1. it is searched in the raw text (`normalized` is off), anywhere (`single_word` is off), and absorbs no blanks around
   it (`lstrip` and `rstrip` are off);
2. no other added token contains T or ends with a prefix of T, and T itself does not end with a prefix of T: then no
   token that begins before T's occurrence, or at its start, can cover a part of it.  No token that absorbs blanks
   reaches into T, since T neither begins nor ends with a blank;
3. each part begins with T, so that the special treatment of the start of a text (an added blank) does not apply to it.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import json
import os
import secrets
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.errors import ConfigError, install
from kvstrata.gateway.tokens.prompts import Chat, Text
from kvstrata.gateway.tokens.template import ChatTemplate, NotRendered

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NEEDED = ("tokenizers", "jinja2")
"""Modules of the extra `gateway-tokens`."""
MAX_FILE_BYTES = 256 << 20
MAX_TEXT_CHARS = 8 << 20
"""Maximum length of a text that is tokenised here."""
BATCH_CHARS = 32 << 10
"""Characters of text per call of the tokenizer, so that only a few ids are Python objects at a time."""
_PROBE_TURNS = 4
MEMORY_BYTES = 64 << 20
"""Maximum size of `Memory`; a token takes 4 bytes."""
ENTRY_BYTES = 400
"""Approximate size of an entry besides its ids: its key, its object header, and its place in the dict."""
_SECRET = secrets.token_bytes(32)


def certain(tokens: Iterable[AddedToken]) -> list[str]:
    """The texts of the certain ones among the added tokens (see the module)."""
    every = list(tokens)
    raw = [one for one in every if not (one.normalized or one.single_word or one.lstrip or one.rstrip)]
    return [one.content for one in raw if _is_certain(one.content, [each.content for each in every])]


def _is_certain(text: str, others: list[str]) -> bool:
    if not text or text != text.strip():
        return False
    for other in others:
        if other != text and text in other:
            return False
        if any(other.endswith(text[:length]) for length in range(1, len(text))):
            return False
    return True


def parts_of(text: str, cut: str) -> list[str]:
    """The text split into parts; each but the first begins with `cut`. Empty `cut`: one part."""
    if not cut:
        return [text]
    first, *rest = text.split(cut)
    return [first, *(cut + part for part in rest)]


class Memory:
    """Cache of parts' token ids, by tenant, so that a conversation's next turn tokenises only its new text.

    A part's ids depend on nothing but the part, so each part has its own entry, under a hash over tenant, model and
    text.  No text is kept, and no tenant can learn from response times what another one has sent.  The least recently
    used entry is evicted first, once all take more than MEMORY_BYTES.  Thread-safe.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[bytes, array[int]] = collections.OrderedDict()

    def __len__(self) -> int:
        """Number of cached parts."""
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
        """The ids of each part; None: not cached."""
        with self._lock:
            found: list[array[int] | None] = []
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                found.append(ids)
            return found

    def add(self, key: bytes, ids: array[int]) -> None:
        """Cache a part's ids, which must not be changed afterwards."""
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.bytes += _size(ids)
            while self.bytes > MEMORY_BYTES:
                _, forgotten = self._entries.popitem(last=False)
                self.bytes -= _size(forgotten)


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)


class OwnTokenizer:
    """One model's tokenizer. Thread-safe."""

    def __init__(self, model: str, folder: str, field: str) -> None:
        """Read the tokenizer of `model` from `folder`. Raises ConfigError, which names `field`."""
        for module in NEEDED:
            if importlib.util.find_spec(module) is None:
                says = f"{field}: a tokenizer needs {module}: {install('gateway-tokens')}"
                raise ConfigError(says, field=field)
        self.model, self.folder = model, folder
        self._field = field
        self.tokenizer = self._read_tokenizer(Path(folder))
        """The object of the package `tokenizers`."""
        self._config = self._read_config(Path(folder))
        self.template = self._read_template(Path(folder))
        self._head = self._special_head()
        cuts = certain(self.tokenizer.get_added_tokens_decoder().values())
        self.cut = self._best_cut(cuts)
        """The token before which texts are cut; empty: texts are not cut."""
        self._context = f"{model}\0{folder}\0".encode()

    # -- use, on any thread ------------------------------------------------------------------------------------

    def ids_of(
        self, prompt: Chat | Text, *, parted: bool, memory: Memory | None = None, tenant: str = ""
    ) -> array[int] | None:
        """The token ids of a prompt; `memory`: a cache to use. None if this tokenizer cannot compute them.

        `parted`: the template gets contents as lists of parts.
        """
        if isinstance(prompt, Text):
            if prompt.special and self._head is None:
                return self._whole(prompt.text) if len(prompt.text) <= MAX_TEXT_CHARS else None
            ids = self.encode(prompt.text, memory, tenant)
            return self._head + ids if prompt.special and ids is not None and self._head else ids
        if self.template is None:
            return None
        try:
            text = self.template.render(prompt, parted=parted)
        except NotRendered:
            return None
        return self.encode(text, memory, tenant)

    def encode(self, text: str, memory: Memory | None = None, tenant: str = "") -> array[int] | None:
        """The ids of a text, without added special tokens; None if it is longer than MAX_TEXT_CHARS."""
        if len(text) > MAX_TEXT_CHARS:
            return None
        parts = parts_of(text, self.cut)
        found = self._parts(parts) if memory is None else self._remembered(parts, memory, tenant)
        made = array("I")
        made.frombytes(b"".join(found))
        return made

    def _remembered(self, parts: list[str], memory: Memory, tenant: str) -> list[array[int]]:
        """The ids of parts, from `memory` or computed and added to it."""
        keys = memory.keys(self._context + tenant.encode() + b"\0", parts)
        found = memory.find(keys)
        missing = [at for at, ids in enumerate(found) if ids is None]
        for at, ids in zip(missing, self._parts([parts[at] for at in missing]), strict=True):
            found[at] = ids
            memory.add(keys[at], ids)
        return [ids for ids in found if ids is not None]

    def _parts(self, parts: list[str]) -> list[array[int]]:
        """The ids of each part."""
        found: list[array[int]] = []
        batch: list[str] = []
        size = 0
        for part in parts:
            batch.append(part)
            size += len(part)
            if size >= BATCH_CHARS:
                found += self._batch(batch)
                batch, size = [], 0
        return found + self._batch(batch) if batch else found

    def _batch(self, texts: list[str]) -> list[array[int]]:
        return [
            array("I", one.ids) for one in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def _whole(self, text: str) -> array[int]:
        return array("I", self.tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids)

    # -- reading -----------------------------------------------------------------------------------------------

    def _fail(self, says: str) -> ConfigError:
        return ConfigError(f"{self._field}: {self.folder!r:.200}: {says}", field=self._field)

    def _read(self, path: Path) -> str:
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise self._fail(f"{path.name} is larger than {MAX_FILE_BYTES} bytes; check the path")
            return path.read_text("utf-8")
        except FileNotFoundError:
            raise self._fail(f"has no {path.name}; give the model's folder with this file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise self._fail(f"{path.name} cannot be read: {error}") from None

    def _read_tokenizer(self, folder: Path) -> Tokenizer:
        # Each request uses one thread; more threads would compete with the event loop for its core.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        text = self._read(folder / "tokenizer.json")
        try:
            made = Tokenizer.from_str(text)
        except Exception as error:  # the boundary of the package, which raises no class of its own
            raise self._fail(f"`tokenizers` cannot read tokenizer.json: {error!s:.200}") from None
        made.no_truncation()
        made.no_padding()
        return made

    def _read_config(self, folder: Path) -> dict[str, Any]:
        if not (folder / "tokenizer_config.json").exists():
            return {}
        try:
            found = json.loads(self._read(folder / "tokenizer_config.json"))
        except ValueError as error:
            raise self._fail(f"tokenizer_config.json is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise self._fail("tokenizer_config.json must be a JSON object")
        return found

    def _read_template(self, folder: Path) -> ChatTemplate | None:
        """The chat template; None if the model has none, or several by name."""
        if (folder / "chat_template.jinja").exists():
            text: object = self._read(folder / "chat_template.jinja")
        else:
            text = self._config.get("chat_template")
        if not isinstance(text, str):
            return None
        special = {}
        for name, value in self._config.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                special[name] = content
        try:
            return ChatTemplate(text, special)
        except ValueError as error:
            raise self._fail(f"its chat template is invalid: {error}") from None

    def _special_head(self) -> array[int] | None:
        """The special tokens that are put before a text; None if special tokens change its ids in another way."""
        head = self._whole("")
        for text in ("x", " two words\n"):
            if self._whole(text) != head + array("I", self._batch([text])[0]):
                return None
        return head

    def _best_cut(self, cuts: list[str]) -> str:
        """The certain token that occurs most often in a rendered conversation; empty: none is frequent enough."""
        if self.template is None:
            return ""
        turns = [{"role": role, "content": "x"} for role in ("user", "assistant") * _PROBE_TURNS]
        chat = Chat([*turns, turns[0]], None, True, {}, frozenset())
        for parted in (False, True):
            try:
                text = self.template.render(chat, parted=parted)
            except NotRendered:
                continue
            counts = {cut: text.count(cut) for cut in cuts}
            best = max(counts, key=lambda cut: (counts[cut], cut), default="")
            if best and counts[best] >= _PROBE_TURNS:
                return best
        return ""
