"""What engines have declared of their payloads, for the codecs of adapters.

Declared facts of a slice say how large its numbers are; the layout identity says whether its engine has accepted
fp8.  Both are known from an attach (an `identify`) on, so records that were adopted from an earlier server are of no
known kind until their engine is back: they are encoded without loss then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.native.codec import fp8_sizes
from kvstrata.policy.processes import Registry
from kvstrata.storage.base import PayloadKind
from kvstrata.types import Slice

MAX_SLICES = 4_096
MAX_ELEMENT_BYTES = 16
FP8_NUMBERS = 6


class PayloadKinds:
    """By slice digest. `attached` belongs to the event loop; `of` may be called by any thread."""

    def __init__(self, peers: Registry) -> None:
        self._peers = peers
        self._slices: dict[bytes, PayloadKind] = {}

    def attached(self, part: Slice | None, facts: Mapping[str, Any] | None) -> None:
        """A process declared its slice and the facts behind it."""
        if part is None or facts is None:
            return
        digest = part.digest()
        self._slices.pop(digest, None)
        element_bytes = facts.get("element_bytes")
        if type(element_bytes) is not int or not 0 < element_bytes <= MAX_ELEMENT_BYTES:
            element_bytes = 2
        self._slices[digest] = PayloadKind(element_bytes, _fp8(facts.get("fp8")))
        if len(self._slices) > MAX_SLICES:
            del self._slices[next(iter(self._slices))]

    def of(self, identity: bytes, slice_digest: bytes) -> PayloadKind | None:
        """What is known; a shape for fp8 only where this identity's engine has accepted that."""
        kind = self._slices.get(slice_digest)
        if kind is None or kind.fp8 is None:
            return kind
        known = self._peers.by_root(identity)
        if known is not None and known.layout.fidelity == "fp8":
            return kind
        return kind._replace(fp8=None)


def _fp8(fact: object) -> tuple[int, ...] | None:
    """The fact `fp8` where it makes sense; it comes from another process."""
    if not isinstance(fact, list) or len(fact) != FP8_NUMBERS:
        return None
    if not all(type(number) is int and 0 < number < 1 << 32 for number in fact) or fact[0] not in (1, 2):
        return None
    try:
        fp8_sizes(fact[1:])
    except ValueError:
        return None
    return tuple(fact)
