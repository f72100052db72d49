"""Rounds of `kvstrata bench` with a server that is silent now and then; tests/integration measures a real server."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from kvstrata.cli.bench.engine import TRIES, _rounds
from kvstrata.errors import Unavailable
from kvstrata.measure.engine import Silent, Timed

STEPS = ("memcpy", "store", "retrieve", "lookups")


class Engine:
    """An engine whose steps end at once; `fails` maps the number of a step of the run to the error that it raises."""

    def __init__(self, fails: dict[int, Exception]) -> None:
        self.fails = fails
        self.steps: list[str] = []
        self.prompts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.step(name, *arguments)

    def step(self, name: str, *arguments: Any) -> Any:
        if name == "store":
            self.prompts += arguments
        if name in STEPS:
            error = self.fails.pop(len(self.steps), None)
            self.steps.append(name)
            if error is not None:
                raise error
            return [1e-4] if name == "lookups" else Timed(1.0, 1)
        self.steps.append(name)
        return None


class Server:
    def __init__(self, team: Engine) -> None:
        self.team = team

    def clear(self, tenant: str) -> int:
        self.team.steps.append("clear")
        return 0


def rounds(team: Engine, count: int = 2, tenant: str = "") -> tuple[dict[str, list[Any]], list[str]]:
    notes: list[str] = []
    options = argparse.Namespace(rounds=count, tenant=tenant)
    return _rounds(options, Server(team), team, "tenant", notes), notes


def test_a_round_with_a_silent_server_is_measured_again_with_other_chunks():
    calm, stalled = Engine({}), Engine({6: Silent("no answer"), 15: Silent("no answer")})
    for team in (calm, stalled):
        taken, notes = rounds(team)
        assert {name: len(values) for name, values in taken.items()} == {
            "memcpy": 2,
            "store": 2,
            "retrieve": 2,
            "lookup": 2,
        }
        assert len(set(team.prompts)) == len(team.prompts)
        assert notes == [] if team is calm else "2 rounds were measured again" in notes[0]
    whole = [*STEPS, "clear"]
    assert calm.steps == whole * 3
    assert stalled.steps == [
        *whole, "memcpy", "store", "reconnect", "clear", *whole[:4], "clear", "memcpy", "store", "reconnect", "clear",
        *whole,
    ]  # fmt: skip


def test_a_server_that_stays_silent_ends_the_run():
    team = Engine({step: Silent("no answer to a lookup") for step in range(100)})
    with pytest.raises(Unavailable, match="no answer to a lookup"):
        rounds(team)
    assert team.steps.count("memcpy") == TRIES
