"""Batches of keys, and of what `exists` said of them, as bytes and back: what the channel of an adapter host carries.

A key has 32 bytes.  Thread-safe; everything happens under the GIL, in some 10 to 50 µs for 1,024 keys.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from typing_extensions import Buffer

T = TypeVar("T")

def pack_keys(keys: Sequence[bytes]) -> bytes:
    """The keys behind one another. Raises ValueError for one of another length."""

def split_keys(packed: Buffer) -> list[bytes]:
    """The inverse of `pack_keys`. Raises ValueError where that cannot have made it."""

def names_of(prefix: str, keys: Sequence[bytes]) -> list[str]:
    """`prefix` and the key in hexadecimal digits, for each.

    Raises ValueError for a key of another length and a prefix that is not ASCII.
    """

def pack_found(outcomes: Sequence[tuple[int, int, str]], word: Callable[[str], bytes]) -> bytes:
    """A row for each (presence, record bytes, reason): u8, u32 little endian, u8 and so many bytes `word(reason)`.

    Raises ValueError, TypeError or OverflowError for what fits no row.
    """

def read_found(
    rows: Buffer, count: int, max_reason_bytes: int, make: Callable[[int, int, str], T]
) -> list[T]:
    """What `make(presence, record_bytes, reason)` makes of each of the rows; of equal ones several share one.

    Raises ValueError for anything that is not exactly `count` rows with a presence below 3 and UTF-8 of at most
    `max_reason_bytes`; reads nothing outside `rows`.
    """
