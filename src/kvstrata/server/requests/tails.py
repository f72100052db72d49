"""The tails that a lookup names: which of them follows the chunks that are present, and its lease.

A lease covers the leading chunks and one tail as if the tail were one more chunk.  The tails that count are those of
the chunk behind the last one present, the most wanted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.keys.batch import nth
from kvstrata.native.core import Pool, storage_keys
from kvstrata.rpc.tail_wire import TailSet
from kvstrata.rpc.wire import check_keys
from kvstrata.types import EXTENT

Leased = tuple[int, int, bytes, int, int]
"""Ticket, chunks, extents, unverified and short bytes, as `Pool.lease` returns them."""


class NamedTail(NamedTuple):
    """One tail of a lookup."""

    tokens: int
    keys: bytes
    """Its storage keys, one for each slice."""


class NamedTails:
    """The tails that one lookup names."""

    def __init__(self, sets: Sequence[TailSet], root: bytes, slices: bytes) -> None:
        """`root` of the identity, `slices`: the engine's slice digests, concatenated.

        Raises BadRequest unless each tail has a key and a number of tokens.
        """
        for number, each in enumerate(sets):
            n_keys = check_keys(each.keys, f"tails[{number}].keys")
            if n_keys != len(each.tokens):
                raise BadRequest(
                    f"tails[{number}]: {n_keys} keys for {len(each.tokens)} numbers of tokens", field="tails"
                )
        self._sets = sets
        self._root = root
        self._slices = slices

    def after(self, n_chunks: int) -> Iterator[NamedTail]:
        """The tails that may follow so many chunks, the most wanted first."""
        for each in self._sets:
            if each.chunk == n_chunks:
                for number, tokens in enumerate(each.tokens):
                    yield NamedTail(tokens, storage_keys(self._root, nth(each.keys, number), self._slices))

    def in_l2(self, n_chunks: int) -> list[NamedTail]:
        """Those of them that L2 is asked for."""
        return list(self.after(n_chunks)) if any(s.in_l2 for s in self._sets if s.chunk == n_chunks) else []


def lease(
    pool: Pool,
    keys: bytes,
    n_chunks: int,
    n_slices: int,
    tails: NamedTails,
    take: Callable[[bytes], Leased],
) -> tuple[Leased, int]:
    """Lease the leading chunks of `keys`, and the tail that follows them, if L1 has one; returns its tokens, or 0.

    `take(keys)` leases leading keys.  The extents of a tail stand behind those of the chunks, which are counted without
    the tail.
    """
    # Most hits have all chunks that they ask for, so the tail behind the last one is tried at once.
    wanted = next(tails.after(n_chunks), None)
    leased = take(keys + wanted.keys if wanted else keys)
    if wanted and leased[1] == n_chunks + 1:
        return _without_tail(leased), wanted.tokens
    found = leased[1]
    for tail in tails.after(found):
        if tail == wanted or pool.peek(tail.keys, n_slices) != 1:
            continue
        again = take(keys[: found * len(tail.keys)] + tail.keys)
        if again[1] == found + 1:
            if leased[0]:
                pool.release(leased[0], -1)
            return _without_tail(again), tail.tokens
        if again[0]:
            pool.release(again[0], -1)
        break  # chunks have left L1 meanwhile, or leases may cover no more
    return leased, 0


def _without_tail(leased: Leased) -> Leased:
    ticket, n_keys, extents, unverified, short_bytes = leased
    return ticket, n_keys - 1, extents, unverified, short_bytes


def split_extents(extents: bytes, n_slices: int) -> tuple[bytes, bytes]:
    """The extents of the chunks, and those of the tail."""
    at = len(extents) - n_slices * EXTENT.size
    return extents[:at], extents[at:]
