"""Follows vLLM's sleep mode in versions that do not tell a connector when they sleep: 0.32 and before.

Sleep unmaps the memory of the KV cache; a copy that touches that memory during sleep breaks the device for the whole
process.  From 0.33 on vLLM calls `unregister_kv_caches` before sleep and `restore_kv_caches` after it.  In earlier
versions, a worker makes its sleep backend from vLLM's table of backends, at its first sleep.  For these versions, this
module puts a wrapped backend into that table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def follow_sleep(
    registry: dict[str, Any], name: str, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Let the backend `name` call `before` before it takes KV memory away, and `after` once that memory is back.

    `registry` is `SleepModeBackendFactory._registry`: functions that return a backend's class.  A later call for the
    same name replaces both functions.  An exception of `before` prevents vLLM's sleep.
    """
    load = getattr(registry[name], "wrapped", registry[name])

    def wrapper() -> type:
        backend: Any = load()

        class Followed(backend):  # type: ignore[misc]
            def suspend(self, level: int = 1) -> None:
                before()
                super().suspend(level)

            def discard(self, tags: tuple[str, ...]) -> None:
                if "kv_cache" in tags:
                    before()
                super().discard(tags)

            def resume(self, tags: list[str] | None = None) -> None:
                super().resume(tags)
                if tags is None or "kv_cache" in tags:
                    after()

        return Followed

    wrapper.wrapped = load  # type: ignore[attr-defined]
    registry[name] = wrapper
