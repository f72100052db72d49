"""Runs a test in a process of its own, where no other test's thread allocates, opens files or forks.

Run as a module, this file is that process.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from tests.harness import own_commands


def alone(test: Callable[..., Any]) -> Callable[..., None]:
    """Let a test run in a process of its own; its arguments get there as JSON, paths as text."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        text = json.dumps(arguments, default=str)
        ended = own_commands.run("tests.harness.alone", test.__module__, test.__name__, text, timeout_s=500)
        assert ended.returncode == 0, ended.stderr

    return run


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    outcome = getattr(importlib.import_module(module), name).__wrapped__(**json.loads(arguments))
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)
