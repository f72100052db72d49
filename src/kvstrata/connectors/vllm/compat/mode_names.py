"""The name of a quantisation mode: in vLLM 0.33 two modes share the number 12, and both show the first one's name."""

from __future__ import annotations

from typing import Any


def mode_name(mode: Any) -> str:
    """All names of a mode. The KV dtype, which is in the facts as well, tells modes with several names apart."""
    members = getattr(type(mode), "__members__", {})
    return "/".join(name for name, member in members.items() if member is mode) or str(
        getattr(mode, "name", mode)
    )
