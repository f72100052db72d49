"""Carries out a plan of `keys.recut.plan_recut` on records in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.keys.recut import Recut
from kvstrata.native import core
from kvstrata.native.core import CopyOutcome, RecordSpec


def record_length(sections: Sequence[int]) -> int:
    """The length of a record whose sections have these lengths."""
    return core.record_bytes(len(sections), sum(sections))


class Place(NamedTuple):
    """Where a record of the target is written, and what it states. Nothing in it lies in a source."""

    recut: Recut
    address: int
    length: int
    spec: RecordSpec


def recut_records(sources: Sequence[tuple[int, int, bytes]], targets: Sequence[Place]) -> CopyOutcome:
    """Write records of one chunk, and seal them with the CRCs of the written bytes.

    `sources` are (address, length, key) of the records, in the order in which `plan_recut` got their slices for each
    target.  The records that are used are verified first.  If one of them is not sound, its outcome is returned; if one
    has another shape, MISMATCH is returned; nothing is written then.  The caller owns all memory, which must stay
    mapped during the call.  Raises ValueError for an extent that is too small.  Bytes move without the GIL, but the
    call takes as long as the copy, so make it in a lane.
    """
    for recut, _, length, _ in targets:
        needed = record_length(recut.target_sections)
        if length < needed:
            raise ValueError(f"length: {length} bytes are too few for a record of {needed}")
    payloads = [(at, 0) for at, _, _ in sources]
    for used in sorted({copy.source for target in targets for copy in target.recut.copies}):
        at, source_length, key = sources[used]
        outcome = CopyOutcome(core.verify_record(at, source_length, key))
        if outcome is not CopyOutcome.OK:
            return outcome
        header = core.record_header(at, source_length)
        sections = tuple(n for _, n, _ in header.sections)
        if any(sections != target.recut.source_sections[used] for target in targets):
            return CopyOutcome.MISMATCH
        payloads[used] = (at + header.header_bytes, header.payload_bytes)
    for recut, address, length, spec in targets:
        payload_bytes = sum(recut.target_sections)
        header_bytes = record_length(recut.target_sections) - payload_bytes
        core.copy_strided(address + header_bytes, payload_bytes, payloads, recut.copies)
        core.seal_record(address, length, spec, recut.target_sections)
    return CopyOutcome.OK
