"""The gateway's metrics: values read from its parts at each scrape, and the list of parts with counters of their own.

Labels are names of tenants and engines (settings) and of models (engines); metering.py bounds their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvstrata.gateway.fleet import EngineState
from kvstrata.observability.logging import LogNumbers
from kvstrata.observability.numbers import Numbers, counter, gauge

if TYPE_CHECKING:
    from kvstrata.gateway.parts import Parts

PREFIX = "gateway"


class Glance(Numbers):
    """The gateway's metrics without labels, which its status shows too."""

    in_flight = gauge("Requests under way.", lambda self: self._parts.requests.in_flight)
    other_gateways = gauge(
        "Other gateways heard from.",
        lambda self: len(self._parts.sharing.others) if self._parts.sharing is not None else 0,
    )

    def __init__(self, parts: Parts) -> None:
        self._parts = parts


class PartNumbers(Numbers):
    """The gateway's metrics with labels that are read from its parts."""

    tokens_verified = gauge(
        "1 if an engine and our tokenizer produce the same ids for prompts with this feature, else 0.",
        lambda self: {
            (model, engine, word): good for model, engine, word, good in self._parts.tokens.features()
        },
        "model",
        "engine",
        "feature",
    )
    tokens_degraded = gauge(
        "1 if a model's ids were wrong too often and are no longer used, else 0.",
        lambda self: {model: model in self._parts.tokens.degraded for model in self._parts.tokens.tokenizers},
        "model",
    )
    known_blocks = gauge(
        "Blocks of an engine's own cache known from its KV events.",
        lambda self: self._heard("blocks"),
        "engine",
    )
    kv_event_failures = counter(
        "Restarts of the reader of an engine's KV events after a defect.",
        "engine",
        read=lambda self: self._heard("failures"),
    )
    kv_event_gaps = counter(
        "Times that an engine's KV events were lost for good or were invalid.",
        "engine",
        read=lambda self: self._heard("gaps"),
    )
    shared = counter(
        "Frames `sent` to other gateways, `unsent` (one did not take them), `heard` and `refused`; events `untold` "
        "(too many waited) and `ignored` (their engine is unknown here, or a limit was reached).",
        "what",
        read=lambda self: self._parts.sharing.counts() if self._parts.sharing is not None else {},
    )
    engine_up = gauge(
        "1 while an engine gets requests, else 0.",
        lambda self: {one.name: one.state is EngineState.UP for one in self._parts.fleet},
        "engine",
    )
    engine_in_flight = gauge(
        "Requests under way at an engine.",
        lambda self: {one.name: one.in_flight for engine in self._parts.fleet for one in engine.targets},
        "engine",
    )
    tenant_in_flight = gauge(
        "Requests of a tenant under way.",
        lambda self: {name: one.in_flight for name, one in self._parts.door.uses().items()},
        "tenant",
    )
    tenant_used_tokens = gauge(
        "Tokens of its `tokens_burst` that a tenant has used.",
        lambda self: {name: one.used_tokens for name, one in self._parts.door.uses().items()},
        "tenant",
    )

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def _heard(self, word: str) -> dict[str, int]:
        return {name: row[word] for name, row in self._parts.residency.page().items()}


def sections(parts: Parts, glance: Glance, http: Iterable[Numbers]) -> Iterator[tuple[str, Numbers]]:
    """All parts of a gateway that have metrics, each with its prefix. `http`: those of its HTTP port."""
    counting: tuple[Numbers, ...] = (parts.meters, parts.tokens, parts.admission, parts.legs)
    counting += (parts.controllers, parts.controllers.following)
    yield from ((PREFIX, part) for part in (*counting, glance, PartNumbers(parts)))
    yield from ((f"{PREFIX}_http", part) for part in http)
    yield f"{PREFIX}_log", LogNumbers()
