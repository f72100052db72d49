"""The common part of the commands that run a server, controller or gateway: settings, `--check`, errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from kvstrata.cli.boundary import Exit, start_failed
from kvstrata.config.flags import Flags
from kvstrata.config.load import pod_link_notes
from kvstrata.config.secrets import shown
from kvstrata.errors import KvstrataError
from kvstrata.observability.logging import set_up as set_up_logging
from kvstrata.process.keeper import Restarts
from kvstrata.process.lifecycle import Process, run, set_up

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
        noted = [*flags.notes, *notes(settings), *pod_link_notes(os.environ)]
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
