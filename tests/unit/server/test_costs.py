"""What the policy of L1 is told of the costs of engines' chunks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.rpc import wire
from kvstrata.server.housekeeping import Housekeeping
from kvstrata.types import RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, said
from tests.harness.rpc_client import layout

SESSION = b"s" * 16


def test_a_chunk_costs_by_byte_what_its_engine_measured_and_is_told_when_that_changes(
    server: InstanceInProcess,
) -> None:
    def group(model: str, tokens_s: float, limits: list[int], *, complete: bool = True) -> Any:
        return SimpleNamespace(
            layout=layout(model), prompt_tokens_s=tokens_s, record_limits=limits, complete=complete
        )

    groups = [group("small", 4_000, [1 << 20]), group("large", 500, [1 << 20, 1 << 20])]
    told: list[tuple[int, float]] = []
    parts = copy.copy(server.parts)
    number = parts.processes.model_number
    vars(parts).update(
        processes=SimpleNamespace(groups=groups, model_number=number),
        pool=SimpleNamespace(set_cost=lambda *cost: told.append(cost)),
    )
    housekeeping = Housekeeping(parts)
    for _ in range(2):
        housekeeping._tell_costs()
    small, large = number(layout("small")), number(layout("large"))
    assert dict(told) == {small: pytest.approx(0.4, rel=0.05), large: pytest.approx(1.6, rel=0.05)}
    assert len(told) == 2, "once"
    groups[1].prompt_tokens_s = 510.0  # no news
    groups += [group("unmeasured", 0.0, [1 << 20]), group("incomplete", 9.0, [1 << 20], complete=False)]
    housekeeping._tell_costs()
    assert len(told) == 2
    groups[1].prompt_tokens_s = 2_000.0
    housekeeping._tell_costs()
    assert dict(told) == {small: pytest.approx(1.0), large: pytest.approx(1.0)}


def test_layouts_have_numbers_of_their_own_as_far_as_these_go_and_their_identities_are_told(
    server: InstanceInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, pool = server.parts.processes, server.pool
    told = {}

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return told.__setitem__ if name == "set_model" else getattr(pool, name)

    monkeypatch.setattr(processes, "_pool", Recording())
    [reply] = server.feed(said(SESSION, wire.Identify(1, RequestIdentity(salt="new"))))
    assert isinstance(reply, wire.IdentifyReply)
    first = layout()  # that of the attached process
    numbers = [processes.model_number(layout(name)) for name in (first.model, "a", "b", "c", "a")]
    assert told == {reply.root: numbers[0]}
    assert sorted(numbers[:3]) == [1, 2, 3] and numbers[3:] == [0, numbers[1]]
