"""Rendezvous hashes: each key ranks all engines by their names, so an engine that comes or goes moves only its keys."""

from __future__ import annotations

import functools
import hashlib

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""


@functools.lru_cache(maxsize=1 << 14)
def name_hash(text: str) -> int:
    """Return 64 bits that depend on nothing but the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def first(key: str, names: list[str]) -> int:
    """Return the index of the name that the key ranks first; equal for any order of the names, which must differ."""
    hashed = name_hash(key)
    weights = [(hashed ^ name_hash(name)) * ODD & MASK for name in names]
    return weights.index(max(weights))


def draw(seed: int, key: str) -> float:
    """Return a number in [0, 1) that depends on the seed and the key alone."""
    return (name_hash(f"{seed}/{key}") >> 11) / (1 << 53)
