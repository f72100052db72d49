"""The boundary of every command: an exception becomes one line on standard error and an exit status.

1. No command ends with a traceback, wherever its output goes and whatever limits it runs under.
2. The line says what is wrong and what to change. After a defect of ours it names the place instead.
3. Characters that the output's encoding lacks are escaped.
4. Standard output is flushed here, so that output that could not be written is an error and never lost in silence.
5. No request to this machine goes through a proxy: it would carry tokens and passwords to another machine.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import io
import os
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstrata.errors import ConfigError, KvstrataError
from kvstrata.process.keeper import EXIT_CONFIG, EXIT_LATER, open_standard_descriptors
from kvstrata.text import one_line

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_THIS_MACHINE = "localhost,127.0.0.1,::1"
"""Value of `no_proxy` with which httpx, gRPC and obstore's client connect to this machine without a proxy."""
_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO)
"""Errors of standard output, where an error names no file."""
MOST_PLACES = 6
"""Maximum number of innermost calls in the line about a defect."""


class Exit(enum.IntEnum):
    """Exit statuses of every command; docs/operations.md lists them for users."""

    DONE = 0
    FAILED = 1
    """The server refused or did not answer, or a check or measurement failed."""
    CONFIG = EXIT_CONFIG
    """A flag, a setting, a file or a limit of the system is wrong; nothing was done."""
    CRASHED = 70
    """A defect of kvstrata."""
    OUTPUT = 74
    """Standard output cannot be written any more; the command itself was carried out."""
    LATER = EXIT_LATER
    """The start of a server, controller or gateway needs something that is not there now; again, it may succeed."""
    INTERRUPTED = 130
    READER_GONE = 141
    """Nobody reads standard output any more, as with `| head`; the same as after SIGPIPE."""


class Command(Protocol):
    """The main function of a command."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run it with these arguments, by default those of the process; returns the exit status."""
        ...


def start_failed(name: str, error: KvstrataError) -> Exit:
    """Say why a start has failed; returns the exit status."""
    for line in error.lines:
        _tell(f"{name}: {line}")
    return Exit.CONFIG if isinstance(error, ConfigError) and not error.retryable else Exit.LATER


def guarded(name: str) -> Callable[[Callable[[Sequence[str] | None], int]], Command]:
    """Decorate the main function of the command `name`: it raises nothing, and returns one of `Exit`."""

    def decorate(main: Callable[[Sequence[str] | None], int]) -> Command:
        @functools.wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            return _run(name, lambda: main(arguments))

        return run

    return decorate


def _run(name: str, main: Callable[[], int]) -> int:
    _prepare_streams()
    _bypass_proxies()
    try:
        status = main()
        sys.stdout.flush()
    except SystemExit as ended:  # argparse has said why
        status = ended.code if isinstance(ended.code, int) else Exit.DONE
    except KeyboardInterrupt:
        _tell(f"{name}: interrupted")
        return Exit.INTERRUPTED
    except KvstrataError as error:
        _tell(f"{name}: {error.message}")
        status = Exit.CONFIG if isinstance(error, ConfigError) else Exit.FAILED
    except Exception as error:  # the boundary of commands, beyond which there is only the interpreter
        if isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT:
            return _lost_output(name, error)
        status = _unexpected(name, error)
    try:
        sys.stdout.flush()
    except OSError as error:
        return _lost_output(name, error)
    return status


def _unexpected(name: str, error: Exception) -> int:
    """Say what an exception means that no command raises on purpose; returns the exit status."""
    number = getattr(error, "errno", None)  # ZMQ's errors have one too
    if number in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        _tell(
            f"{name}: too many open files: this process may have {soft} open at a time; raise the limit: ulimit -n 4096"
        )
        return Exit.CONFIG
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        _tell(one_line(f"{name}: {where}{error.strerror or error}"))
        return Exit.FAILED
    frames = traceback.extract_tb(error.__traceback__)[-MOST_PLACES:]
    places = " < ".join(
        f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    _tell(one_line(f"{name}: a defect of kvstrata: {what} (at {places}); please report it with this line"))
    return Exit.CRASHED


def _lost_output(name: str, error: OSError) -> int:
    """Say that standard output takes nothing more, unless its reader has just gone; returns the exit status."""
    with contextlib.suppress(OSError, ValueError):
        # What is still in the buffer is flushed once more at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return Exit.READER_GONE
    _tell(f"{name}: cannot write to standard output: {error.strerror}; redirect it, or free space")
    return Exit.OUTPUT


def _tell(line: str) -> None:
    """Write a line to standard error, if there is one; at once, so that no other thread's line comes before its end."""
    with contextlib.suppress(OSError):
        print(f"{line}\n", end="", file=sys.stderr, flush=True)


def _prepare_streams() -> None:
    open_standard_descriptors()
    if sys.stdout is None:  # it was closed before the start: output is an error, as on a full disk
        sys.stdout = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 (open as long as the process lives)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _bypass_proxies() -> None:
    """Name this machine in `no_proxy`, if the environment names a proxy."""
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if given != "*":
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{given},{_THIS_MACHINE}".strip(",")
