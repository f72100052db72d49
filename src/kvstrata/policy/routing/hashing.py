"""Rendezvous hashes: each key ranks all engines by their names, so an engine that comes or goes moves only its keys."""

from __future__ import annotations

import hashlib

from kvstrata.native.routing import ranked_first


def hashed(text: str) -> int:
    """Return 64 bits that depend on nothing but the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class NameHashes(dict[str, int]):
    """Hashes of engines' names, remembered; equal for equal names, so it makes no difference who asked before."""

    LIMIT = 1 << 16

    def __missing__(self, name: str) -> int:
        if len(self) >= self.LIMIT:
            self.clear()
        value = self[name] = hashed(name)
        return value


_HASHES = NameHashes()


def first(key: str, names: list[str]) -> int:
    """Return the index of the name that the key ranks first; equal for any order of the names, which must differ."""
    hashes = _HASHES
    return ranked_first(hashed(key), [hashes[name] for name in names])


def draw(seed: int, key: str) -> float:
    """Return a number in [0, 1) that depends on the seed and the key alone."""
    return (hashed(f"{seed}/{key}") >> 11) / (1 << 53)
