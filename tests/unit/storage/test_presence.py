"""What is remembered of a shared medium: how it saves round trips, and the moments at which it must not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError
from kvstrata.storage.base import AdapterContext, Capabilities, Found, Presence
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.stack import Surroundings, build_stack
from kvstrata.storage.wrap.presence import PresenceAdapter, PresenceLimits
from kvstrata.testing.strategies import key_of, lent_context
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
    with pytest.raises(ConfigError, match="not shared with other instances"):
        await Scene(PresenceLimits(), shared=False).open()


@pytest.mark.parametrize("isolation", ["in_process", "process"])
async def test_times_for_a_directory_of_its_own_are_refused_when_it_opens(
    tmp_path: Any, isolation: str
) -> None:
    entry = {"type": "fs", "base_path": str(tmp_path), "presence_ttl_ms": 1000, "isolation": isolation}
    built = build_stack(configure_tier(entry, 0), Surroundings(SystemClock(), 1 << 30, lambda report: None))
    with pytest.raises(ConfigError, match=r"fs-0: presence_ttl_ms, negative_ttl_ms: .*remove these fields"):
        await built.adapter.open(lent_context(lambda key: None))
