"""The common part of the commands that run a server, controller or gateway: settings, `--check`, errors.

`--check` may read settings that are meant for another machine.  So it distinguishes a resource that this machine lacks
from a setting that is wrong on every machine; a server on this machine would start with neither.  `--check` opens and
writes nothing, and sends nothing over the network.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvstrata.cli.boundary import Exit, start_failed
from kvstrata.config.flags import Flags
from kvstrata.config.secrets import shown
from kvstrata.errors import ConfigError, KvstrataError
from kvstrata.observability.logging import set_up as set_up_logging
from kvstrata.process.keeper import Restarts
from kvstrata.process.lifecycle import Process, run, set_up
from kvstrata.process.ports import Listening, port_holder
from kvstrata.tiers.config import TierConfig, load
from kvstrata.types import GB

S = TypeVar("S", bound=msgspec.Struct)


def start(
    command: str,
    flags: Flags,
    read: Callable[[], S],
    restarts: Restarts,
    kind: type[Process],
    plan: Callable[[S], Any],
    check: Callable[[S, list[str]], tuple[S, list[str]]],
    notes: Callable[[S], Iterable[str]] = lambda settings: (),
) -> int:
    """Read the settings, then run the process, or with `--check` check and print them; returns the exit status.

    `plan` makes the process's plan of the settings.  `check` raises ConfigError for settings that cannot work, and adds
    what this machine lacks to a list; it returns the settings as they would be used, and more lines to print.  `notes`:
    about these settings.
    """
    try:
        settings: Any = read()
        noted = [*flags.notes, *notes(settings)]
        if not flags.check:
            set_up_logging(settings.log_level, settings.log_format)
            set_up()
            name = command.removeprefix("lmcache-")
            process = kind(name, plan(settings), read, flags.ready_fd, restarts)
            for note in noted:
                process.log.warning("setting_noted", note=note)
            for field in flags.exposed:
                advice = (
                    "every user of this machine can read it there; name a file that holds it, or use --config"
                )
                process.log.warning("secret_on_the_command_line", field=field, advice=advice)
            return run(process)
        lacking: list[str] = []
        used, said = check(settings, lacking)
        print(json.dumps(shown(msgspec.to_builtins(used))[0], indent=2))
        exposed = [f"{field} is a secret on the command line" for field in flags.exposed]
        lines = [f"note: {note}" for note in (*noted, *exposed)]
        for line in (*lines, *(f"not on this machine: {lack}" for lack in lacking), *said):
            print(f"{command}: {line}", file=sys.stderr)
        return Exit.LATER if lacking else Exit.DONE
    except KvstrataError as error:
        return start_failed(command, error)


# --- what `--check` looks at beyond the settings themselves -----------------------------------------------------------


def look_at(tiers: list[TierConfig], ports: list[Listening]) -> list[str]:
    """The reasons why a server with these tiers and ports could not work on this machine now; empty: none.

    Raises ConfigError for a plugin that can be imported and refuses its settings.
    """
    return [*(said for tier in tiers for said in _tier(tier)), *taken(ports)]


def small_folders(tiers: list[TierConfig]) -> Iterator[str]:
    """The new folders of tiers that have more capacity than their file systems have free."""
    for tier in tiers:
        capacity_gb = tier.entry.get("capacity_gb")
        if not tier.folder or not isinstance(capacity_gb, int | float):
            continue
        folder = Path(tier.folder)
        existing_folder = existing(folder.absolute())
        free_gb = shutil.disk_usage(existing_folder).free / GB
        if not folder.exists() and capacity_gb > free_gb:
            free = f"the file system of {str(existing_folder)!r} has {free_gb:.1f} GB free"
            yield f"{tier.place.at('capacity_gb')}: {capacity_gb}, but {free}"


def existing(path: Path) -> Path:
    """The nearest folder at or above `path` that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _tier(tier: TierConfig) -> Iterator[str]:
    place, medium = tier.place, load(tier.medium)
    try:
        tier.make()
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        yield error.message
    if medium.look is not None:
        try:
            medium.look(tier.fields, tier.name)
        except KvstrataError as error:
            yield f"{place.path}: {error.message}"
    if tier.folder:
        folder = existing(Path(tier.folder).absolute())
        if not os.access(folder, os.W_OK | os.X_OK):
            yield f"{place.path}: {tier.folder!r}: {str(folder)!r} cannot be written to by uid {os.geteuid()}"


def taken(ports: list[Listening]) -> Iterator[str]:
    """The ports that another process has now."""
    for asked in ports:
        if asked.port and (holder := port_holder(asked.port)):
            yield f"{asked.setting}: {asked.port} is held by {holder} now"
