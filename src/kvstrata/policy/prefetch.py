"""Decides which keys a prefetch loads and from which adapter: pure functions on keys and answers. No I/O, no clock.

Keys are chunk-major: key number `i` belongs to chunk `i // n_slices` and slice `i % n_slices`.  The prefix ends before
the first chunk that has a slice which is neither in L1 nor in any adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvstrata.policy.reasons import miss_reason
from kvstrata.types import MissReason


class Source(NamedTuple):
    """One adapter that has a key."""

    adapter: int
    """The adapter's index among the adapters that the fetch asks, nearest first."""
    record_bytes: int


class Hole(NamedTuple):
    """One key of the prefix that is not in L1 and has to be loaded."""

    number: int
    """The key's number among all keys of the prefix."""
    key: bytes
    source: Source
    """The nearest adapter that has the key."""


class Plan(NamedTuple):
    """How far the prefix goes, and the keys that must be loaded for it."""

    n_chunks: int
    holes: list[Hole]
    """Ordered by key number."""
    reason: MissReason | Literal[""]
    """Why the first chunk after the prefix is missing; empty if the prefix has all chunks."""
    detail: str = ""


class Run(NamedTuple):
    """Neighbouring chunks of one slice whose records have the same length; one reserve asks for all of them."""

    parent: bytes
    """Storage key of the chunk before the run, in this slice; empty at the start of a prompt."""
    record_bytes: int
    holes: list[Hole]


def make_plan(
    keys: Sequence[bytes],
    n_slices: int,
    l1_chunks: Sequence[int],
    sources: Mapping[int, Source],
    in_l1: Callable[[bytes], bool],
    unknown: Mapping[int, str],
    budget_bytes: int | None = None,
) -> Plan:
    """Plan the loads for the longest prefix whose keys are all in L1 or in an adapter.

    `l1_chunks` has the number of leading chunks in L1 for each slice; `in_l1` is asked only for keys beyond them.
    `sources` maps key numbers to the adapter that has the key, `unknown` to the reason why an adapter could not answer.
    With a budget the prefix ends before the chunk whose loads would exceed the budget.
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
    """The number of pending holes that form the next batch: all from one adapter, within the bounds, at least one."""
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
    """The runs that a batch must reserve, in the order of their first holes.

    `parents` has for each slice the storage key before the first chunk; it is empty at the start of a prompt.
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
