"""Our storage for SGLang's hierarchical cache: its backend `dynamic` loads `HiCacheKvstrata` from this module.

docs/engines.md has the whole command.  SGLang is imported when the class is first accessed, so the rest of the package
can be used without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.connectors.sglang.storage import HiCacheKvstrata

__all__ = ["HiCacheKvstrata"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheKvstrata":
        from kvstrata.connectors.sglang.storage import HiCacheKvstrata

        return HiCacheKvstrata
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
