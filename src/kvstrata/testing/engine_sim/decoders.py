"""The requests of an engine that get one token in each step, counted together.

A step costs the same for any number of them: what a step gave is written down once, and a request gets its part of it
when it ends or somebody looks ("settled").  Only blocks that open or fill, and requests that end, are treated one by
one.

1. The decoders are the first of the requests that run, in the same order.
2. Each has answered at least one token, and knows one token more than are computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from kvstrata.native.engine_blocks import EngineBlocks
from kvstrata.testing.engine_sim.requests import SimRequest, Span

MOST_SPANS = 4096
"""So many spans are written down before all requests get their parts."""


class Decoders:
    """Owns which requests decode, and what they have not been given yet."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self.requests: list[SimRequest] = []
        self.context_tokens = 0
        """Tokens that the next step's sequences attend to."""
        self._blocks = blocks
        self._steps = 0
        self._spans: list[Span] = []
        self._joined = 0
        self._ends: list[tuple[int, int, SimRequest]] = []
        """A heap: the step with which a request ends, the number with which it joined."""

    def join(self, request: SimRequest, ahead: int = 0) -> None:
        """A request that runs decodes from now on; it has blocks for `ahead` tokens more than are computed."""
        self._joined += 1
        request.joined = self._joined
        request.settled_steps = self._steps
        request.settled_spans = len(self._spans)
        self.requests.append(request)
        self._blocks.join(request.sequence, request.computed + ahead)
        self.context_tokens += request.known_tokens
        left = request.answer_tokens - request.produced
        heapq.heappush(self._ends, (self._steps + left, self._joined, request))

    def leave(self, request: SimRequest) -> None:
        """A request decodes no longer; it has what it was to be given."""
        self.settle(request)
        number = self.requests.index(request)
        del self.requests[number]
        self._blocks.leave(number)
        self.context_tokens -= request.known_tokens
        request.joined = 0
        if not self.requests:
            self._ends.clear()
            self._spans.clear()

    def steps_left(self) -> int:
        """Steps until one of them ends, that step included. REQUIRES: there is one."""
        while self._ends[0][2].joined != self._ends[0][1]:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._steps

    def count(self, span: Span) -> None:
        """All of them got the tokens of a span. REQUIRES: none had fewer left."""
        self._spans.append(span)
        self._steps += span.tokens
        self.context_tokens += span.tokens * len(self.requests)
        if len(self._spans) >= MOST_SPANS:
            self.settle_all()
            self._spans.clear()
            for request in self.requests:
                request.settled_spans = 0

    def take_ended(self) -> list[SimRequest]:
        """The requests that have their last token, in their order; they have left."""
        ended = []
        while self.requests and self.steps_left() == 0:
            request = self._ends[0][2]
            self.leave(request)
            ended.append(request)
        return ended

    def copy(self, blocks: EngineBlocks, own: Mapping[str, SimRequest], ahead: int) -> Decoders:
        """The same for a copy of the blocks and for copies of the settled requests, by name.

        `ahead`: tokens for which each has been given blocks in a step that is not counted yet.
        """
        made = Decoders(blocks)
        for request in self.requests:
            made.join(own[request.name], ahead)
        return made

    def settle(self, request: SimRequest) -> bool:
        """Give a request its part; returns whether it was any."""
        tokens = self._steps - request.settled_steps
        if not tokens:
            return False
        request.spans += self._spans[request.settled_spans :]
        request.produced += tokens
        request.computed += tokens
        request.settled_steps = self._steps
        request.settled_spans = len(self._spans)
        return True

    def settle_all(self) -> list[SimRequest]:
        """Give all requests their parts; returns those that got any."""
        return [request for request in self.requests if self.settle(request)]
