"""How much of a test runs: `make test` is the gate, `make test-all` runs everything (`KVSTRATA_TESTS=all`).

A whole test that only `make test-all` runs has the marker `long`.
"""

from __future__ import annotations

import os
import random
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "KVSTRATA_TESTS"
ALL = os.environ.get(VARIABLE) == "all"


def amount(gate: T, everything: T) -> T:
    """Return the sizes, seeds or parameters of this run."""
    return everything if ALL else gate


def seed() -> int:
    """Return the seed of a test's random choices: the same in each run of the gate, else a new one."""
    return random.randrange(1 << 30) if ALL else 20
