"""The adapter `fs`, which lists its keys only while a certain file exists, like one that still scans its medium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstrata.tiers.base import KeyPage
from kvstrata.tiers.media.fs import FsAdapter


class LateAdapter(FsAdapter):
    """`lists_with`: the file."""

    def __init__(self, base_path: str, lists_with: str) -> None:
        super().__init__(base_path=base_path)
        self._lists_with = Path(lists_with)

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """See the module."""
        return await super().list_keys(cursor, most) if self._lists_with.exists() else None


def entry(base_path: Path, lists_with: Path) -> dict[str, Any]:
    """The JSON of such an adapter."""
    return {
        "type": "plugin",
        "module_path": __name__,
        "class_name": "LateAdapter",
        "adapter_params": {"base_path": str(base_path), "lists_with": str(lists_with)},
    }
