"""Calls the connector before and after vLLM's sleep, in versions before 0.33, which do not notify a connector of it.

Sleep unmaps the memory of the KV cache; a copy that touches that memory during sleep breaks the device for the whole
process.  From 0.33 on vLLM calls `unregister_kv_caches` before sleep and `restore_kv_caches` after it.  In earlier
versions, a worker makes its sleep backend from vLLM's table of backends at its first sleep; there this module puts a
wrapped backend into that table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def follow_sleep(connector: Any, model_config: Any) -> None:
    """If this vLLM does not call `unregister_kv_caches` and `restore_kv_caches`, make its sleep backend call them."""
    if model_config.enable_sleep_mode and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        wrap_loader(
            SleepModeBackendFactory._registry,
            model_config.sleep_mode_backend,
            connector.unregister_kv_caches,
            connector.restore_kv_caches,
        )


def wrap_loader(
    registry: dict[str, Any], name: str, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Make the backend `name` call `before` before it unmaps KV memory, and `after` when that memory is back.

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
