"""An event loop on virtual time, so that no test waits for a limit and no machine is too busy for one.

While anything is ready, no time passes; then time jumps to the next timer.  Functions for other threads run at once,
on the loop itself.  A loop that has neither ready work nor a timer would wait for ever: it raises instead.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

EPOCH_MS = 1_800_000_000_000
"""The clock's time in Unix milliseconds when it begins."""


class VirtualClock:
    """The loop's time, as a Clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        """Seconds since the loop began."""
        return self.now_s

    def unix_ms(self) -> int:
        """Milliseconds since 1970."""
        return EPOCH_MS + round(self.now_s * 1_000)


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: moves the clock instead."""

    clock: VirtualClock
    between: Callable[[], object]

    def select(self, timeout: float | None = None) -> Any:
        self.between()
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is ready and no timer is set: this loop would wait for ever"
            self.clock.now_s += max(0.0, timeout)
            self.between()
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`between` is called between any two turns of the loop, and whenever time has passed."""

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        self.clock = VirtualClock()
        selector = _Jumping()
        selector.clock, selector.between = self.clock, between
        super().__init__(selector)

    def time(self) -> float:
        """The virtual time in seconds."""
        return self.clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run the function at once."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let an async test run on a VirtualLoop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def clock() -> VirtualClock:
    """The clock of the running VirtualLoop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.clock
