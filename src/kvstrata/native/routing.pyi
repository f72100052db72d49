"""What a request costs at each engine, by the formula of the routing policy `ttft` (policy/routing/ttft.py).

Fields of engines, copies and paths are read in place, where they are slots; nothing is kept between calls.
"""

from collections.abc import Mapping
from typing import Any

Moment = tuple[int, float, float, float]
"""Tokens of the prompt (at least 1), now, the life of a block (above 0) and the lag of events; all times in seconds."""

class Costs:
    """Costs of engines of one type, with copies and paths of one type each.

    The types are those of policy/routing/model.py, or have fields of the same names in slots; TypeError otherwise, and
    for an object of another type.  ValueError: an engine's rate is not above 0.  `own` has copies by engine's name, and
    `shared` those that any engine with a path has; `cached`, by name, tokens that an engine holds for certain.
    """

    def __init__(self, engine: type, copy: type, path: type) -> None: ...
    def queue_s(self, engine: object, now_s: float) -> float:
        """Seconds until the engine has computed what was sent to it before."""

    def scores(
        self,
        engines: list[Any],
        moment: Moment,
        *,
        cached: Mapping[str, int],
        own: Mapping[str, list[Any]],
        shared: list[Any],
    ) -> list[float]:
        """The cost at each engine, in seconds: the sum of the first four of `estimate`."""

    def estimate(
        self,
        engine: object,
        moment: Moment,
        *,
        cached: Mapping[str, int],
        own: Mapping[str, list[Any]],
        shared: list[Any],
    ) -> tuple[float, float, float, float, Any, int, int]:
        """Seconds of queue, load, computing and preemption, the copy (or None), cached tokens and tokens to load."""

def lowest(costs: list[float], count: int, near_share: float) -> tuple[list[int], list[int], list[int]]:
    """Places of the lowest costs, in ascending order: those of the near-tie, those below the `count`-th lowest cost,
    and those equal to it.

    Costs at most `near_share` of the lowest above it are a near-tie.  With fewer than `count` costs, the highest stands
    for the `count`-th.  Raises ValueError without a cost, for a count of 0 and for a cost that is not a number.
    """

def ranked_first(key: int, hashes: list[int]) -> int:
    """The place of the hash that a key ranks first (rendezvous hashing); both are of 64 bits. ValueError: none."""
