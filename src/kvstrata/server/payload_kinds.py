"""Element sizes of the payloads of each slice, for the codecs of tiers: a process declares them when it attaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.native.core import record_bytes
from kvstrata.rpc.wire import MAX_SLICES
from kvstrata.types import Slice

MAX_ELEMENT_BYTES = 16
MAX_SECTIONS = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 40


class PayloadKinds:
    """Bytes of a number, by slice digest. `attached` belongs to the event loop; any thread may call the rest."""

    def __init__(self) -> None:
        self._slices: dict[bytes, int] = {}

    def attached(self, part: Slice | None, facts: Mapping[str, Any] | None) -> None:
        """Note the facts that a process declared for its slice."""
        if part is None or facts is None:
            return
        digest = part.digest()
        self._slices.pop(digest, None)
        element_bytes = facts.get("element_bytes")
        if type(element_bytes) is int and 0 < element_bytes <= MAX_ELEMENT_BYTES:
            self._slices[digest] = element_bytes
        if len(self._slices) > MAX_SLICES:
            del self._slices[next(iter(self._slices))]

    def element_bytes_of(self, slice_digest: bytes) -> int:
        """Bytes of a number of this slice's payloads; 2 where nothing is known."""
        return self._slices.get(slice_digest, 2)


def declared_record_bytes(facts: Mapping[str, Any] | None) -> int:
    """The length of the records that the facts of a slice describe (docs/layouts.md); 0 if they do not tell."""
    payload, sections = (facts or {}).get("payload_bytes"), (facts or {}).get("sections")
    count = len(sections) if isinstance(sections, list) else sections
    if type(payload) is not int or type(count) is not int:
        return 0
    if not 0 < count <= min(payload, MAX_SECTIONS) or payload > MAX_PAYLOAD_BYTES:
        return 0
    return record_bytes(count, payload)
