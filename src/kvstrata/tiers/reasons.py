"""The short reasons for failures behind L1, each with its MissReason for lookups and whether it blames the medium.

A reason accompanies FAILED, THROTTLED and UNKNOWN in the storage contract, and the hole of a fetch.  An adapter may
have other words for its own failures; all of these mean `OTHER`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstrata.types import MissReason


class Meaning(NamedTuple):
    """The meaning of one reason."""

    miss: MissReason
    """The MissReason of a chunk that could not be loaded because of this reason."""
    blames_medium: bool = True
    """Whether the reason counts against the medium's health.

    False if the medium served the request, or would have served it.  False also if one of many owners failed, since
    the adapter itself skips that owner for a while.
    """


# Reasons that several adapters or layers give.
BAD_ITEM = "bad_item"
BREAKER_OPEN = "breaker_open"
CLOSED = "closed"
DEADLINE = "deadline"
FULL = "full"
LENGTH = "length"
MEDIUM_GONE = "medium_gone"
MISMATCH = "mismatch"
PAUSED = "paused"
QUEUE_FULL = "queue_full"
RAISED = "adapter_error"
READ_ONLY = "read_only"
THROTTLED = "throttled"
TOO_LARGE = "too_large"

# Adapter hosts.
HOST_DIED = "host_died"
HOST_DOWN = "host_down"

# Codecs.
CODEC = "codec"
CORRUPT = "corrupt"
ENCODED = "encoded"
STAGING_TOO_SMALL = "staging_too_small"
UNAUTHENTICATED = "unauthenticated"

# Peers.
CONTROLLER_DOWN = "controller_down"
PEER_DEADLINE = "peer_deadline"
PEER_DIFFERS = "peer_differs"
PEER_FAILED = "peer_failed"
PEER_GONE = "peer_gone"
PEER_SKIPPED = "peer_skipped"
TRANSFER = "transfer"

OTHER = Meaning(MissReason.L2_FAILED)
_REFUSED = Meaning(MissReason.REFUSED)
_REFUSED_HERE = Meaning(MissReason.REFUSED, blames_medium=False)
_NOT_THE_MEDIUM = Meaning(MissReason.L2_FAILED, blames_medium=False)

MEANINGS: dict[str, Meaning] = {
    DEADLINE: Meaning(MissReason.DEADLINE),
    "timeout": Meaning(MissReason.DEADLINE),
    PEER_DEADLINE: Meaning(MissReason.DEADLINE, blames_medium=False),
    PEER_GONE: Meaning(MissReason.DEADLINE, blames_medium=False),
    PEER_FAILED: _NOT_THE_MEDIUM,
    PEER_SKIPPED: Meaning(MissReason.BREAKER_OPEN, blames_medium=False),
    BREAKER_OPEN: Meaning(MissReason.BREAKER_OPEN),
    CONTROLLER_DOWN: Meaning(MissReason.BREAKER_OPEN, blames_medium=False),
    HOST_DOWN: Meaning(MissReason.BREAKER_OPEN, blames_medium=False),
    CLOSED: Meaning(MissReason.BREAKER_OPEN),
    MEDIUM_GONE: Meaning(MissReason.BREAKER_OPEN, blames_medium=False),
    "stopping": Meaning(MissReason.BREAKER_OPEN),
    PAUSED: Meaning(MissReason.BREAKER_OPEN, blames_medium=False),
    "refused": _REFUSED,
    "budget": _REFUSED,
    THROTTLED: _REFUSED_HERE,
    QUEUE_FULL: _REFUSED_HERE,
    "staging": _REFUSED_HERE,
    STAGING_TOO_SMALL: _REFUSED_HERE,
    PEER_DIFFERS: _REFUSED_HERE,
    # The pool's refusals (rpc.wire.ReserveOutcome).
    "chain_exceeds_pool": _REFUSED,
    "pool_pinned": _REFUSED,
    "session_limit": _REFUSED,
    "quota": _REFUSED,
    TOO_LARGE: _REFUSED,
    "entries_full": _REFUSED,
    "frozen": _REFUSED,
    "parent_absent": _REFUSED,
    "worth_less": _REFUSED,
    CORRUPT: Meaning(MissReason.CORRUPT, blames_medium=False),
    "checksum": Meaning(MissReason.CORRUPT),
    "in_flight": Meaning(MissReason.IN_FLIGHT),
    "absent": Meaning(MissReason.EVICTED),
    LENGTH: _NOT_THE_MEDIUM,
    MISMATCH: _NOT_THE_MEDIUM,
    ENCODED: _NOT_THE_MEDIUM,
    CODEC: _NOT_THE_MEDIUM,
    "codec_unknown": _NOT_THE_MEDIUM,
    "codec_missing": _NOT_THE_MEDIUM,
    "no_key": _NOT_THE_MEDIUM,
    "wrong_key": _NOT_THE_MEDIUM,
    UNAUTHENTICATED: Meaning(MissReason.CORRUPT, blames_medium=False),
    READ_ONLY: _NOT_THE_MEDIUM,
    BAD_ITEM: OTHER,
    "io": OTHER,
    "internal": OTHER,
    "failed": OTHER,  # an outcome without a reason, from a third party's adapter
    "unknown": OTHER,
    FULL: OTHER,
    HOST_DIED: OTHER,
    RAISED: OTHER,
    TRANSFER: OTHER,
}


def miss_reason(reason: str) -> MissReason:
    """The MissReason for a short reason."""
    return MEANINGS.get(reason, OTHER).miss


def blames_medium(reason: str) -> bool:
    """Whether a short reason counts against the medium's health, see `Meaning`."""
    return MEANINGS.get(reason, OTHER).blames_medium
