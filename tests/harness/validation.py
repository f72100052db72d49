"""Checks that a pool keeps its invariants: with a module that `make setup` compiles for the tests alone."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the module is made before kvstrata is installed
    from kvstrata.native.core import Pool

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("tests/harness/pool_validation.pyx", "ext/core/tests/support/pool_validation.cpp")
MODULE = Path(f"build/native/modules/pool_validation{sysconfig.get_config_var('EXT_SUFFIX')}")


def build() -> None:
    """Bring the module up to date."""
    sys.path.insert(0, str(ROOT / "ext"))
    from make import native
    from make.build import Builder

    module = native.Module("pool_validation", SOURCES, ("ext/core/tests",))
    with native.exclusive_build():
        native.make_modules(Builder(), [module], native.jobs_wanted(), lambda name: str(MODULE))


@cache
def module() -> ModuleType:
    if not (ROOT / MODULE).exists():
        build()
    spec = importlib.util.spec_from_file_location("pool_validation", ROOT / MODULE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def validate(pool: Pool) -> None:
    """Raises PoolError `internal` naming the broken invariant. Looks at the whole pool."""
    module().validate(pool)


if __name__ == "__main__":
    build()
