"""Element size and fp8 shape of the payloads of each slice, for the codecs of tiers.

A process declares them as facts of its slice when it attaches; the layout identity says whether its engine accepts fp8.
After a restart the server knows neither until the engine has attached again, so adopted records are encoded losslessly
until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.native.codec import fp8_sizes
from kvstrata.native.record import record_bytes
from kvstrata.policy.processes import ProcessTable
from kvstrata.storage.base import PayloadKind
from kvstrata.types import Slice

MAX_SLICES = 4_096
MAX_ELEMENT_BYTES = 16
FP8_NUMBERS = 6
MAX_SECTIONS = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 40


class PayloadKinds:
    """The payload kinds, by slice digest. `attached` belongs to the event loop; any thread may call `of`."""

    def __init__(self, processes: ProcessTable) -> None:
        self._processes = processes
        self._slices: dict[bytes, PayloadKind] = {}

    def attached(self, part: Slice | None, facts: Mapping[str, Any] | None) -> None:
        """Note the facts that a process declared for its slice."""
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
        """The payload kind of a slice, None if unknown; with an fp8 shape only if the identity's engine accepts fp8."""
        kind = self._slices.get(slice_digest)
        if kind is None or kind.fp8 is None:
            return kind
        known = self._processes.by_root(identity)
        if known is not None and known.layout.fidelity == "fp8":
            return kind
        return kind._replace(fp8=None)


def declared_record_bytes(facts: Mapping[str, Any] | None) -> int:
    """The length of the records that the facts of a slice describe (docs/layouts.md); 0 if they do not tell."""
    payload, sections = (facts or {}).get("payload_bytes"), (facts or {}).get("sections")
    count = len(sections) if isinstance(sections, list) else sections
    if type(payload) is not int or type(count) is not int:
        return 0
    if not 0 < count <= min(payload, MAX_SECTIONS) or payload > MAX_PAYLOAD_BYTES:
        return 0
    return record_bytes(count, payload)


def _fp8(fact: object) -> tuple[int, ...] | None:
    """The fact `fp8`, checked because it comes from another process; None if it is invalid."""
    if not isinstance(fact, list) or len(fact) != FP8_NUMBERS:
        return None
    if not all(type(number) is int and 0 < number < 1 << 32 for number in fact) or fact[0] not in (1, 2):
        return None
    try:
        fp8_sizes(fact[1:])
    except ValueError:
        return None
    return tuple(fact)
