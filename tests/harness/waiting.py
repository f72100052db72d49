"""Waits on a loop until other tasks or threads have made a condition true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HANG_S = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Return when `condition()` holds. Raises TimeoutError after `HANG_S`."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0.001)
