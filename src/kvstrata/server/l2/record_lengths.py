"""The lengths that the records of a slice may have, so that a tier's answer cannot take room in L1 for anything else.

Room in L1 is reserved for the length that a tier reports for a record: one value of 150 MB in a storage to which others
write would evict most of L1.  Layout facts name the payload's bytes and its sections (docs/layouts.md), and so the
length of each record.  Where they do not, the lengths that processes of the slice have reserved are allowed
(policy/processes.py).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.native.record import record_bytes
from kvstrata.observability.logging import Thinning
from kvstrata.policy.reasons import LENGTH
from kvstrata.storage.base import Found, Presence

log = logging.getLogger(__name__)
_odd = Thinning(60.0)

MOST_SECTIONS = 1 << 16
MOST_PAYLOAD_BYTES = 1 << 40


def declared_record_bytes(facts: Mapping[str, Any] | None) -> int:
    """The length of the records that these facts describe; 0 if they do not tell."""
    payload, sections = (facts or {}).get("payload_bytes"), (facts or {}).get("sections")
    count = len(sections) if isinstance(sections, list) else sections
    if type(payload) is not int or type(count) is not int:
        return 0
    if not 0 < count <= min(payload, MOST_SECTIONS) or payload > MOST_PAYLOAD_BYTES:
        return 0
    return record_bytes(count, payload)


def without_odd_lengths(
    tier: str,
    takes: Callable[[int, int], bool],
    names: Mapping[int, bytes],
    found: Sequence[Found],
    counts: collections.Counter[str],
) -> tuple[list[Found], list[bytes]]:
    """A tier's answers for these keys by number, UNKNOWN where `takes(number, record_bytes)` refuses the length.

    The second list has the keys whose length was refused.
    """
    checked: list[Found] = []
    odd: list[bytes] = []
    for (number, key), one in zip(names.items(), found, strict=True):
        if one.presence is Presence.PRESENT and not takes(number, one.record_bytes):
            counts[f"load:{LENGTH}"] += 1
            what = (
                "%s: not loading record %s: it has %d bytes, which is not the length of its layout's records"
            )
            _odd.log(log, logging.WARNING, tier, what, tier, key.hex()[:16], one.record_bytes)
            one = Found(Presence.UNKNOWN, 0, LENGTH)
            odd.append(key)
        checked.append(one)
    return checked, odd
