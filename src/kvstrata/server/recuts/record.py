"""Carries out a plan of `keys.recut.plan_recut` on records in memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.keys.recut import Recut
from kvstrata.native import copying
from kvstrata.native import record as native_record
from kvstrata.native.record import CopyOutcome, RecordSpec


def record_length(sections: Sequence[int]) -> int:
    """The length of a record whose sections have these lengths."""
    return native_record.record_bytes(len(sections), sum(sections))


def recut_record(
    recut: Recut, sources: Sequence[tuple[int, int, bytes]], address: int, length: int, spec: RecordSpec
) -> CopyOutcome:
    """Write the target's record at `address` and seal it with the CRCs of the written bytes.

    `sources` are (address, length, key) of the records, in the order in which `plan_recut` got their slices.  The
    records that the plan uses are verified first.  If one of them is not sound, its outcome is returned; if one has
    another shape, MISMATCH is returned; nothing is written then.  The caller owns all memory, which must stay mapped
    during the call; the target overlaps no source.  Raises ValueError for an extent that is too small.  Bytes move
    without the GIL, but the call takes as long as the copy, so make it in a lane.
    """
    needed = record_length(recut.target_sections)
    if length < needed:
        raise ValueError(f"length: {length} bytes are too few for a record of {needed}")
    payloads = [(at, 0) for at, _, _ in sources]
    for used in sorted({copy.source for copy in recut.copies}):
        at, source_length, key = sources[used]
        outcome = CopyOutcome(native_record.verify_record(at, source_length, key))
        if outcome is not CopyOutcome.OK:
            return outcome
        header = native_record.record_header(at, source_length)
        if tuple(n for _, n, _ in header.sections) != recut.source_sections[used]:
            return CopyOutcome.MISMATCH
        payloads[used] = (at + header.header_bytes, header.payload_bytes)
    payload_bytes = sum(recut.target_sections)
    header_bytes = needed - payload_bytes
    copying.copy_strided(address + header_bytes, payload_bytes, payloads, recut.copies)
    native_record.seal_record(address, length, spec, recut.target_sections)
    return CopyOutcome.OK
