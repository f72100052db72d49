"""What a prefetch loads from where: pure functions on keys and answers. No I/O, no clock.

Keys are chunk-major: key number `i` belongs to chunk `i // n_slices` and slice `i % n_slices`.  A prefix
counts as far as every slice of a chunk is in L1 or in some adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstrata.types import MissReason


class Source(NamedTuple):
    """One adapter that has a key."""

    adapter: int
    """Its place among the adapters that the fetch asks, nearest first."""
    record_bytes: int


class Hole(NamedTuple):
    """One key of the prefix that is not in L1 and has to be loaded."""

    number: int
    """Its number among the keys."""
    key: bytes
    source: Source
    """The nearest adapter that has it."""


class Plan(NamedTuple):
    """How far the prefix goes and what has to be loaded for that."""

    n_chunks: int
    holes: list[Hole]
    """In the order of the keys."""
    reason: str
    """MissReason of chunk `n_chunks`, empty when there is none beyond."""
    detail: str = ""


class Run(NamedTuple):
    """Neighbouring chunks of one slice with records of one length: what one reserve asks for."""

    parent: bytes
    """Storage key of the chunk before in this slice, empty at the start of a prompt."""
    record_bytes: int
    holes: list[Hole]


MISS_REASONS: dict[str, MissReason] = {
    **dict.fromkeys(("deadline", "peer_deadline", "peer_gone"), MissReason.DEADLINE),
    **dict.fromkeys(
        ("breaker_open", "controller_down", "host_down", "closed", "stopping", "adapter_removed"),
        MissReason.BREAKER_OPEN,
    ),
    **dict.fromkeys(
        ("refused", "budget", "throttled", "queue_full", "staging", "staging_too_small", "limit"),
        MissReason.REFUSED,
    ),
    # The pool's refusals (rpc.wire.ReserveOutcome).
    **dict.fromkeys(
        (
            "chain_exceeds_pool",
            "pool_pinned",
            "session_limit",
            "quota",
            "too_large",
            "entries_full",
            "frozen",
            "parent_absent",
        ),
        MissReason.REFUSED,
    ),
    "corrupt": MissReason.CORRUPT,
    "in_flight": MissReason.IN_FLIGHT,
    "absent": MissReason.EVICTED,
}
"""Short reasons of our own as reasons of a miss. Every other word is an adapter's for how it failed."""


def miss_reason(reason: str) -> MissReason:
    """The closed list's word for a short reason."""
    return MISS_REASONS.get(reason, MissReason.L2_FAILED)


def make_plan(
    keys: Sequence[bytes],
    n_slices: int,
    l1_chunks: Sequence[int],
    sources: Mapping[int, Source],
    in_l1: Callable[[bytes], bool],
    unknown: Mapping[int, str],
    budget_bytes: int | None = None,
) -> Plan:
    """Walk the prefix to the first chunk that nobody has.

    `l1_chunks` is L1's leading chunks per slice; `in_l1` is asked only for keys beyond them.  `sources` and
    `unknown` are by key number; `unknown` says why an adapter could not answer.  With a budget the prefix ends
    before the chunk whose loads would exceed it.
    """
    n_chunks = len(keys) // n_slices
    holes: list[Hole] = []
    planned_bytes = 0
    for chunk in range(n_chunks):
        chunk_holes: list[Hole] = []
        for i in range(chunk * n_slices, (chunk + 1) * n_slices):
            if chunk < l1_chunks[i - chunk * n_slices]:
                continue
            if in_l1(keys[i]):
                continue
            source = sources.get(i)
            if source is not None:
                chunk_holes.append(Hole(i, keys[i], source))
                planned_bytes += source.record_bytes
            else:
                why = unknown.get(i, "")
                return Plan(chunk, holes, miss_reason(why) if why else MissReason.NEVER_STORED, why)
        if budget_bytes is not None and planned_bytes > budget_bytes:
            return Plan(chunk, holes, MissReason.REFUSED, "budget")
        holes += chunk_holes
    return Plan(n_chunks, holes, "")


def next_batch(pending: Sequence[Hole], max_items: int, max_bytes: int) -> int:
    """How many of the pending holes make the next batch: one adapter, bounded, at least one."""
    count = batch_bytes = 0
    for hole in pending:
        source = hole.source
        batch_bytes += source.record_bytes
        if count and (
            count == max_items or batch_bytes > max_bytes or source.adapter != pending[0].source.adapter
        ):
            break
        count += 1
    return count


def reserve_runs(
    batch: Sequence[Hole], keys: Sequence[bytes], n_slices: int, parents: Sequence[bytes]
) -> list[Run]:
    """The reserves that a batch needs, in the order of their first holes.

    `parents` holds per slice the storage key before the first chunk, or is empty at the start of a prompt.
    """
    runs: list[Run] = []
    open_runs: dict[int, Run] = {}
    for hole in batch:
        slice_number = hole.number % n_slices
        run = open_runs.get(slice_number)
        if (
            run is not None
            and run.holes[-1].number + n_slices == hole.number
            and run.record_bytes == hole.source.record_bytes
        ):
            run.holes.append(hole)
            continue
        if hole.number >= n_slices:
            parent = keys[hole.number - n_slices]
        else:
            parent = parents[slice_number] if parents else b""
        run = Run(parent, hole.source.record_bytes, [hole])
        open_runs[slice_number] = run
        runs.append(run)
    return runs
