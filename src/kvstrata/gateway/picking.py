"""Chooses the engine for a request: a pure function of what is known of the engines.

Ties are broken by rendezvous hashing: each pair of a word and an engine's name has a fixed random weight, and the
heaviest wins.  So one engine that comes or goes moves only its own share of the words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """An engine that serves the request's model."""

    name: str
    in_flight: int
    """Requests that this gateway has sent it and that have not ended."""
    share: float
    """Share of an engine's usual load that it may get, in (0, 1]: less than 1 soon after its return."""


def pick(policy: str, candidates: Sequence[Candidate], *, session: str, word: str, turn: int) -> int:
    """The index of the chosen engine; there must be a candidate.

    `session`: what the request belongs to, empty for nothing. `word`: names the request. `turn`: its number.
    """
    if policy == "round_robin":
        return turn % len(candidates)
    if policy == "session" and session:
        return heaviest(session, [one.name for one in candidates])
    loads = [(one.in_flight + 1) / one.share for one in candidates]
    least = min(loads)
    ties = [i for i, load in enumerate(loads) if load == least]
    return ties[heaviest(word, [candidates[i].name for i in ties])]


def heaviest(word: str, names: Sequence[str]) -> int:
    """The index of the name that wins for this word."""
    if len(names) == 1:
        return 0
    salt = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    weights = [hashlib.blake2b(name.encode(), digest_size=8, key=salt).digest() for name in names]
    return max(range(len(names)), key=weights.__getitem__)
