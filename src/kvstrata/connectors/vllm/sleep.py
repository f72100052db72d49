"""vLLM's sleep mode for versions that do not tell a connector of it: 0.32 and before.

Sleep unmaps the memory of the KV cache; a copy that touches it then breaks the device for the whole process.  From 0.33
on vLLM calls `unregister_kv_caches` before and `restore_kv_caches` after.  Here the sleep backend that the engine has
chosen is wrapped in vLLM's registry of backends, from which a worker makes its own at its first sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def follow_sleep(
    registry: dict[str, Any], name: str, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Have `before` called before the backend `name` takes KV memory away, and `after` once it is back.

    `registry` is `SleepModeBackendFactory._registry`: functions that give a backend's class.  The last call for a name
    counts.  What `before` raises stops vLLM's sleep.
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
