"""Runs work that may never end on a thread that does not keep the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from kvstrata.naming import name_thread

T = TypeVar("T")
SWITCH_S = 0.000_5
"""Time for which a busy thread may keep the event loop waiting for the interpreter (`sys.setswitchinterval`)."""


def on_a_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work`, which may never end, on a thread that does not keep the process alive; awaits its result.

    Cancelling the future ends only the wait.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def body() -> None:
        name_thread()
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, failure)
        failure = None  # it refers to this frame, and together they would keep what `work` had until they are collected

    threading.Thread(target=body, name=name, daemon=True).start()
    return future
