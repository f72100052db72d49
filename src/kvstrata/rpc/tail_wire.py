"""The parts of messages that name tails: records of the first tokens of a chunk (`keys.tails`)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.types import KEY_BYTES

MAX_TAIL_SETS = 4
"""Chunks of which one lookup may name tails."""
MAX_TAILS = 256
"""Tails of one chunk in a lookup, and tails that one reserve replaces."""
MAX_TAIL_TOKENS = 1 << 16
MAX_LEADING_CHUNKS = 1 << 16

TailKeys = Annotated[bytes, Meta(max_length=MAX_TAILS * KEY_BYTES)]


class TailSet(msgspec.Struct, array_like=True, frozen=True):
    """Tails of one chunk of a prompt, of which one may end the hit."""

    chunk: Annotated[int, Meta(ge=0, le=MAX_LEADING_CHUNKS)]
    """They count if exactly so many leading chunks are present."""
    tokens: Annotated[list[Annotated[int, Meta(gt=0, le=MAX_TAIL_TOKENS)]], Meta(max_length=MAX_TAILS)]
    """The tokens of each tail, the most wanted tail first."""
    keys: TailKeys
    """Their concatenated chain keys."""
    in_l2: bool = False
    """Whether L2 is asked for them if L1 has none."""
