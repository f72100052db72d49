"""Which geometries are known, and what can be made of what; the facts come from processes that may say anything."""

from __future__ import annotations

import pytest

from kvstrata.keys.recut import CannotRecut, Part, plan_recut
from kvstrata.server.recuts.recuts import MAX_GEOMETRIES, MAX_LAYOUTS, Geometries, Geometry, Plan, plan
from kvstrata.types import LayoutIdentity, Slice, facts_digest

TOKENS_OUTSIDE, HEADS_OUTSIDE = ("tokens", "kv_heads"), ("kv_heads", "tokens")


def geometry(ranks: int, block_tokens: int, order: tuple[str, str]) -> Geometry:
    """Return the slices of an engine of `ranks` tensor-parallel ranks."""
    parts, heads = [], 8 // ranks
    for rank in range(ranks):
        sizes = {"tokens": block_tokens, "kv_heads": heads}
        section_bytes = 256 * heads * 2 * 128 * 2
        facts = {
            "format": "paged-blocks/2", "dtype": "bfloat16", "stored_dtype": "bfloat16", "quantisation": "NONE",
            "element_bytes": 2, "chunk_tokens": 256, "block_tokens": block_tokens, "scales": [],
            "axes": [*([name, sizes[name]] for name in order), ["kv", 2], ["dim", 128]],
            "section_bytes": section_bytes, "layers": list(range(32)),
        }  # fmt: skip
        own = (rank * heads, (rank + 1) * heads)
        place = Slice(layers=(0, 32), kv_heads=own, layout=facts_digest(facts))
        parts.append(Part(place, facts))
    return Geometry(b"".join(sorted(part.slice.digest() for part in parts)), tuple(parts))


def layout(model: str = "m") -> LayoutIdentity:
    return LayoutIdentity(model=model, kv_dtype="bf16", chunk_tokens=256)


def attached(known: Geometries, engine: Geometry, model: str = "m") -> list[tuple[Geometry, Geometry]]:
    """All workers of an engine attach, in any order; return what is to be planned."""
    for part in reversed(engine.parts):
        known.declared(layout(model), part.slice, part.facts)
    return known.complete(layout(model), sorted(part.slice.digest() for part in engine.parts))


def made(known: Geometries, pairs: list[tuple[Geometry, Geometry]], model: str = "m") -> None:
    for source, target in pairs:
        known.planned(layout(model), source, target, plan(source, target))


def counts(known: Geometries) -> tuple[int, int, int]:
    """Geometries, plans and pairs without a plan."""
    return known.count(), known.count_plans(Plan), known.count_plans(CannotRecut)


ONE, TWO = geometry(1, 16, TOKENS_OUTSIDE), geometry(2, 16, TOKENS_OUTSIDE)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_more_geometries_or_models_than_are_kept_push_out_the_first() -> None:
    known = Geometries()
    for number, size in enumerate(SIZES[: MAX_GEOMETRIES + 1]):
        pairs = attached(known, geometry(1, size, HEADS_OUTSIDE))
        assert len(pairs) == 2 * min(number, MAX_GEOMETRIES - 1)
        made(known, pairs)
    assert known.count_plans(Plan) == MAX_GEOMETRIES * (MAX_GEOMETRIES - 1)
    assert known.plans(layout(), geometry(1, 1, HEADS_OUTSIDE).slices) == []
    for number in range(MAX_LAYOUTS):
        attached(known, ONE, f"model {number}")
    assert counts(known) == (MAX_LAYOUTS, 0, 0)


def test_a_plan_that_comes_after_its_geometry_was_forgotten_is_dropped() -> None:
    known = Geometries()
    attached(known, ONE)
    pairs = attached(known, TWO)
    for number in range(MAX_LAYOUTS):
        attached(known, ONE, f"model {number}")
    made(known, pairs)
    assert known.count_plans(Plan) == 0


@pytest.mark.parametrize(
    "facts",
    [
        {"chunk_tokens": 6 << 40, "block_tokens": 2 << 40, "axes": [["tokens", 2 << 40]]},
        {"layers": [float("1e308")]},
        {"axes": [["tokens", 1e308]]},
        {"rule": ["last_window", 100]},
        {"axes": {}},
    ],
    ids=str,
)
def test_facts_that_make_no_sense_or_too_much_work_are_a_reason(facts: dict[str, object]) -> None:
    source, target = ONE.parts[0], geometry(1, 48, HEADS_OUTSIDE).parts[0]
    spoilt = Part(source.slice, {**source.facts, **facts})
    for pair in ((spoilt, source), (source, spoilt), (spoilt, target)):
        with pytest.raises(CannotRecut):
            plan_recut([pair[0]], pair[1])


def test_a_plan_of_too_many_copies_is_refused_before_they_are_made() -> None:
    tokens = 3 << 30
    sizes = {"chunk_tokens": tokens, "axes": [["tokens", 3]], "block_tokens": 3, "section_bytes": 2 * tokens}
    facts = {**ONE.parts[0].facts, **sizes, "layers": [0]}
    other = {**facts, "axes": [["tokens", 2]], "block_tokens": 2}
    part = ONE.parts[0].slice
    with pytest.raises(CannotRecut, match="more than 65536 copies"):
        plan_recut([Part(part, facts)], Part(part, other))
