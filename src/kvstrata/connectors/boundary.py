"""The boundary to an engine: no exception of ours crosses it while the engine serves.

Engines do not expect a connector to raise: an exception of ours in vLLM's scheduler or in a worker ends the engine.
Every method of ours that an engine calls while it serves is therefore `guarded`: an unexpected exception is counted
(`errors`) and logged (each kind the 1st, 10th, 100th … time), and the engine gets the answer that a connector without
a cache would give.  For most methods a recovery method gives that answer; it first gives leases back and makes sure
that no block is freed or read while a copy still uses it.

While an engine starts, exceptions reach it: the operator sees them at once, and no request is served yet.

This is the plugin boundary seen from the plugin's side: `except Exception` stands here and nowhere else in the
connector.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("kvstrata.connectors")

T = TypeVar("T")


class Errors:
    """The errors that were caught in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: Counter[tuple[str, type[Exception]]] = Counter()
        self._untold = 0
        self.total = 0

    def caught(self, where: str, error: Exception) -> None:
        """Count an error in the method `where`; log the 1st, 10th, 100th … of its kind."""
        with self._lock:
            self._untold += 1
            self.total += 1
            kind = (where, type(error))
            self._kinds[kind] += 1
            times = self._kinds[kind]
        if times == 10 ** (len(str(times)) - 1):
            logger.error(
                "error in the connector's %s (seen %d times): the engine continues without the cache here",
                where,
                times,
                exc_info=error,
            )

    def take_count(self) -> int:
        """The number of errors since the last call."""
        with self._lock:
            count, self._untold = self._untold, 0
        return count


errors = Errors()


def guarded(
    neutral: Any, recover: Callable[..., Any] | None = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorates a method that the engine calls.

    After an exception of the method, the answer is that of `recover`, called with the same arguments.  Without
    `recover`, or if it raises as well, the answer is `neutral`.
    """

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                errors.caught(method.__name__, error)
            if recover is None:
                return neutral
            try:
                return recover(*args, **kwargs)
            except Exception as error:
                errors.caught(f"{method.__name__} (recovery)", error)
            return neutral

        call.guarded = True  # type: ignore[attr-defined]
        return call

    return decorate
