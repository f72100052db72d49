"""The pool that the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.l1 import L1


@pytest.fixture
def l1() -> Iterator[L1]:
    """A pool in which nothing may be left in use at the end of the test."""
    made = L1()
    yield made
    made.nothing_in_use()
    made.pool.close()
