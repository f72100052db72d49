"""What a gateway has measured of engines and of what came to them, for the plan of the controllers."""

from __future__ import annotations

import asyncio
import itertools
from typing import NamedTuple

from kvstrata.config.gateway_model import Contract, SloSettings
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.metering import Meters
from kvstrata.rpc.cluster_wire import MAX_RATED, MAX_SHAPES, RatedEngine, ShapeCount

MAX_GROUP_CHARS = 200
STEP = 32


class Measured(NamedTuple):
    """The part of a heartbeat."""

    splits: bool
    rated: list[RatedEngine]
    shapes: list[ShapeCount]


async def measured(fleet: Fleet, meters: Meters, contract: Contract) -> Measured:
    """Engines with one rank whose speed is known, and all answered requests that they had.

    Others have their turn after each STEP of them: all take milliseconds.
    """
    engines = [one for one in fleet.engines.values() if not one.ranks and one.models]
    apart = contract == "kvstrata" and not fleet.peers
    groups, rated = {}, []
    knows = any(map(fleet.measured, engines))
    for at, one in enumerate(engines):
        if not at % STEP:
            await asyncio.sleep(0)
        groups[one.name] = _group(one, apart=apart)
        if knows and at < MAX_RATED:
            line, rate = fleet.decode_rates.line(one.name), fleet.rates.rate(one.name, 0.0)
            if line.alone_s + line.each_s > 0:
                role, url = one.place.role, one.place.url
                rated.append(RatedEngine(url, groups[one.name], role, rate, line.alone_s, line.each_s))
    sums: dict[tuple[str, int, float, float], list[int]] = {}
    for at, (shape, total) in enumerate(list(meters.shapes.items())):
        if not at % STEP:
            await asyncio.sleep(0)
        if (group := groups.get(shape.engine)) is not None:
            slo = meters.slo.get(shape.slo) or SloSettings(name="none")
            row = sums.setdefault((group, shape.size, slo.ttft_ms, slo.tpot_ms), [0, 0, 0, 0])
            for at, count in enumerate((total.requests, total.met, total.prompt_tokens, total.answer_tokens)):
                row[at] += count
    counts = [ShapeCount(*key, *row) for key, row in itertools.islice(sums.items(), MAX_SHAPES)]
    return Measured(bool(contract), rated, counts)


def _group(engine: ServingEngine, *, apart: bool) -> str:
    """Engines that serve the same, and can compute for each other: `apart`, only those of one instance can."""
    name, entry = next(iter(engine.models.items()))
    model = str(entry.get("parent") or entry.get("root") or name)
    place = engine.load.instance if apart else ""
    return "".join(c if c.isprintable() else "?" for c in f"{model} {place}".strip())[:MAX_GROUP_CHARS]
