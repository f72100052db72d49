"""The simulated engine with a connector: whom it waits for, which blocks are found, and which are given back when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.testing.engine_sim.connected import IDLE_PS, ConnectedEngine, News
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.requests import SimRequest

BLOCK = 4


class Scripted:
    """A connector that loads `external` tokens of each request; `right` of them are there after the load."""

    def __init__(self, external: int = 0, right: int | None = None) -> None:
        self.external, self.right = external, external if right is None else right
        self.loading: dict[str, tuple[SimRequest, int]] = {}
        self.ended: set[str] = set()
        """Loads that end with the next step."""
        self.keeps = False
        self.kept: set[str] = set()
        self.sent: set[str] = set()
        self.awaits_news = False

    def arrived(self, request: SimRequest) -> None:
        """Nothing is noted."""

    def matched(self, request: SimRequest, computed: int) -> int | None:
        return max(0, min(self.external, request.known_tokens - 1) - computed)

    def allocated(self, request: SimRequest, computed: int, external: int) -> None:
        assert len(request.sequence.blocks) * BLOCK >= computed + external
        if external:
            self.loading[request.name] = request, computed

    def begin_step(self, work: Sequence[tuple[SimRequest, int]], preempted: set[str]) -> None:
        assert not {request.name for request, _ in work} & self.loading.keys()

    def end_step(self, work: Sequence[tuple[SimRequest, int]]) -> None:
        """Nothing is stored."""

    def finished(self, request: SimRequest) -> bool:
        if self.keeps and request.name not in self.loading:
            self.kept.add(request.name)
            return True
        return False

    def take_news(self) -> News:
        received = {name: max(self.loading.pop(name)[1], self.right) for name in self.ended}
        sent, self.sent, self.ended = self.sent, set(), set()
        self.kept -= sent
        return News(sent, received)

    def cleared(self) -> None:
        """Nothing is noted."""

    def close(self) -> None:
        """Nothing is open."""


def engine(connector: Scripted, **more: Any) -> ConnectedEngine:
    return ConnectedEngine(
        EngineModel(**{"block_tokens": BLOCK, "kv_blocks": 64, "max_model_tokens": 128, **more}), connector
    )


def request(name: str, tokens: int = 40, answer: int = 3, first: int = 0) -> SimRequest:
    return SimRequest(name, list(range(first, first + tokens)), answer=[7] * answer)


class Clock:
    """Advances an engine by steps that compute nothing, which take the shortest time."""

    def __init__(self, sim: ConnectedEngine) -> None:
        self.sim, self.now_ps = sim, 0

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_ps += IDLE_PS
            next_ps = self.sim.next_ps()
            self.now_ps = max(self.now_ps, next_ps + 1 if next_ps is not None else 0)
            self.sim.advance(self.now_ps)
            self.sim.validate()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "step", "step", "loads", "sent", "abort"]), st.integers(0, 60)
    ),
    max_size=60,
)


@given(CALLS, st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_no_block_and_no_request_is_lost(calls, external, right, keeps):
    connector = Scripted(external, min(right, external))
    connector.keeps = keeps
    sim = engine(connector, kv_blocks=24, max_model_tokens=48, max_num_seqs=4, max_num_batched_tokens=32)
    clock = Clock(sim)
    sent: list[SimRequest] = []
    for call, number in calls:
        if call == "submit":
            sent.append(
                request(str(len(sent)), tokens=1 + number % 40, answer=1 + number % 7, first=number % 2)
            )
            sim.submit(sent[-1], clock.now_ps)
        elif call == "step":
            clock.steps(1 + number % 3)
        elif call == "loads":
            connector.ended |= set(list(connector.loading)[: number % 3])
        elif call == "sent":
            connector.sent |= set(list(connector.kept)[: number % 3])
        elif sent:
            sim.abort(sent[number % len(sent)].name, clock.now_ps)
        sim.validate()
    for _ in range(2000):
        if sim.next_ps() is None:
            break
        connector.ended |= connector.loading.keys()
        connector.sent |= connector.kept
        clock.steps()
    assert all(each.end is not None for each in sent)
    assert sim.used_share == 0
    assert clock.now_ps < PS_PER_S << 20
