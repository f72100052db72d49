"""A request of a simulated engine: its tokens, its blocks' keys, and when each token came.

The whole answer is known from the start, as a deterministic function of the prompt.  It consists of printable ASCII,
so that, with one token a byte, a client that sends the answer's text back in its next prompt sends the same tokens.
"""

from __future__ import annotations

import enum
import functools
import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from kvstrata.testing.engine_sim.blocks import KEY_BYTES
from kvstrata.testing.engine_sim.blocks import Sequence as BlockSequence

_SYLLABLES = (
    "ka",
    "lo",
    "mi",
    "ten",
    "su",
    "ra",
    "vel",
    "no",
    "dir",
    "os",
    "pe",
    "qua",
    "zin",
    "hu",
    "ber",
    "ya",
)
_TEXT_BYTES = 1 << 16


class End(enum.StrEnum):
    """Why an answer ended; vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SimRequest:
    """One request. The engine that it was submitted to owns everything but the arguments.

    `answer_tokens` is the length at which the answer ends, and `end` the reason that is then given.  `root` is what the
    keys depend on besides tokens (see `root_key`).
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        answer: Sequence[int],
        end: End = End.LENGTH,
        root: bytes = b"",
        adapter: str | None = None,
        salt: str | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        assert prompt, "a request has at least one token"
        assert answer, "an answer has at least one token"
        self.name = name
        self.prompt_tokens = len(prompt)
        self.answer_tokens = len(answer)
        self.tokens = array("I")
        self.tokens.extend(prompt)
        self.tokens.extend(answer)
        self.planned_end = end
        self.sequence = BlockSequence(self.tokens, root)
        """Its blocks in the engine, and their keys."""
        self.adapter = adapter
        self.salt = salt
        self.transfer = transfer
        """`kv_transfer_params`, for a connector."""
        self.computed = 0
        """Tokens whose KV is there, or is computed by the step in flight once that has ended."""
        self.produced = 0
        """Tokens of the answer."""
        self.cached_tokens: int | None = None
        """Tokens that the request found computed when it was first scheduled; None before."""
        self.preemptions = 0
        self.arrived_ps = -1
        self.scheduled_ps = -1
        self.ended_ps = -1
        self.end: End | None = None
        self.token_times_ps: list[int] = []
        """When each token came."""
        self.changed = False

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.prompt_tokens + self.produced

    @property
    def queued_ps(self) -> int:
        """Time from arrival until it was first scheduled."""
        return self.scheduled_ps - self.arrived_ps

    @property
    def first_token_ps(self) -> int:
        """When the first token came. REQUIRES: it has."""
        return self.token_times_ps[0]

    def block_keys(self, blocks: int, block_tokens: int) -> list[int]:
        """The keys of the first blocks. Raises ValueError unless the tokens fill them."""
        return self.sequence.keys(0, blocks, block_tokens)

    def extra_keys(self, blocks: int, *, first: bool) -> list[tuple[str, ...] | None]:
        """What the hashes of blocks contain besides tokens and the block before: the adapter, and the salt in the
        prompt's first block."""
        own = None if self.adapter is None else (self.adapter,)
        found: list[tuple[str, ...] | None] = [own] * blocks
        if self.salt is not None and first:
            found[0] = (*(own or ()), self.salt)
        return found


def root_key(adapter: str | None, salt: str | None) -> bytes:
    """What the keys of a request's blocks begin with; empty without an adapter and a salt."""
    if adapter is None and salt is None:
        return b""
    parts = [b"" if part is None else part.encode() for part in (adapter, salt)]
    digest = blake2b(struct.pack(">II", *map(len, parts)) + b"".join(parts), digest_size=KEY_BYTES)
    return digest.digest()


@functools.cache
def _text() -> bytes:
    """The text of which all answers are parts."""
    words: list[str] = []
    state, size = 1, 0
    while size < _TEXT_BYTES:
        word = ""
        for _ in range(1 + state % 3):
            state = (state * 1_103_515_245 + 12_345) % (1 << 31)
            word += _SYLLABLES[(state >> 16) % len(_SYLLABLES)]
        words.append(word)
        size += len(word) + 1
    return " ".join(words).encode()[:_TEXT_BYTES]


def answer_to(prompt: Sequence[int], tokens: int, seed: int) -> bytes:
    """The answer of so many tokens to a prompt: a part of one fixed text, chosen by the prompt's last tokens."""
    last = array("Q", list(prompt[-64:]))
    digest = blake2b(struct.pack(">QQ", seed, len(prompt)) + last.tobytes(), digest_size=4)
    at = int.from_bytes(digest.digest(), "big") % _TEXT_BYTES
    rounds = (at + tokens) // _TEXT_BYTES + 1
    return (_text() * rounds)[at : at + tokens]
