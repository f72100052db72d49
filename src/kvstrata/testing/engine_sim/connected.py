"""A simulated engine with a KV connector: requests wait for KV that is loaded from elsewhere, and KV is stored there.

It calls the connector as vLLM 0.32 does with its default, asynchronous scheduling, in which loads never delay a step:

1. A waiting request is admitted once the connector has said how many tokens beyond the engine's own can be loaded.  If
   the number is above 0, the request gets blocks for its whole prompt, which no other request can find, and is admitted
   after the load.
2. Other requests find the loaded blocks only after the load has ended, and only those that it loaded successfully.
3. Blocks of a request that has ended stay allocated while the connector reads or writes them.
4. Without tokens to compute, steps of IDLE_PS follow each other while the connector has outcomes to report.

A step takes its computed time and the time that the connector's calls at its beginning took in this process: so this
engine lives in real time only, and the core's other promises about time do not hold.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstrata.errors import ConfigError
from kvstrata.testing.engine_sim.engine import SimEngine, Step
from kvstrata.testing.engine_sim.engine_model import PS_PER_NS, PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.kv_events import Event
from kvstrata.testing.engine_sim.requests import End, SimRequest

IDLE_PS = PS_PER_S // 1000
"""vLLM sleeps so long after a step that computes nothing."""
LATEST_PS = PS_PER_S << 32
"""No clock shows a time after this one."""


class News(NamedTuple):
    """What a connector tells at the end of a step."""

    sent: set[str]
    """Requests that have ended and whose blocks it needs no longer."""
    received: Mapping[str, int]
    """Requests whose load has ended, each with the tokens of its prompt that are there now."""
    events: Sequence[Event] = ()


class Connector(Protocol):
    """The calls, in the order in which they come. None waits for long."""

    def arrived(self, request: SimRequest) -> None:
        """A request arrived."""

    def matched(self, request: SimRequest, computed: int) -> int | None:
        """How many tokens beyond the first `computed` can be loaded; None: ask again in the next step."""

    def allocated(self, request: SimRequest, computed: int, external: int) -> None:
        """The request has blocks for its prompt; `external` tokens are to be loaded behind the first `computed`."""

    def begin_step(self, work: Sequence[tuple[SimRequest, int]], preempted: set[str]) -> None:
        """A step begins: begin its loads. It computes so many tokens of each request, and may overwrite the blocks of
        those that were preempted."""

    def end_step(self, work: Sequence[tuple[SimRequest, int]]) -> None:
        """The step has computed these tokens, which the requests do not count yet: begin its stores."""

    def finished(self, request: SimRequest) -> bool:
        """A request has ended; returns whether its blocks must be kept until it is told as sent."""

    def take_news(self) -> News:
        """The last call of a step."""

    @property
    def awaits_news(self) -> bool:
        """Whether steps should go on without requests."""

    def cleared(self) -> None:
        """The engine has forgotten all its blocks."""

    def close(self) -> None:
        """Leave. Idempotent."""


class ConnectedEngine(SimEngine):
    """Owns its connector. See the module."""

    def __init__(self, model: EngineModel, connector: Connector) -> None:
        super().__init__(model)
        self._connector = connector
        self._loading: dict[str, SimRequest] = {}
        """Requests with blocks into which KV is loaded, also those that have ended meanwhile."""
        self._kept: dict[str, SimRequest] = {}
        """Requests that have ended and whose blocks the connector reads."""
        self._external: dict[str, int] = {}
        """Of requests that were not scheduled yet, how many tokens were loaded."""
        self._preempted: set[str] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting) + sum(each.end is None for each in self._loading.values())

    def check(self, request: SimRequest) -> None:
        super().check(request)
        assert request.name not in self._loading, "names of requests are not used again"
        assert request.name not in self._kept, "names of requests are not used again"

    def submit(self, request: SimRequest, at_ps: int) -> None:
        super().submit(request, at_ps)
        self._connector.arrived(request)

    def abort(self, name: str, at_ps: int) -> bool:
        self.advance(at_ps)
        request = self._loading.get(name)
        if request is None or request.end is not None:
            return super().abort(name, at_ps)
        self._finish(request, End.ABORT, at_ps)
        return True

    def clear_cache(self, at_ps: int) -> bool:
        cleared = super().clear_cache(at_ps)
        if cleared:
            self._connector.cleared()
        return cleared

    def advance(self, until_ps: int) -> None:
        if until_ps > LATEST_PS:
            raise _not_virtual()
        super().advance(until_ps)

    def close(self) -> None:
        self._connector.close()

    def validate(self) -> None:
        holders = (*self._running, *self._waiting, *self._loading.values(), *self._kept.values())
        self._blocks.validate(block for request in holders for block in request.sequence.blocks)
        assert len(self._running) <= self.model.max_num_seqs
        assert len(self._requests) == len(self._running) + self.waiting

    def _has_work(self) -> bool:
        return bool(super()._has_work() or self._loading or self._kept or self._connector.awaits_news)

    def _begin(self) -> None:
        begun_ns = time.perf_counter_ns()
        work: list[tuple[SimRequest, int]] = []
        left, preempted = self._serve_running(work)
        if not preempted and self._waiting:
            self._admit(work, left)
        lost, self._preempted = self._preempted, set()
        self._connector.begin_step(work, lost)
        self.totals.steps += bool(work)
        took = self._costs.step + self._duration(work) if work else IDLE_PS
        spent = (time.perf_counter_ns() - begun_ns) * PS_PER_NS
        self._step = Step(self._free_ps, self._free_ps + spent + took, work)

    def _admit(self, work: list[tuple[SimRequest, int]], left: int) -> None:
        for request in list(self._waiting):
            if not left or len(self._running) >= self.model.max_num_seqs:
                return
            if not request.sequence.blocks:
                external = self._find(request)
                if external is None:
                    continue
                if external < 0:
                    return
                if external:
                    self._waiting.remove(request)
                    self._loading[request.name] = request
                    continue
            self._waiting.remove(request)
            self._count_lookup(request)
            tokens = min(request.known_tokens - request.computed, left)
            self._running.append(request)
            grown = self._grow(request, tokens)
            assert grown, "a request that waits with blocks has them for its whole prompt"
            work.append((request, tokens))
            left -= tokens

    def _find(self, request: SimRequest) -> int | None:
        """Give a waiting request blocks, and have loaded what can be; returns how many tokens.

        None: not known yet.  -1: too few blocks are free.  Nothing has changed then.
        """
        own = len(self._blocks.find(request.sequence, request.known_tokens)) * self.model.block_tokens
        external = self._connector.matched(request, own)
        if external is None:
            return None
        if not self._blocks.admit(request.sequence, request.known_tokens):
            return -1
        request.computed = own
        if external:
            removed = self._blocks.reserve(request.sequence, request.known_tokens)
            assert removed is not None, "whoever is admitted has room for its known tokens"
            self._tell_removed(removed)
        self._connector.allocated(request, own, external)
        return external

    def _count_lookup(self, request: SimRequest) -> None:
        loaded = self._external.pop(request.name, 0)
        if request.cached_tokens is None:
            self.totals.external_tokens += loaded
            self.totals.external_lookup_tokens += request.known_tokens - request.computed + loaded
            self.totals.cached_tokens -= loaded
        super()._count_lookup(request)

    def _preempt(self) -> SimRequest:
        request = super()._preempt()
        self._preempted.add(request.name)
        return request

    def _complete(self, step: Step) -> None:
        self._connector.end_step(step.work)
        super()._complete(step)
        news = self._connector.take_news()
        for name, tokens in news.received.items():
            self._received(self._loading.pop(name), tokens)
        for name in news.sent:
            self._give_back(self._kept.pop(name))
        if self._events is not None:
            self._events += news.events
        self._close_batch(step.end_ps)

    def _received(self, request: SimRequest, tokens: int) -> None:
        """A load has ended, and so many tokens are there."""
        if request.end is not None:
            self._give_back(request)
            return
        # The last token is computed in any case: the answer's first token is drawn from what it gives.
        there = min(max(tokens, request.computed), request.known_tokens - 1)
        self._external[request.name] = there - request.computed
        request.computed = there
        grown = self._grow(request, 0)
        assert grown, "its blocks were reserved"
        self._waiting.appendleft(request)

    def _finish(self, request: SimRequest, end: End, at_ps: int) -> None:
        if self._connector.finished(request):
            self._kept[request.name] = request
        self._external.pop(request.name, None)
        super()._finish(request, end, at_ps)

    def _give_back(self, request: SimRequest) -> None:
        if request.name not in self._kept and request.name not in self._loading:
            super()._give_back(request)


def _not_virtual() -> ConfigError:
    return ConfigError(
        "kv_transfer_config: a cache server's lookups and copies take real time, so an engine that is attached to one "
        "cannot run in virtual time; serve it with `kvstrata sim` or a LiveEngine, or leave kv_transfer_config out",
        field="kv_transfer_config",
    )
