"""Waiting on a loop for what other tasks and threads bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HANG_S = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Returns when it holds; TimeoutError when it never does."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 (what is waited for is elsewhere, and nobody tells)
            await asyncio.sleep(0.001)
