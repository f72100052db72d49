"""Prometheus' own checker: the program on PATH, or Debian's, unpacked into the cache folder."""

from __future__ import annotations

import subprocess

from tests.harness.prometheus import PACKAGE
from tests.tools import fetch_debian

TIMEOUT_S = 60.0


class Promtool:
    """The program `promtool`."""

    def __init__(self) -> None:
        """Raises fetch_debian.Unavailable if the program cannot be had."""
        self._program, self._variables = fetch_debian.program("promtool", [PACKAGE])

    def __call__(self, *arguments: object, text: str = "") -> str:
        """Run `promtool ARGUMENTS` with `text` as its standard input; return what it complains about, or nothing."""
        done = subprocess.run(
            [self._program, *map(str, arguments)],
            input=text,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        # `check metrics` complains with status 3, and is silent otherwise.
        return "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stdout}{done.stderr}"
