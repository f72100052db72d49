"""Makes the PULL operations by which an instance reads given chunks from another instance."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.controller.commands import Command
from kvstrata.controller.member import Member
from kvstrata.controller.prompts import Named
from kvstrata.controller.ranking import owner_of
from kvstrata.keys.batch import count
from kvstrata.keys.spans import of_slices
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS, Pull
from kvstrata.types import KEY_BYTES


def pulls_of(named: Named, owner: Member, most_keys: int = MAX_PEER_KEYS) -> list[Pull]:
    """The operations that read these chunks from their owner, with at most about `most_keys` keys each, in order."""
    return [
        Pull(
            keys,
            named.root or None,
            len(spans) or named.n_slices,
            named.tenant,
            owner_of(owner, len(keys) // KEY_BYTES),
            list(spans) if any(spans) else [],
            _of_slices(named, spans) if named.record_bytes else [],
        )
        for keys, spans in parts(named.keys, named.n_slices, named.spans, most_keys)
    ]


def parts(
    keys: bytes, n_slices: int, spans: Sequence[int], most_keys: int = MAX_PEER_KEYS
) -> list[tuple[bytes, Sequence[int]]]:
    """The keys of each PULL, and the spans of its slices (() for none).

    Only the last command reads slices with a span, since a hit needs them only at its end; it has as many of the last
    chunks as fit.
    """
    if not any(spans):
        return [(part, ()) for part in batches(keys, n_slices, most_keys)]
    last = max(0, count(keys, n_slices) - max(1, MAX_PEER_KEYS // n_slices))
    whole = [number for number, span in enumerate(spans) if not span]
    before = of_slices(keys[: last * n_slices * KEY_BYTES], n_slices, whole) if whole else b""
    return [
        *((part, (0,) * len(whole)) for part in batches(before, len(whole) or 1, most_keys)),
        (keys[last * n_slices * KEY_BYTES :], spans),
    ]


def batches(keys: bytes, n_slices: int, most_keys: int = MAX_PEER_KEYS) -> list[bytes]:
    """The keys, cut between chunks into parts of at most `most_keys` keys, but of at least one chunk."""
    step = max(1, most_keys // n_slices) * n_slices * KEY_BYTES
    return [keys[at : at + step] for at in range(0, len(keys), step)]


def _of_slices(named: Named, spans: Sequence[int]) -> list[int]:
    """The lengths of the records of a PULL's slices: all of them, or only those without a span."""
    if not spans or len(spans) == named.n_slices:
        return list(named.record_bytes)
    return [length for length, span in zip(named.record_bytes, named.spans, strict=False) if not span]


def all_arrived(command: Command) -> bool:
    """Whether a PULL read all of its chunks into L1; one that succeeds may have read only a part."""
    result, pull = command.result, command.operation
    assert isinstance(pull, Pull)
    n_chunks = len(pull.keys) // (KEY_BYTES * pull.n_slices)
    return result is not None and result.ok and result.body.get("count") == n_chunks
