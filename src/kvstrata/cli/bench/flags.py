"""The parts that the benchmark commands share: flags with bounds, the progress bar, and reports written to files."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigError, install
from kvstrata.measure.plot import check_plot


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of a flag that is a whole number within bounds."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, found {text!r}")
        return int(text)

    return read


@contextlib.contextmanager
def progress(total: int, unit: str, notes: list[str]) -> Iterator[Callable[[int], None]]:
    """Give a function that the caller calls with the work done since its last call; draws a bar on a terminal.

    If the bar's package is missing, a note is added to `notes`.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        notes.append(f"for a progress bar: {install('bench')}")
        yield lambda count: None
        return
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", leave=False, file=sys.stderr) as bar:
        yield bar.update


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `run_and_report` reads."""
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--json-file", default="", metavar="FILE", help="also write the report as JSON to this file (none)")
    add("--svg", default="", metavar="FILE",
        help=f"also draw the figures into this file (none); needs {install('bench')}")  # fmt: skip


def run_and_report(
    options: argparse.Namespace,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    *,
    shown: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], object],
) -> int:
    """Run a benchmark, and write its report to standard output and to the files of --json-file and --svg.

    Before the run it checks whether these files can be written. Returns 0. Raises ConfigError, and what `run` raises.
    """
    _check_writable("--json-file", options.json_file)
    _check_writable("--svg", options.svg)
    if options.svg:
        check_plot("--svg")
    report = run(options)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text if options.json else shown(report))
    if options.json_file:
        _write("--json-file", options.json_file, lambda path: path.write_text(text + "\n"))
    if options.svg:
        _write("--svg", options.svg, lambda path: draw(report, path))
    return 0


def _check_writable(flag: str, name: str) -> None:
    if not name:
        return
    path = Path(name)
    if path.is_dir():
        raise ConfigError(f"{flag}: {name} is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: {name}: the directory {path.parent} does not exist; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {name}: {os.strerror(errno.EACCES)}; name a file that can be written")


def _write(flag: str, name: str, write: Callable[[Path], object]) -> None:
    try:
        write(Path(name))
    except OSError as error:
        raise ConfigError(f"{flag}: {name}: cannot be written: {error}") from None
