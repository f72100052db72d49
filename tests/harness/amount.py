"""How much of a test runs: `make test` is the gate, `make test-all` runs everything (`ALL_TESTS=1`).

A whole test that only `make test-all` runs has the marker `long`.
"""

from __future__ import annotations

import os
import random
from typing import TypeVar

T = TypeVar("T")
ALL = os.environ.get("ALL_TESTS") == "1"


def amount(gate: T, everything: T) -> T:
    """Return the sizes, seeds or parameters of this run."""
    return everything if ALL else gate


def seed() -> int:
    """Return the seed of a test's random choices: the same in each run of the gate, else a new one."""
    return random.randrange(1 << 30) if ALL else 20
