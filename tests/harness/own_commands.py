"""Starts our own commands as child processes that write a ready line; they are forked where that is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.forks import Command, Forks

Process = subprocess.Popen[bytes] | Command
forks: Forks | None = None
"""Forks commands; None: none is forked."""


def start(
    module: str,
    flags: Sequence[str],
    *,
    log: Path,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    within: Sequence[str | os.PathLike[str]] = (),
    python: Path = Path(sys.executable),
    forked: bool = True,
) -> tuple[Process, int]:
    """Start `python -m module`; returns the process and the descriptor at which its ready line can be read.

    `within`: a command that starts it. `stderr`: a descriptor that gets its standard error instead of `log`.
    """
    variables = os.environ if environment is None else environment
    reader, writer = os.pipe()
    try:
        with open(log, "ab") as output:
            errors = output.fileno() if stderr is None else stderr
            same = not within and python == Path(sys.executable)
            if forked and same and forks is not None and forks.can(variables):
                with open(os.devnull, "rb") as nothing:
                    streams = (nothing.fileno(), output.fileno(), errors)
                    return forks.start([module, *flags], variables, streams, ready=writer), reader
            process = subprocess.Popen(
                [*within, python, "-m", module, *flags, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(writer,),
                env=variables,
                start_new_session=True,
            )
            return process, reader
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)


def run(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` with an empty standard input to its end. Raises subprocess.TimeoutExpired."""
    variables = os.environ if environment is None else environment
    if forks is not None and forks.can(variables):
        return forks.run([module, *arguments], variables, timeout_s=timeout_s)
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=variables,
        timeout=timeout_s,
        check=False,
    )
