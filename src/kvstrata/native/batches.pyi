"""Work on batches of keys and values.

A key has 32 bytes.  Thread-safe; every call keeps the GIL, for some 10 to 50 µs with 1,024 keys.
"""

from collections.abc import Sequence

def names_of(prefix: str, keys: Sequence[bytes]) -> list[str]:
    """For each key, `prefix` followed by the key in hexadecimal digits.

    Raises ValueError for a key that does not have 32 bytes, and for a prefix that is not ASCII.
    """

def types_of(values: Sequence[object]) -> set[type]:
    """The types of the values."""
