"""Concatenated keys: which key belongs to which chunk."""

from __future__ import annotations

from kvstrata.keys import batch
from kvstrata.types import KEY_BYTES

KEYS = [bytes([number]) * KEY_BYTES for number in range(6)]
ALL = b"".join(KEYS)


def test_keys_split_into_one_for_each_chunk() -> None:
    assert batch.count(ALL) == 6
    assert [batch.nth(ALL, number) for number in range(6)] == batch.split(ALL) == KEYS
    assert batch.part(ALL, 1, 3) == KEYS[1] + KEYS[2]
    assert batch.part(ALL, 4, 9) == KEYS[4] + KEYS[5]


def test_keys_split_into_several_for_each_chunk() -> None:
    assert batch.count(ALL, 2) == 3
    assert batch.part(ALL, 1, 2, 2) == KEYS[2] + KEYS[3]
    assert batch.before(ALL, 2, n_slices=2) == KEYS[2] + KEYS[3]


def test_each_chunk_has_the_keys_of_the_chunk_before_it() -> None:
    parent = b"p" * KEY_BYTES
    assert batch.before(ALL, 0) == b"" and batch.before(ALL, 0, parent) == parent
    assert batch.before(ALL, 3, parent) == KEYS[2]
    assert batch.split(batch.parents(ALL, parent)) == [parent, *KEYS[:-1]]
    assert batch.parents(ALL, parent + parent) == parent + parent + ALL[: -2 * KEY_BYTES]
    assert batch.parents(b"", parent) == b""
