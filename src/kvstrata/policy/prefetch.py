"""Decides which keys a prefetch loads and from which adapter: pure functions on keys and answers. No I/O, no clock.

Keys are chunk-major: key number `i` belongs to chunk `i // n_slices` and slice `i % n_slices`.  The prefix ends before
the first chunk that has a slice which is neither in L1 nor in any adapter.  Slices with a span (keys/spans.py) are
needed at the prefix's end only, and may move the end forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvstrata.keys.spans import longest
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
    spans: Sequence[int] = (),
) -> Plan:
    """Plan the loads for the longest prefix whose keys are all in L1 or in an adapter; slices with a span are left out.

    `l1_chunks` has the number of leading chunks in L1 for each slice; `in_l1` is asked only for keys beyond them.
    `sources` maps key numbers to the adapter that has the key, `unknown` to the reason why an adapter could not answer.
    With a budget the prefix ends before the chunk whose loads would exceed the budget.
    """
    n_chunks = len(keys) // n_slices
    whole = [number for number in range(n_slices) if not (spans and spans[number])]
    holes: list[Hole] = []
    planned_bytes = 0
    for chunk in range(n_chunks):
        chunk_holes: list[Hole] = []
        for number in whole:
            i = chunk * n_slices + number
            if chunk < l1_chunks[number] or in_l1(keys[i]):
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


def with_windows(
    plan: Plan,
    keys: Sequence[bytes],
    n_slices: int,
    sources: Mapping[int, Source],
    in_l1: Callable[[bytes], bool],
    unknown: Mapping[int, str],
    spans: Sequence[int],
    budget_bytes: int | None = None,
) -> Plan:
    """Shorten a plan of `make_plan` until each slice with a span has what the hit needs, and load that as well.

    With a budget it is shortened until all loads together stay within it.
    """

    def there(chunk: int, number: int) -> bool:
        i = chunk * n_slices + number
        return i in sources or in_l1(keys[i])

    def holes_of(n_chunks: int) -> list[Hole]:
        holes = [hole for hole in plan.holes if hole.number < n_chunks * n_slices]
        for number, span in enumerate(spans):
            for chunk in range(max(0, n_chunks - span), n_chunks if span else 0):
                i = chunk * n_slices + number
                if not in_l1(keys[i]) and i in sources:
                    holes.append(Hole(i, keys[i], sources[i]))
        return sorted(holes, key=lambda hole: hole.number)

    n_chunks = longest(plan.n_chunks, spans, there)
    holes = holes_of(n_chunks)
    over = False
    while budget_bytes is not None and sum(hole.source.record_bytes for hole in holes) > budget_bytes:
        over = True
        n_chunks = longest(n_chunks - 1, spans, there)
        holes = holes_of(n_chunks)
    if n_chunks == plan.n_chunks:
        return plan._replace(holes=holes)
    if over:
        return Plan(n_chunks, holes, MissReason.REFUSED, "budget")
    beyond = range(n_chunks * n_slices, plan.n_chunks * n_slices)
    why = next((unknown[i] for i in beyond if spans[i % n_slices] and i in unknown), "")
    return Plan(n_chunks, holes, miss_reason(why) if why else MissReason.NEVER_STORED, why)


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
