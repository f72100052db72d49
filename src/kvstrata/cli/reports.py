"""What the benchmark commands share: flags with bounds, progress, and files that reports go to."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstrata.errors import ConfigError


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of a flag: a whole number within bounds."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, found {text!r}")
        return int(text)

    return read


@contextlib.contextmanager
def progress(total: int, unit: str, notes: list[str]) -> Iterator[Callable[[int], None]]:
    """Called with how much was done; a bar on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        notes.append("for a progress bar: pip install 'kvstrata[bench]'")
        yield lambda count: None
        return
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", leave=False, file=sys.stderr) as bar:
        yield bar.update


def check_writable(flag: str, name: str) -> None:
    """Before anything is measured: whether a report can be written there. Raises ConfigError."""
    if not name or name == "-":
        return
    path = Path(name)
    if path.is_dir():
        raise ConfigError(f"{flag}: {name} is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: {name}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {name}: {os.strerror(errno.EACCES)}; name a file that can be written")


def written(flag: str, name: str, write: Callable[[Path], object]) -> None:
    """Write a report. Raises ConfigError."""
    try:
        write(Path(name))
    except OSError as error:
        raise ConfigError(f"{flag}: {name}: cannot be written: {error}") from None
