"""Checks of fields that several requests have."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.errors import BadRequest
from kvstrata.rpc.tail_wire import TailSet
from kvstrata.rpc.wire import Reserve, key_count
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


def check_tail(request: Reserve, n_chunks: int) -> bool:
    """Whether a reserve is that of a tail. Raises BadRequest for a tail beside other keys, and for odd `replaces`."""
    if request.tail_tokens and n_chunks != 1:
        raise BadRequest(
            f"tail_tokens: a tail is reserved by itself, found {n_chunks} keys", field="tail_tokens"
        )
    if request.replaces:
        whole_keys(request.replaces, "replaces")
    return request.tail_tokens > 0


def check_tails(tails: Sequence[TailSet]) -> None:
    """Raises BadRequest unless each tail of a lookup has a key and a number of tokens."""
    for number, each in enumerate(tails):
        if whole_keys(each.keys, f"tails[{number}].keys") != len(each.tokens):
            raise BadRequest(
                f"tails[{number}]: {len(each.keys) // KEY_BYTES} keys for {len(each.tokens)} numbers of tokens",
                field="tails",
            )
