"""What is remembered of a shared medium: how it saves round trips, and the moments at which it must not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.storage.base import AdapterContext, Capabilities, Found, Presence
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.stack import Surroundings, build_stack
from kvstrata.storage.wrap.presence import PresenceAdapter, PresenceLimits
from kvstrata.testing.strategies import key_of, lent_context, load_item, put_item
from tests.model.storage.test_presence import ABSENT, HandClock, SharedMedium

HERE = Found(Presence.PRESENT, 5000)


class Scene:
    """A shared medium, its memory, and a clock moved by hand."""

    def __init__(self, limits: PresenceLimits | None = None, *, shared: bool = True) -> None:
        self.clock = HandClock()
        self.medium = SharedMedium()
        self.medium.capabilities = Capabilities(persistent=True, shared=shared)
        self.adapter = PresenceAdapter(self.medium, limits, self.clock)

    async def open(self) -> None:
        await self.adapter.open(AdapterContext("unit", self.clock, 0, 0, lambda key: None))

    async def reaches(self, work: Any, *, acts: bool = True) -> asyncio.Task[Any]:
        """Begin an operation and let the medium act on it; it waits for its answer."""
        task = asyncio.create_task(work)
        known = len(self.medium.calls)
        while len(self.medium.calls) == known and not task.done():  # noqa: ASYNC110 (no event for this)
            await asyncio.sleep(0)
        if acts and not task.done():
            self.medium.calls[-1].acts.set_result("well")
            await asyncio.sleep(0)
        return task

    async def whole(self, work: Any) -> Any:
        """An operation that reaches the medium and is answered; or one that does not need it."""
        task = await self.reaches(work)
        if not task.done():
            self.medium.calls[-1].answers.set_result(None)
        return await task

    async def ask(self, *numbers: int) -> list[Found]:
        return await self.whole(self.adapter.exists([key_of(number) for number in numbers]))

    @property
    def asked(self) -> int:
        """Keys that the medium was asked for."""
        return self.adapter.stats()["asked"]


@contextlib.asynccontextmanager
async def _scene(**arguments: Any) -> AsyncIterator[Scene]:
    scene = Scene(**arguments)
    await scene.open()
    yield scene


async def test_an_answer_is_reused_without_asking_until_it_expires() -> None:
    async with _scene() as scene:
        scene.medium.there[key_of(1)] = HERE
        for _ in range(3):
            assert await scene.ask(1, 2, 1) == [HERE, ABSENT, HERE]
        assert scene.asked == 3
        scene.clock.now_s += 0.6
        assert await scene.ask(1, 2) == [HERE, ABSENT]
        assert scene.asked == 4, "a miss is believed for a shorter time"
        scene.clock.now_s += 5
        assert await scene.ask(1, 2) == [HERE, ABSENT]
        assert scene.asked == 6
        assert scene.adapter.stats()["recalled_absent"] == 2


async def test_only_keys_without_a_remembered_answer_are_asked_for() -> None:
    async with _scene() as scene:
        await scene.ask(1, 2)
        task = await scene.reaches(scene.adapter.exists([key_of(n) for n in (2, 3, 1)]))
        assert scene.medium.calls[-1].keys == [key_of(3)]
        scene.medium.calls[-1].answers.set_result(None)
        assert await task == [ABSENT] * 3


async def test_the_time_of_an_answer_counts_from_its_question() -> None:
    async with _scene() as scene:
        slow = await scene.reaches(scene.adapter.exists([key_of(1)]))
        scene.clock.now_s += 0.4
        scene.medium.calls[-1].answers.set_result(None)
        assert await slow == [ABSENT]
        scene.clock.now_s += 0.2
        await scene.ask(1)
        assert scene.asked == 2


@pytest.mark.parametrize("own", ["put", "delete", "load", "clear", "evict"])
async def test_an_answer_from_before_an_own_operation_ended_is_not_remembered(own: str) -> None:
    async with _scene() as scene:
        if own != "put":
            scene.medium.there[key_of(1)] = HERE
        before = await scene.reaches(scene.adapter.exists([key_of(1)]))
        [question] = scene.medium.calls
        operation: dict[str, Callable[[], Any]] = {
            "put": lambda: scene.adapter.put([put_item(key_of(1), 100)]),
            "delete": lambda: scene.adapter.delete([key_of(1)]),
            "clear": lambda: scene.adapter.clear(),
        }
        if own == "load":  # somebody else has deleted it
            del scene.medium.there[key_of(1)]
            await scene.whole(scene.adapter.load([load_item(key_of(1), 100)]))
        elif own == "evict":
            assert scene.medium.context is not None
            del scene.medium.there[key_of(1)]
            scene.medium.context.record_evicted(key_of(1))
        else:
            await scene.whole(operation[own]())
        question.answers.set_result(None)
        assert await before == [ABSENT if own == "put" else HERE]
        [now] = await scene.ask(1)
        assert now.presence is (Presence.PRESENT if own == "put" else Presence.ABSENT)


async def test_an_unknown_answer_is_not_remembered() -> None:
    async with _scene() as scene:
        task = await scene.reaches(scene.adapter.exists([key_of(1)]), acts=False)
        scene.medium.calls[-1].acts.set_result("fails")
        scene.medium.calls[-1].answers.set_result(None)
        assert (await task)[0].presence is Presence.UNKNOWN
        assert await scene.ask(1) == [ABSENT]


async def test_of_too_many_answers_the_oldest_are_forgotten() -> None:
    async with _scene(limits=PresenceLimits(max_keys=3)) as scene:
        for number in range(5):
            scene.medium.there[key_of(number)] = HERE
            await scene.ask(number)
        assert scene.adapter.stats()["remembered"] == 3
        await scene.ask(4, 3, 2)
        assert scene.asked == 5
        await scene.ask(0)
        assert scene.asked == 6


@pytest.mark.parametrize("limits", [PresenceLimits(presence_ttl_ms=0), PresenceLimits(negative_ttl_ms=0)])
async def test_a_time_of_zero_remembers_nothing_of_that_kind(limits: PresenceLimits) -> None:
    async with _scene(limits=limits) as scene:
        scene.medium.there[key_of(1)] = HERE
        for _ in range(2):
            await scene.ask(1, 2)
        assert scene.asked == 3


async def test_unshared_storage_is_always_asked_and_refuses_times() -> None:
    async with _scene(shared=False) as scene:
        for _ in range(2):
            task = await scene.reaches(scene.adapter.exists([key_of(1)]))
            scene.medium.calls[-1].answers.set_result(None)
            await task
        assert scene.adapter.stats()["remembered"] == 0
    with pytest.raises(StorageError, match="not shared with other instances"):
        await Scene(PresenceLimits(), shared=False).open()


@pytest.mark.parametrize(
    ("field", "value"), [("presence_ttl_ms", 60_001), ("negative_ttl_ms", -1), ("negative_ttl_ms", "1 s")]
)
def test_wrong_times_are_errors_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"l2_adapters\[0\]\.{field}: must be a whole number from 0 to"):
        configure_tier({"type": "fs", "base_path": "/tmp/x", field: value}, 0)


@pytest.mark.parametrize("isolation", ["in_process", "process"])
async def test_times_for_a_directory_of_its_own_are_refused_when_it_opens(
    tmp_path: Any, isolation: str
) -> None:
    entry = {"type": "fs", "base_path": str(tmp_path), "presence_ttl_ms": 1000, "isolation": isolation}
    built = build_stack(configure_tier(entry, 0), Surroundings(SystemClock(), 1 << 30, lambda report: None))
    with pytest.raises(StorageError, match=r"fs-0: presence_ttl_ms, negative_ttl_ms: .*remove these fields"):
        await built.adapter.open(lent_context(lambda key: None))
