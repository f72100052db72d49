"""Waits on a loop until other tasks or threads have made a condition true."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

HANG_S = 120.0


async def until(condition: Callable[[], object]) -> None:
    """Return when `condition()` holds. Raises TimeoutError after `HANG_S`."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0.001)


async def eventually_async(what: str, condition: Callable[[], object]) -> None:
    """Return when `condition()` holds, or what it gives to await. Raises AssertionError with `what` after `HANG_S`."""
    try:
        async with asyncio.timeout(HANG_S):
            while not (await found if inspect.isawaitable(found := condition()) else found):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


def expire(limit_s: float) -> None:
    """Run the loop's timer that ends a wait of about `limit_s`: a short limit would be outrun on a busy machine."""
    loop = asyncio.get_running_loop()
    timers = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
    timer = min(timers, key=lambda one: abs(one.when() - loop.time() - limit_s))
    timer._run()
    timer.cancel()
