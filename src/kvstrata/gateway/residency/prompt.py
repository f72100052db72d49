"""The keys of a prompt's blocks: chained hashes of the tokens and of everything else on which a block's KV depends.

The keys are the gateway's own; engines' block hashes are mapped to them (cache.py) and never computed here.  A key has
32 bytes, of which the registry holds the first 8.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

import msgspec

from kvstrata.native.core import chain_keys
from kvstrata.rpc.cluster_wire import TAG_BYTES, tags_of

MAX_ASKED = 512
"""Maximum number of a prompt's blocks that are looked up.  Of a longer prompt, only every second, third, … block is,
since a block is cached only while all blocks before it are."""

_SECRET = secrets.token_bytes(32)
"""Without this secret, keys reveal nothing about tokens."""


def root_of(block_tokens: int) -> bytes:
    """The key before a chain's first block. It does not depend on the model, since each engine has one."""
    return hashlib.blake2b(str(block_tokens).encode(), key=_SECRET, digest_size=32).digest()


def extra_of(encoded: bytes) -> bytes:
    """The hash of a block's extras, which are given as the msgpack array that an engine publishes."""
    return hashlib.blake2b(encoded, digest_size=32).digest()


def extras_of(adapter: str, salt: str, n_blocks: int) -> dict[int, bytes] | None:
    """The extras of a text prompt's blocks: the adapter in each, the salt in the first; None if there are none."""
    first = [one for one in (adapter, salt) if one]
    if not first or not n_blocks:
        return None
    found = {0: extra_of(msgspec.msgpack.encode(first))}
    if adapter:
        later = extra_of(msgspec.msgpack.encode([adapter]))
        found.update(dict.fromkeys(range(1, n_blocks), later))
    return found


class Prompt:
    """The token ids of a prompt, and the keys of its blocks by their size."""

    def __init__(
        self, tokens: Sequence[int] | array[int], *, adapter: str = "", salt: str = "", tenant: str = ""
    ) -> None:
        """`tenant`: empty for the engines' own tenant; engines keep the blocks of other tenants apart."""
        self.tokens = tokens if isinstance(tokens, array) else array("I", tokens)
        self.adapter, self.salt, self.tenant = adapter, salt, tenant
        self._keys: dict[int, bytes] = {}

    def keys(self, block_tokens: int) -> bytes:
        """The keys of its full blocks, 32 bytes each."""
        found = self._keys.get(block_tokens)
        if found is None:
            salt = f"tenant {self.tenant}\0{self.salt}" if self.tenant else self.salt
            extras = extras_of(self.adapter, salt, len(self.tokens) // block_tokens)
            found = self._keys[block_tokens] = chain_keys(
                root_of(block_tokens), self.tokens, block_tokens, extras
            )
        return found

    def tags(self, block_tokens: int) -> tuple[bytes, int]:
        """The tags to look up, and the step between them in blocks: each is the tag of the last block of its step."""
        tags = tags_of(self.keys(block_tokens))
        step = -(-len(tags) // (TAG_BYTES * MAX_ASKED))
        if step > 1:
            tags = memoryview(tags).cast("Q")[step - 1 :: step].tobytes()
        return tags, max(1, step)
