"""What a gateway that joins is told of the time before: the pieces that engines have, and who made stored responses.

    a gateway is heard for the first time ─▶ of those that knew each other before, the one with the first name tells

All gateways hear it, and pass over what they know.  It is told in slices with pauses between them, so that neither loop
has to do much at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvstrata.gateway.fleet import Fleet
from kvstrata.gateway.prefixes import Prefixes
from kvstrata.gateway.sharing.messages import AnyEvent, Held, Made
from kvstrata.gateway.stored_responses import StoredResponses

MOST_PIECES = 1 << 15
MOST_RESPONSES = 1 << 12
"""The newest are told."""
SLICE = 256
"""Pieces or responses at a time."""
PAUSE_S = 0.02
T = TypeVar("T")


def tells(own: str, others: Sequence[str], joined: str) -> bool:
    """Whether it is for this gateway to tell; `others`: the names of all that it hears."""
    return all(own < name for name in others if name != joined)


def slices(
    prefixes: Prefixes, fleet: Fleet, responses: StoredResponses, now_s: float
) -> Iterator[list[AnyEvent]]:
    """What is known, in slices, the oldest first. What is learned meanwhile is told anyway."""
    generations = {target.name: target.generation for engine in fleet for target in engine.targets}
    for keys in _sliced(prefixes.newest(MOST_PIECES)):
        held: dict[str, list[bytes]] = {}
        oldest_s: dict[str, float] = {}
        for key in keys:
            for name, at_s in prefixes.computed_by(key, generations):
                held.setdefault(name, []).append(key)
                oldest_s[name] = min(at_s, oldest_s.get(name, at_s))
        if held:
            yield [
                Held(name, b"".join(keys), max(0.0, now_s - oldest_s[name])) for name, keys in held.items()
            ]
    for made in _sliced(responses.newest(MOST_RESPONSES)):
        yield [Made(response, engine) for response, engine in made]


def _sliced(all_of: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(all_of), SLICE):
        yield all_of[at : at + SLICE]
