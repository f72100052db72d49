"""The metrics of a tier, which tier.py counts, and those of its medium."""

from __future__ import annotations

import collections
from typing import Any

from kvstrata.observability.numbers import Numbers, counter, gauge, histogram, parts_by

_CODEC = frozenset(("staging_used_bytes", "encoded_from_bytes", "encoded_to_bytes"))
_OWN = frozenset(("segments_bytes", "read_only", "owners", "owners_skipped"))
"""The numbers of codecs, and those of media, that have a metric of their own."""


class Operation(Numbers):
    """One kind of operation on one tier."""

    seconds = histogram("Duration of one batch on an adapter.")
    bytes = counter("Record bytes moved by an adapter.")
    items = counter("Chunks by outcome of an adapter's operation.", "outcome")


class TierNumbers(Numbers):
    """The base of `Tier`. The status document has the medium's own numbers in a place apart (`Tier.document`)."""

    operations = parts_by("operation", Operation, lambda tier: tier.by_operation, key="")
    takes_loads = gauge("1 if lookups ask this adapter, else 0.", lambda tier: tier.state == "active")
    medium_well = gauge(
        "1 while the tier's storage is reachable and its directory, if any, is writable, else 0.",
        lambda tier: None if tier.medium_state is None else tier.medium_state == "well",
    )
    stuck_bytes = gauge("Bytes of operations past their deadline that have not ended.")
    breaker_open = gauge(
        "1 while an adapter's breaker is open (no requests) or probing (one request), else 0.",
        lambda tier: {word: state != "closed" for word, state in tier.breaker_states().items()},
        "operation",
        key="",
    )
    codec_staging_used_bytes = gauge(
        "Staging memory that the adapter's codecs use now.",
        lambda tier: tier.codec_stats().get("staging_used_bytes"),
        key="",
    )
    codec_input_bytes = counter(
        "Bytes of the records that the adapter's codecs encoded, before encoding.",
        read=lambda tier: tier.codec_stats().get("encoded_from_bytes"),
        key="",
    )
    codec_output_bytes = counter(
        "Bytes of these records after encoding.",
        read=lambda tier: tier.codec_stats().get("encoded_to_bytes"),
        key="",
    )
    codec_records = counter(
        "Records by the outcome of the adapter's codecs: encoded, decoded, incompressible and so on.",
        "outcome",
        read=lambda tier: {word: n for word, n in tier.codec_stats().items() if word not in _CODEC},
        key="",
    )
    segments_bytes = gauge(
        "Bytes of the segment files of a disk adapter.",
        lambda tier: tier.medium_numbers().get("segments_bytes"),
        key="",
    )
    read_only = gauge(
        "1 after a failed write or sync of a disk adapter, which takes no puts until the server restarts; else 0.",
        lambda tier: tier.medium_numbers().get("read_only"),
        key="",
    )
    peer_owners = gauge(
        "Peers that this instance remembers as owners of chunks.",
        lambda tier: tier.medium_numbers().get("owners"),
        key="",
    )
    peer_owners_skipped = gauge(
        "Remembered owners that are skipped now because they failed.",
        lambda tier: tier.medium_numbers().get("owners_skipped"),
        key="",
    )
    adapter_bytes = counter(
        "Bytes that the adapter itself counts; see tiers.md and cluster.md.",
        "event",
        read=lambda tier: {
            word.removesuffix("_bytes"): n for word, n in _own(tier) if word.endswith("_bytes")
        },
        key="",
    )
    adapter_events = counter(
        "Events that the adapter itself counts; see tiers.md and cluster.md.",
        "event",
        read=lambda tier: {word: n for word, n in _own(tier) if not word.endswith("_bytes")},
        key="",
    )
    host_pid = gauge(
        "Process id of the adapter host; 0 while none runs or if the adapter has none.",
        lambda tier: _of_host(tier, "pid"),
        key="",
    )
    host_restarts = counter(
        "Adapter hosts started to replace an ended one.",
        read=lambda tier: _of_host(tier, "restarts"),
        key="",
    )
    host_requests = gauge(
        "Requests to the adapter host that have not ended.", lambda tier: _of_host(tier, "requests"), key=""
    )

    def __init__(self) -> None:
        self.by_operation: dict[str, Operation] = collections.defaultdict(Operation)


def _own(tier: Any) -> list[tuple[str, int]]:
    """The medium's own numbers, without those that have a metric of their own."""
    return [(word, n) for word, n in tier.medium_numbers().items() if word not in _OWN]


def _of_host(tier: Any, word: str) -> Any:
    return None if tier.host is None else tier.host.host_status()[word]
