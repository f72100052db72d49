"""A short folder in memory, and the settings of a small segment in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.memory.segment_settings import SegmentSettings


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def settings(root: Path) -> SegmentSettings:
    return SegmentSettings(
        socket_dir=root / "sockets", directory=root / "segment", extents_bytes=4 << 20, entry_capacity=64
    )
