"""Which engine has made which stored response: `/v1/responses` continues one at the engine that has it.

Names of responses are drawn by engines; they say nothing of what is in them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

MAX_RESPONSES = 1 << 16
"""The oldest are forgotten first."""


class StoredResponses:
    """See the module. Belongs to the event loop."""

    def __init__(self) -> None:
        self._engines: collections.OrderedDict[str, str] = collections.OrderedDict()
        """By response, the oldest first."""
        self.made: Callable[[str, str], None] = lambda response, engine: None
        """Called with each that this gateway passes on."""

    def __len__(self) -> int:
        """Responses that are remembered."""
        return len(self._engines)

    def engine_of(self, response: str) -> str:
        """The name of the engine that has made a response; empty: it is not known."""
        return self._engines.get(response, "")

    def note(self, response: str, engine: str, *, ours: bool = True) -> None:
        """An engine has made a response. `ours`: this gateway has passed it on."""
        self._engines[response] = engine
        self._engines.move_to_end(response)
        if len(self._engines) > MAX_RESPONSES:
            self._engines.popitem(last=False)
        if ours:
            self.made(response, engine)

    def newest(self, most: int) -> list[tuple[str, str]]:
        """The last responses with their engines, the oldest of them first."""
        found = list(itertools.islice(reversed(self._engines.items()), most))
        found.reverse()
        return found
