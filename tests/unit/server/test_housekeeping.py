"""The server's own work on its pool; the test gives the pool's answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.server.housekeeping import MISSING_S, Housekeeping


class Lane:
    def run(self, call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(call(*arguments))
        return future


class Pool:
    extents_bytes = 100

    def __init__(self, missing: list[int]) -> None:
        self.missing = missing

    def verify_next(self, limit: int) -> int:
        return 0

    def evict_to_watermark(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {"evicted_entries": 0, "evicted_bytes": 0, "evictions": {}}

    def retry_missing(self) -> int:
        return self.missing.pop(0)


class Borrowed:
    async def drop_due(self) -> None: ...


class Clock:
    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class Events:
    verified: tuple[bytes, ...] = ()

    def drain(self) -> None: ...


def test_memory_that_begins_and_ceases_to_be_missing_is_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pool, clock = Pool([0, 40, 60, 0]), Clock()

    async def rounds() -> None:
        parts: list[Any] = [pool, Lane(), Events(), None, Borrowed(), clock, None]
        housekeeping = Housekeeping(*parts)
        while pool.missing:
            await housekeeping.round()
            await housekeeping.round()  # too early to ask again
            clock.now_s += MISSING_S

    asyncio.run(rounds())
    said = [record.getMessage() for record in caplog.records if "l1_memory" in record.getMessage()]
    assert len(said) == 2
    assert "l1_memory_missing" in said[0] and "40" in said[0] and "--l1-size-gb" in said[0]
    assert "l1_memory_complete" in said[1]
