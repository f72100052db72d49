"""The files of a segment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.pool_files import Files


@pytest.fixture
def files() -> Iterator[Files]:
    files = Files()
    yield files
    files.close()
