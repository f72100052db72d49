"""Does what `keys.layout.plan_recut` says, on records in memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.keys.recut import Recut
from kvstrata.native import copying
from kvstrata.native.copying import CopyOutcome, RecordSpec


def record_bytes(recut: Recut) -> int:
    """What an extent for the recut record needs."""
    return copying.record_bytes(len(recut.target_sections), sum(recut.target_sections))


def recut_record(
    recut: Recut, sources: Sequence[tuple[int, int, bytes]], address: int, length: int, spec: RecordSpec
) -> CopyOutcome:
    """Writes the sealed record of the target at `address`, whose CRCs are computed of what was written.

    `sources` are (address, length, key) of records as `plan_recut` was given their slices, in its order; those that are
    used are verified first.  The outcome of the first that is not sound, MISMATCH for one of another shape; nothing was
    written then.  All memory is the caller's, stays mapped meanwhile, and the target overlaps no source.  Raises
    ValueError for an extent that is too small.  Bytes move without the GIL, but the caller waits: this is for a lane.
    """
    if length < record_bytes(recut):
        raise ValueError(f"length: {length} bytes are too few for a record of {record_bytes(recut)}")
    payloads = [(at, 0) for at, _, _ in sources]
    for used in sorted({copy.source for copy in recut.copies}):
        at, source_length, key = sources[used]
        outcome = CopyOutcome(copying.verify_record(at, source_length, key))
        if outcome is not CopyOutcome.OK:
            return outcome
        header = copying.record_header(at, source_length)
        if tuple(n for _, n, _ in header.sections) != recut.source_sections[used]:
            return CopyOutcome.MISMATCH
        payloads[used] = (at + header.header_bytes, header.payload_bytes)
    payload_bytes = sum(recut.target_sections)
    header_bytes = record_bytes(recut) - payload_bytes
    copying.copy_strided(address + header_bytes, payload_bytes, payloads, recut.copies)
    copying.seal_record(address, length, spec, recut.target_sections)
    return CopyOutcome.OK
