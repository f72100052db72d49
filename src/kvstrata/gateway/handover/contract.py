"""What a contract between two engines says, and which there are: one module each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from kvstrata.gateway.engine_http import Asker
from kvstrata.gateway.fleet import ServingEngine

Fields = dict[str, Any]
"""Of `kv_transfer_params`."""


class Handover(ABC):
    """One prompt's way from the engine that computes it to the one that answers. Base of all contracts."""

    answers_later: ClassVar[bool] = False
    """Whether the engine that answers gets the request only when the other one has answered."""

    def __init__(self, asker: Asker, prefill: ServingEngine, expected_s: float, source: str) -> None:
        """`expected_s`: until `prefill` has computed; `source`: the other host's instance, if there are two."""
        self.asker, self.prefill, self.expected_s, self.source = asker, prefill, expected_s, source

    @abstractmethod
    def for_prefill(self) -> Fields:
        """What the engine that computes is told."""

    @abstractmethod
    async def for_answer(self, returned: Fields | None) -> Fields:
        """What the engine that answers is told; empty: nothing, and it computes the prompt.

        `returned`: what the other one answered, maybe nothing; None: it failed, or is not awaited.
        """
