"""Checks of fields that several requests have."""

from __future__ import annotations

from kvstrata.errors import BadRequest
from kvstrata.rpc.wire import key_count
from kvstrata.types import KEY_BYTES


def whole_keys(keys: bytes, field: str) -> int:
    """The number of keys. Raises BadRequest for no keys, and for bytes that are not whole keys."""
    n_keys = key_count(keys)
    if n_keys < 1:
        raise BadRequest(f"{field}: {len(keys)} bytes are not one or more {KEY_BYTES}-byte keys", field=field)
    return n_keys


def check_probe(probe: bytes) -> None:
    """Raises BadRequest unless this is a probe or empty."""
    if len(probe) not in (0, 8):
        raise BadRequest(f"probe: must be 0 or 8 bytes, found {len(probe)}", field="probe")
