"""The keys of a prompt's blocks: chained hashes of the tokens and of everything else that decides a block's KV.

The keys are the gateway's own; the engines' hashes are mapped to them (cache.py) and never computed.  A key is 32
bytes, of which the registry holds the first 8.
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
"""Blocks of a prompt that are asked for at most.  Of longer prompts only every second, third, … is, since a block is
kept only while those before it are."""

_SECRET = secrets.token_bytes(32)
"""Keys reveal nothing without this secret."""


def root_of(block_tokens: int) -> bytes:
    """The key before a chain's first block. The model is not in it, since each engine has one."""
    return hashlib.blake2b(str(block_tokens).encode(), key=_SECRET, digest_size=32).digest()


def extra_of(encoded: bytes) -> bytes:
    """A digest of a block's extras, given as the msgpack array in which an engine publishes them."""
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
        """`tenant`: a tenant other than the engines' own, whose blocks they keep separate."""
        self.tokens = tokens if isinstance(tokens, array) else array("I", tokens)
        self.adapter, self.salt, self.tenant = adapter, salt, tenant
        self._keys: dict[int, bytes] = {}

    def keys(self, block_tokens: int) -> bytes:
        """The keys of its whole blocks, 32 bytes each."""
        found = self._keys.get(block_tokens)
        if found is None:
            salt = f"tenant {self.tenant}\0{self.salt}" if self.tenant else self.salt
            extras = extras_of(self.adapter, salt, len(self.tokens) // block_tokens)
            found = self._keys[block_tokens] = chain_keys(
                root_of(block_tokens), self.tokens, block_tokens, extras
            )
        return found

    def tags(self, block_tokens: int) -> tuple[bytes, int]:
        """The tags to ask for, and the number of blocks for which each stands: the last of so many."""
        tags = tags_of(self.keys(block_tokens))
        step = -(-len(tags) // (TAG_BYTES * MAX_ASKED))
        if step > 1:
            tags = memoryview(tags).cast("Q")[step - 1 :: step].tobytes()
        return tags, max(1, step)
