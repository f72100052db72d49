"""The geometries of each model's engines, and which records can be made of which.

The *geometry* of an engine is the set of its slices: it follows from its tensor- and pipeline-parallel sizes, its block
size and the order of axes in its blocks.  Engines with one LayoutIdentity have the same KV, whatever their geometries,
so a chunk that one of them stored can be recut for another one (keys/recut.py).

A geometry is known from when all processes of one of its engines have been attached at a time until the server ends:
the records stay in L1 and L2 when the engine ends.  Another server knows it when such an engine attaches to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.keys.recut import CannotRecut, Part, Recut, plan_recut
from kvstrata.types import LayoutIdentity, Slice

MAX_LAYOUTS = 64
"""Most layout identities of which geometries are known; the one whose engine attached longest ago is forgotten."""
MAX_GEOMETRIES = 8
"""Most geometries of one layout identity; of more, the one that was seen first is forgotten."""

MAX_PARTS = 1_024
"""Most slices of one layout identity; of more, the one that was declared longest ago is forgotten."""


class Geometry(NamedTuple):
    """The slices of one engine with their facts, in the order of their digests."""

    slices: bytes
    """The digests of the slices, concatenated."""
    parts: tuple[Part, ...]


class Plan(NamedTuple):
    """How to make a chunk's records of one geometry of those of another."""

    source: Geometry
    recuts: tuple[Recut, ...]
    """For each slice of the target, with the numbers of the source's slices."""
    chunk_tokens: int


def plan(source: Geometry, target: Geometry) -> Plan:
    """Plan to make all records of a chunk. Any thread; takes up to tens of milliseconds. Raises CannotRecut."""
    recuts = tuple(plan_recut(source.parts, part) for part in target.parts)
    return Plan(source, recuts, int(target.parts[0].facts["chunk_tokens"]))


class Geometries:
    """See the module. Belongs to the event loop."""

    def __init__(self) -> None:
        self._layouts: OrderedDict[LayoutIdentity, OrderedDict[bytes, Geometry]] = OrderedDict()
        self._parts: dict[LayoutIdentity, dict[bytes, Part]] = {}
        """The slices that processes have declared, by digest; of each layout identity that is known."""
        self._plans: dict[tuple[LayoutIdentity, bytes], dict[bytes, Plan | CannotRecut]] = {}
        """(Layout identity, target's slices) → source's slices → plan, or why there is none."""

    def declared(self, layout: LayoutIdentity, part: Slice, facts: Mapping[str, Any]) -> None:
        """Remember a slice of a process."""
        if layout not in self._layouts:
            self._layouts[layout] = OrderedDict()
            self._parts[layout] = {}
        self._layouts.move_to_end(layout)
        parts = self._parts[layout]
        parts.pop(part.digest(), None)
        parts[part.digest()] = Part(part, facts)
        if len(parts) > MAX_PARTS:
            del parts[next(iter(parts))]
        if len(self._layouts) > MAX_LAYOUTS:
            self._forget(next(iter(self._layouts)))

    def complete(self, layout: LayoutIdentity, slices: Sequence[bytes]) -> list[tuple[Geometry, Geometry]]:
        """Note the sorted digests of all slices of an engine; (source, target) of each plan that is to be made now."""
        known, parts, packed = self._layouts.get(layout), self._parts.get(layout, {}), b"".join(slices)
        if known is None or packed in known or not all(digest in parts for digest in slices):
            return []
        geometry = Geometry(packed, tuple(parts[digest] for digest in slices))
        others = list(known.values())
        known[packed] = geometry
        if len(known) > MAX_GEOMETRIES:
            others = others[1:]
            self._forget_geometry(layout, next(iter(known)))
        return [pair for other in others for pair in ((other, geometry), (geometry, other))]

    def planned(
        self, layout: LayoutIdentity, source: Geometry, target: Geometry, made: Plan | CannotRecut
    ) -> None:
        """Take up a plan, or the reason why there is none."""
        known = self._layouts.get(layout) or OrderedDict[bytes, Geometry]()
        if source.slices in known and target.slices in known:
            self._plans.setdefault((layout, target.slices), {})[source.slices] = made

    def plans(self, layout: LayoutIdentity, slices: bytes) -> list[Plan]:
        """The plans for an engine with these slices (sorted digests, concatenated)."""
        if not self._plans:
            return []
        of = self._plans.get((layout, slices), {})
        return [made for made in of.values() if isinstance(made, Plan)]

    def count(self) -> int:
        """Number of geometries that are known."""
        return sum(len(known) for known in self._layouts.values())

    def count_plans(self, kind: type[Plan | CannotRecut]) -> int:
        """Number of pairs of geometries with a plan, or without one."""
        return sum(isinstance(one, kind) for of in self._plans.values() for one in of.values())

    def _forget(self, layout: LayoutIdentity) -> None:
        for slices in list(self._layouts[layout]):
            self._forget_geometry(layout, slices)
        del self._layouts[layout], self._parts[layout]

    def _forget_geometry(self, layout: LayoutIdentity, slices: bytes) -> None:
        del self._layouts[layout][slices]
        self._plans.pop((layout, slices), None)
        for (other, _), of in self._plans.items():
            if other == layout:
                of.pop(slices, None)
