"""The identity root that the head of a stored record names (docs/formats.md, Outer header)."""

from __future__ import annotations

from kvstrata.types import KEY_BYTES

_MAGIC = b"KVSTRATA"
_KEY_AT, _ROOT_AT = 16, 48


def root_of(key: bytes, head: bytes) -> bytes:
    """The identity root; empty if the head is none of a record with this key.

    A wrong root costs at most this record: it is deleted although it belongs to another tenant, or it stays.
    """
    names = head[:8] == _MAGIC and head[_KEY_AT : _KEY_AT + KEY_BYTES] == key
    return head[_ROOT_AT : _ROOT_AT + KEY_BYTES] if names and len(head) >= _ROOT_AT + KEY_BYTES else b""
