"""What one engine has in each tier: its own cache, and its server's L1 and L2, as far as its events tell.

vLLM's own events are of the medium GPU.  Our connector tells the chunks that the engine stored in L1 (medium CPU), and
those that have left it.  Other connectors tell of slower media, which count as L2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstrata.gateway.residency.batches import AllBlocksCleared, Batch
from kvstrata.gateway.residency.blocks import KEY, TAG, Blocks
from kvstrata.gateway.residency.prompt import MAX_ASKED, Prompt
from kvstrata.native.registry import Registry
from kvstrata.policy.routing.model import Tier

TIERS: Final[tuple[Tier, ...]] = ("l0", "l1", "l2")
OF_MEDIUM: dict[str | None, Tier] = {None: "l0", "GPU": "l0", "CPU": "l1"}


class Caches:
    """See the module. Belongs to the thread of the watcher; others read what `Blocks` lets them read."""

    def __init__(self, registry: Registry, first_group: int, now_s: Callable[[], float]) -> None:
        """The tiers have the registry's groups from `first_group` on."""
        self.of: dict[Tier, Blocks] = {
            tier: Blocks(registry, first_group + number, now_s) for number, tier in enumerate(TIERS)
        }
        self._now_s = now_s
        self.emptied_s = float("-inf")
        """When the engine told for the last time that its own cache was emptied, or when its restart was noticed."""
        self.missed_s = float("-inf")
        """When it was noticed for the last time that events were lost for good."""

    @property
    def own(self) -> Blocks:
        """The engine's own cache."""
        return self.of["l0"]

    def apply(self, batch: Batch) -> None:
        """Take in a batch. Raises ValueError for one that contradicts itself; what came before stays applied."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.own.forget()
                self.emptied_s = self._now_s()
            else:
                self.of[OF_MEDIUM.get(event.medium, "l2")].apply(event)

    def computed(self, prompt: Prompt, at_s: float) -> None:
        """A request with this prompt had its first token: its last block's event is to come."""
        if self.own.sizes and (keys := prompt.keys(self.own.sizes[0])):
            self.own.expect(keys[-KEY : -KEY + TAG], at_s)

    def reported(self, prompt: Prompt, expected: int, cached: int) -> None:
        """The engine tells how many tokens of a prompt were `cached`, of which `expected` were taken for that."""
        if not self.own.sizes:
            return
        size = self.own.sizes[0]
        keys = prompt.keys(size)
        had, thought = cached // size * KEY, expected // size * KEY
        # Of long prompts not every block was asked for, and an engine computes the last block again if it has all.
        slack = (len(keys) // KEY // MAX_ASKED + 1) * KEY
        if had > thought + slack:
            self.own.told(keys[:had])
        elif thought > had + slack:
            self.own.denied(keys[had:thought])

    def missed(self) -> None:
        """What was told before will not be heard."""
        self.missed_s = self._now_s()

    def doubt(self) -> None:
        """Events were lost."""
        self.missed()
        for blocks in self.of.values():
            blocks.doubt()

    def restarted(self) -> None:
        """The engine has another life: its own cache is empty, and what its server holds goes on unheard."""
        self.own.forget()
        self.emptied_s = self._now_s()
        for blocks in self.of.values():
            blocks.doubt()

    def forget(self) -> None:
        """The engine is gone."""
        for blocks in self.of.values():
            blocks.forget()
