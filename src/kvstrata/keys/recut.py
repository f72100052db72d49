"""Recutting builds, from existing records, the record that an engine of another geometry would have stored.

A record holds one slice of a chunk: some layers and KV heads, in blocks of a certain size.  Its facts
(`docs/internals/layouts.md`) name the axes of a block in their order.  So for a slice under another tensor-parallel
size, block size or order of axes, `plan_recut` can compute where each byte lies in the records of other slices.  It
returns strided copies, which the owner of the bytes makes (`server/recuts/recuts.py`).  This module is pure arithmetic
and touches no record.

Records are cut along layers and the axes `tokens` and `kv_heads`.  The axes `kv` and `dim` may change places.  Only the
writer knows the meaning of other axes, so these are copied whole, in their order.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.errors import CallerError
from kvstrata.types import Slice

MAX_LOOPS = 8
"""Most nested loops of one copy."""
MAX_COPIES = 1 << 16
"""Most copies of one record; facts come from other processes, and could ask for any number."""
SAME_FACTS = ("format", "dtype", "stored_dtype", "quantisation", "element_bytes", "chunk_tokens")
"""Facts that must be equal on both sides: a recut moves bytes and converts nothing."""
FREE_AXES = ("tokens", "kv_heads", "kv", "dim")


class RecutReason(enum.StrEnum):
    """Why a record cannot be recut."""

    FACTS = "facts"
    """Facts are missing or invalid."""
    DIFFERS = "differs"
    """A fact of SAME_FACTS differs, e.g. the dtype or the tokens of a chunk."""
    LOSSY = "lossy"
    """A lossy codec rounded the source, in groups other than those of the target."""
    ARRANGEMENT = "arrangement"
    """The facts do not say how blocks are arranged, at least not where the blocks would be cut."""
    SCALES = "scales"
    """The numbers were quantised with other scales."""
    MISSING = "missing"
    """No source has a layer or a head that the target needs."""


class CannotRecut(CallerError):
    """The sources lack bytes of the target, or hold them in an unknown form; `field` names the fact at fault."""

    code = "cannot_recut"

    def __init__(self, reason: RecutReason, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)
        self.reason = reason


class Part(NamedTuple):
    """A slice, and the facts behind `slice.layout` that describe its records."""

    slice: Slice
    facts: Mapping[str, Any]


class StridedCopy(NamedTuple):
    """Copies runs of bytes from the payload of source number `source` to the payload of the target.

    Offsets count from the start of the payload; `loops` are (count, stride in the source, stride in the target), in
    bytes, outermost first.
    """

    source: int
    source_offset: int
    target_offset: int
    loops: tuple[tuple[int, int, int], ...]
    run_bytes: int


class Recut(NamedTuple):
    """All copies that make one record. They write every byte of the target's payload exactly once."""

    copies: tuple[StridedCopy, ...]
    source_sections: tuple[tuple[int, ...], ...]
    """For each source, the lengths of the sections that its record must have."""
    target_sections: tuple[int, ...]


class _Axis(NamedTuple):
    name: str
    size: int
    stride: int
    """Bytes."""


class _Record(NamedTuple):
    """A slice as its facts describe it. All sections have the same axes, outermost first."""

    axes: list[_Axis]
    element_bytes: int
    section_bytes: int
    sections: dict[tuple[int, int], int]
    """(Layer, number among the layer's sections) → number among the record's sections."""
    kv_heads: tuple[int, int]
    heads: int
    """Size of the axis `kv_heads`; 1 without it: a block then has one head, or does not separate its heads."""
    scales: list[list[str]]

    @property
    def cuts_heads(self) -> bool:
        return self.heads == self.kv_heads[1] - self.kv_heads[0]


def plan_recut(sources: Sequence[Part], target: Part) -> Recut:
    """Plan how to make the target's record from one record of each source, all of the same chunk and identity.

    If several sources have the same head of the same layer, one of them is chosen.  Raises CannotRecut.
    """
    there = [_read(part) for part in sources]
    wanted = _read(target)
    for part, record in zip(sources, there, strict=True):
        for name in SAME_FACTS:
            if part.facts.get(name) != target.facts.get(name):
                raise CannotRecut(
                    RecutReason.DIFFERS,
                    name,
                    f"{part.facts.get(name)!r} stored, {target.facts.get(name)!r} wanted",
                )
        _check_axes(record, wanted)
    each = (
        copy
        for key, section in wanted.sections.items()
        for copy in _section_copies(there, wanted, key, section)
    )
    found = list(itertools.islice(each, MAX_COPIES + 1))
    if len(found) > MAX_COPIES:
        raise CannotRecut(
            RecutReason.ARRANGEMENT, "axes", f"a record would be made by more than {MAX_COPIES} copies"
        )
    same_place = _join(
        found,
        lambda copy: (
            copy.source_offset % there[copy.source].section_bytes,
            copy.target_offset % wanted.section_bytes,
        ),
    )
    return Recut(
        copies=tuple(_join(list(same_place), lambda copy: ())),
        source_sections=tuple((record.section_bytes,) * len(record.sections) for record in there),
        target_sections=(wanted.section_bytes,) * len(wanted.sections),
    )


def _read(part: Part) -> _Record:
    facts = part.facts
    if "encoding" in facts:
        raise CannotRecut(
            RecutReason.LOSSY,
            "encoding",
            "a lossy codec rounded the record in groups of its own geometry; only lossless records can be recut",
        )
    if "rule" in facts:
        raise CannotRecut(
            RecutReason.ARRANGEMENT,
            "rule",
            "it has only the last window or state of a chunk; only records of whole chunks can be recut",
        )
    if "makes" in facts:
        raise CannotRecut(
            RecutReason.ARRANGEMENT,
            "makes",
            "its layers have blocks of different structure; only records whose layers are alike can be recut",
        )
    try:
        named = [(str(name), int(size)) for name, size in facts["axes"]]
        element_bytes, layers = int(facts["element_bytes"]), [int(layer) for layer in facts["layers"]]
        blocks, rest = divmod(int(facts["chunk_tokens"]), int(facts["block_tokens"]))
        scales = [[str(scale) for scale in section] for section in facts["scales"]]
        section_bytes = int(facts["section_bytes"])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CannotRecut(RecutReason.FACTS, "facts", f"do not describe paged blocks: {error!r}") from None
    names = [name for name, _ in named]
    named.insert(0, ("tokens" if "tokens" in names else "blocks", blocks))
    axes: list[_Axis] = []
    stride = element_bytes
    for name, size in reversed(named):
        axes.insert(0, _Axis(name, size, stride))
        stride *= size
    heads = [axis.size for axis in axes if axis.name == "kv_heads"]
    tokens = math.prod(axis.size for axis in axes if axis.name == "tokens")
    if (
        rest
        or stride != section_bytes
        or min(stride, len(layers), len(named)) <= 0
        or len(heads) > 1
        or ("tokens" in names and tokens != facts["chunk_tokens"])
        or (scales and len(scales) != len(layers))
    ):
        raise CannotRecut(
            RecutReason.FACTS, "facts", "the sizes of axes, blocks and sections contradict each other"
        )
    if any(name.startswith("axis") for name in names):
        raise CannotRecut(RecutReason.ARRANGEMENT, "axes", "the facts do not say what these axes mean")
    sections: dict[tuple[int, int], int] = {}
    seen: dict[int, int] = {}
    for section, layer in enumerate(layers):
        number = seen[layer] = seen.get(layer, -1) + 1
        sections[layer, number] = section
    return _Record(
        axes=axes,
        element_bytes=element_bytes,
        section_bytes=section_bytes,
        sections=sections,
        kv_heads=part.slice.kv_heads,
        heads=heads[0] if heads else 1,
        scales=scales,
    )


def _check_axes(source: _Record, target: _Record) -> None:
    """Check that the axes that are never cut are equal in both records. Raises CannotRecut.

    Axes of unknown meaning must also have the same order.
    """
    for names in (FREE_AXES[2:], None):
        shown = []
        for record in (source, target):
            axes = [(axis.name, axis.size) for axis in record.axes]
            chosen = [a for a in axes if (a[0] in names if names is not None else a[0] not in FREE_AXES)]
            shown.append(sorted(chosen) if names is not None else chosen)
        if shown[0] != shown[1]:
            raise CannotRecut(
                RecutReason.ARRANGEMENT,
                "axes",
                f"{dict(shown[0])} stored, {dict(shown[1])} wanted; these axes cannot be cut",
            )
    if ("tokens" in dict(_sizes(source))) != ("tokens" in dict(_sizes(target))):
        raise CannotRecut(RecutReason.ARRANGEMENT, "axes", "tokens can be told apart on one side only")
    if source.kv_heads != target.kv_heads and not (source.cuts_heads and target.cuts_heads):
        raise CannotRecut(
            RecutReason.ARRANGEMENT,
            "kv_heads",
            "heads cannot be told apart in blocks of this attention backend",
        )


def _sizes(record: _Record) -> Iterator[tuple[str, int]]:
    return ((axis.name, axis.size) for axis in record.axes)


def _section_copies(
    there: Sequence[_Record], wanted: _Record, key: tuple[int, int], section: int
) -> Iterator[StridedCopy]:
    """The copies for one section of the target: from each source a range of heads. Raises CannotRecut."""
    have = [(number, record) for number, record in enumerate(there) if key in record.sections]
    if not have:
        raise CannotRecut(RecutReason.MISSING, "layers", f"no source has layer {key[0]}")
    head, end = wanted.kv_heads
    while head < end:
        covering = [(record.kv_heads[1], -number) for number, record in have if record.kv_heads[0] <= head]
        upto, chosen = max(covering, default=(head, 0))
        if upto <= head:
            raise CannotRecut(
                RecutReason.MISSING, "kv_heads", f"no source has KV head {head} of layer {key[0]}"
            )
        record = there[-chosen]
        heads = (head, min(upto, end))
        _check_scales(record, wanted, key, section)
        yield from _range_copies(-chosen, record, wanted, key, section, heads)
        head = heads[1]


def _check_scales(source: _Record, target: _Record, key: tuple[int, int], section: int) -> None:
    stored = source.scales[source.sections[key]] if source.scales else []
    wanted = target.scales[section] if target.scales else []
    if stored != wanted or (len(stored) > 2 and source.kv_heads != target.kv_heads):
        raise CannotRecut(
            RecutReason.SCALES,
            "scales",
            f"layer {key[0]} was quantised with other scales, or with one per head",
        )


def _range_copies(
    number: int, source: _Record, target: _Record, key: tuple[int, int], section: int, heads: tuple[int, int]
) -> Iterator[StridedCopy]:
    """The copies of one range of heads from one section of a source; more than one copy if blocks do not nest."""
    at = [source.sections[key] * source.section_bytes, section * target.section_bytes]
    loops: list[tuple[int, int, int]] = []
    for name in dict.fromkeys(axis.name for axis in source.axes + target.axes if axis.name != "tokens"):
        pairs = [[axis for axis in record.axes if axis.name == name] for record in (source, target)]
        if name == "kv_heads":
            # The facts leave out an axis of one head; its stride is then never used.
            strides = [axes[0].stride if axes else 0 for axes in pairs]
            count = max(record.heads for record in (source, target))
            if source.cuts_heads and target.cuts_heads:
                count = heads[1] - heads[0]
                for side, record in enumerate((source, target)):
                    at[side] += (heads[0] - record.kv_heads[0]) * strides[side]
            loops.append((count, strides[0], strides[1]))
        else:
            loops += [(a.size, a.stride, b.stride) for a, b in zip(*pairs, strict=True)]
    element_bytes = source.element_bytes
    for token_offsets, token_loops in _token_loops(source, target):
        begin = (at[0] + token_offsets[0], at[1] + token_offsets[1])
        yield _dense(StridedCopy(number, *begin, (*loops, *token_loops), element_bytes))


def _token_loops(
    source: _Record, target: _Record
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int, int]]]]:
    """For each run of tokens, its first token's offsets on both sides and the loops over the run's tokens.

    The runs cover the whole chunk.
    """
    # For each side: the number of tokens that one step along a token axis advances → that axis.
    steps: list[dict[int, _Axis]] = []
    for record in (source, target):
        by_step, step = {}, 1
        for axis in reversed(record.axes):
            if axis.name == "tokens":
                by_step[step] = axis
                step *= axis.size
        steps.append(by_step)
    total = step

    def stride(side: int, step: int) -> int:
        """Bytes from a token to the one `step` tokens later; a multiple of the largest axis step that is ≤ `step`."""
        below = max((s for s in steps[side] if s <= step), default=1)
        return steps[side][below].stride * (step // below) if steps[side] else 0

    def offset(side: int, token: int) -> int:
        return sum(token // s % axis.size * axis.stride for s, axis in steps[side].items())

    cuts = sorted({1, total, *steps[0], *steps[1]})
    if all(b % a == 0 for a, b in itertools.pairwise(cuts)):
        yield (0, 0), [(b // a, stride(0, a), stride(1, a)) for a, b in itertools.pairwise(cuts)]
        return
    # Blocks do not nest: copy piece by piece the tokens that are contiguous on both sides.
    together = math.gcd(*(cut for cut in cuts if cut > 1))
    for token in range(0, total, together):
        yield (offset(0, token), offset(1, token)), [(together, stride(0, 1), stride(1, 1))]


def _dense(copy: StridedCopy) -> StridedCopy:
    """The same copy with the longest possible runs, and loops in the order of the target's memory."""
    run = copy.run_bytes
    loops: list[tuple[int, int, int]] = []
    for count, from_stride, to_stride in sorted(copy.loops, key=lambda loop: loop[2]):
        if count == 1:
            continue
        inner = loops[0] if loops else None
        if inner is None and from_stride == to_stride == run:
            run *= count
        elif inner is not None and (from_stride, to_stride) == (inner[0] * inner[1], inner[0] * inner[2]):
            loops[0] = (inner[0] * count, inner[1], inner[2])
        else:
            loops.insert(0, (count, from_stride, to_stride))
    return copy._replace(loops=tuple(loops), run_bytes=run)


def _join(
    copies: Sequence[StridedCopy], place: Callable[[StridedCopy], tuple[int, ...]]
) -> Iterator[StridedCopy]:
    """Join copies of equal `place` whose offsets advance in equal steps; leave the other copies as they are."""
    alike: dict[tuple[Any, ...], list[StridedCopy]] = {}
    for copy in copies:
        alike.setdefault((copy.source, copy.loops, copy.run_bytes, place(copy)), []).append(copy)
    for group in alike.values():
        first = 0
        while first < len(group):
            end = first + 1
            step = (0, 0)
            while end < len(group):
                next_step = (
                    group[end].source_offset - group[end - 1].source_offset,
                    group[end].target_offset - group[end - 1].target_offset,
                )
                if min(next_step) <= 0 or (end > first + 1 and next_step != step):
                    break
                step = next_step
                end += 1
            made = group[first]._replace(loops=((end - first, *step), *group[first].loops))
            yield _dense(made) if len(made.loops) <= MAX_LOOPS else group[first]
            first = end if len(made.loops) <= MAX_LOOPS else first + 1
