"""Starts our own commands as child processes that write a ready line; they are forked where that is the same."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
            streams = output.fileno(), output.fileno() if stderr is None else stderr
            same = not within and python == Path(sys.executable)
            if forked and same and forks is not None and forks.can(variables):
                return forks.start(module, flags, variables, streams, writer), reader
            process = subprocess.Popen(
                [*within, python, "-m", module, *flags, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
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
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        streams = output.fileno(), errors.fileno()
        process: Process
        if forks is not None and forks.can(variables):
            process = forks.start(module, arguments, variables, streams)
        else:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=streams[0], stderr=streams[1], env=variables
            )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(command, status, *texts)
