"""Runs a coroutine up to its first wait without a task, which would cost 30 µs; most choices never wait.

asyncio.timeout needs a task, so a coroutine that uses it awaits `in_task` first.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` up to its first wait, and return a task for the rest; None: `work` has ended.

    If the task is cancelled before its first step, `work` is closed (GeneratorExit).
    """
    try:
        waits = work.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_rest(work, waits))


async def in_task() -> None:
    """Make sure that the caller runs in a task after this await."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


async def _rest(work: Coroutine[Any, Any, None], waits: Any) -> None:
    await _resumed(work, waits)


@types.coroutine
def _resumed(work: Coroutine[Any, Any, None], waits: Any) -> Generator[Any, Any, None]:
    """Yield each future that `work` waits for to the task, and send the result or the error into `work`."""
    try:
        while True:
            try:
                found = yield waits
            except BaseException as error:
                waits = work.throw(error)
            else:
                waits = work.send(found)
    except StopIteration:
        return
