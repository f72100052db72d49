"""What a gateway knows of prompts by the instances that it follows, and when that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.gateway.controllers import following
from kvstrata.gateway.controllers.following import Following, Holding
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_wire import Change, Run, Served
from kvstrata.rpc.zmq_curve import open_keys
from tests.harness.cluster_instance import tags_of
from tests.harness.waiting import until
from tests.unit.controller.member_messages import register

CHUNKS = tags_of(range(8))


class Instance:
    """Answers a follower with what it holds, by tier, and then with changes."""

    def __init__(self, **held: bytes) -> None:
        self.held = held
        self.runs: list[Run] = []
        self.silent = False
        self.closed = False
        self.condition: wire.Condition | None = None

    async def ask(self, request: Any, answer: Any, timeout_s: float) -> Any:
        if self.silent:
            await asyncio.Event().wait()
        if isinstance(request, wire.List):
            return wire.Listed(1, 1, 0, self.held.get(request.tier, b""))
        await asyncio.sleep(0.001)
        runs = self.runs[request.cursor :] if request.cursor >= 0 else []
        return wire.Changed(1, 1, len(self.runs), runs, self.condition if request.condition else None)

    def close(self) -> None:
        self.closed = True


def served(name: str, tiers: tuple[str, ...] = ("l1", "disk"), incarnation: int = 1, **media: str) -> Served:
    told = register(
        incarnation, name, tiers=list(tiers), media=dict(media), control_endpoint=f"tcp://{name}:1"
    )
    return Served(told, "k" * 40, True)


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def instances() -> dict[str, Instance]:
    return {}


@pytest.fixture
async def made(now: list[float], instances: dict[str, Instance]) -> AsyncIterator[Following]:
    def link(endpoint: str, **_: Any) -> Instance:
        return instances[endpoint.removeprefix("tcp://").removesuffix(":1")]

    made = Following(Supervisor(asyncio.get_running_loop()), lambda: now[0], lambda: None)
    made.links = SimpleNamespace(ask=link)  # type: ignore[assignment]
    yield made
    await made.close()


async def follow(made: Following, *told: Served) -> None:
    made.follow(told, open_keys())
    await until(
        lambda: all(
            one["in_step"] for one in made.page() if one["instance"] in {t.told.instance for t in told}
        )
    )


def rows(holdings: list[Holding]) -> list[tuple[str, int, int]]:
    return sorted((one.of.told.instance, one.chunks.in_l1, one.chunks.anywhere) for one in holdings)


async def test_l1_and_what_l2_adds_are_told_apart_and_only_whole_chunks_count(made, instances):
    instances["a"] = Instance(l1=CHUNKS[: 8 * 3], disk=CHUNKS[8 * 2 : 8 * 6])
    instances["b"] = Instance(disk=CHUNKS[: 8 * 5])
    await follow(made, served("a"), served("b"))
    assert rows(await made.held(CHUNKS, 1)) == [("a", 3, 6), ("b", 0, 5)]
    assert rows(await made.held(CHUNKS, 2)) == [("a", 1, 3), ("b", 0, 2)]
    assert await made.held(tags_of(range(50, 58)), 1) == []
    instances["a"].runs.append(Run(Change.EVICT, "l1", CHUNKS[:8]))
    await until(lambda: made.page()[0]["keys"] == {"l1": 2, "disk": 4})
    assert rows(await made.held(CHUNKS, 1)) == [("b", 0, 5)]


async def test_what_one_does_not_find_in_a_shared_medium_is_lost_for_all(made, instances):
    for name in ("a", "b"):
        instances[name] = Instance(redis=CHUNKS)
    tiers = ("l1", "redis")
    await follow(made, served("a", tiers, redis="w"), served("b", tiers, redis="w"))
    assert [one.chunks.shared for one in await made.held(CHUNKS, 1)] == [8, 8]
    instances["a"].runs.append(Run(Change.EVICT, "redis", CHUNKS[8 * 3 :]))
    await until(lambda: {row["keys"]["redis"] for row in made.page()} == {3})


async def test_an_instance_that_is_silent_counts_no_more_after_a_while(made, instances, now, monkeypatch):
    monkeypatch.setattr(following, "patience", lambda seconds: seconds)
    instances["a"] = Instance(l1=CHUNKS)
    await follow(made, served("a"))
    instances["a"].silent = True
    await asyncio.sleep(0.01)
    now[0] += following.STALE_S - 1
    assert [one.of.told.instance for one in await made.held(CHUNKS, 1)] == ["a"]
    now[0] += 2
    assert await made.held(CHUNKS, 1) == []


async def test_who_is_not_named_any_more_is_followed_while_it_answers(made, instances, now, monkeypatch):
    monkeypatch.setattr(following, "patience", lambda seconds: seconds)
    instances["a"], instances["b"] = Instance(l1=CHUNKS), Instance(l1=CHUNKS)
    await follow(made, served("a"), served("b"))
    made.follow([served("b")], open_keys())
    assert {one.of.told.instance for one in await made.held(CHUNKS, 1)} == {"a", "b"}
    instances["a"].silent = True
    await asyncio.sleep(0.01)
    now[0] += following.STALE_S + 1
    await until(lambda: next(one for one in made.page() if one["instance"] == "b")["heard_ago_s"] == 0)
    made.follow([served("b")], open_keys())
    assert [one["instance"] for one in made.page()] == ["b"] and instances["a"].closed


async def test_another_process_of_an_instance_is_listed_anew(made, instances):
    instances["a"] = Instance(l1=CHUNKS)
    await follow(made, served("a"))
    instances["a"].held = {"l1": CHUNKS[:16]}
    await asyncio.sleep(0.01)
    made.follow([served("a", ("l1",))], open_keys())
    await until(lambda: made.page()[0]["in_step"] and made.page()[0]["keys"] == {"l1": 2})
    made.follow_none()
    assert made.page() == [] and await made.held(CHUNKS, 1) == []
