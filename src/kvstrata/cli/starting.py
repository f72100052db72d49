"""The common part of the commands that run a controller or a gateway: settings, `--check`, errors."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from kvstrata.cli.boundary import Exit, start_failed
from kvstrata.cli.check import taken
from kvstrata.config.flags import Flags
from kvstrata.config.load import load
from kvstrata.config.pod_links import pod_link_notes
from kvstrata.config.secrets import shown
from kvstrata.errors import KvstrataError
from kvstrata.process.keeper import Restarts
from kvstrata.process.ports import Listening

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct, contravariant=True)


class Run(Protocol[R]):
    """Runs the process until it is stopped; returns the exit status. Raises KvstrataError before it is ready."""

    def __call__(
        self, settings: R, *, notes: list[str], reread: Callable[[], R], ready_fd: int, restarts: Restarts
    ) -> int:
        """`reread` reads the settings again for SIGHUP."""
        ...


def start(
    command: str,
    struct: type[S],
    flags: Flags,
    restarts: Restarts,
    check: Callable[[S], object],
    ports: Callable[[S], list[Listening]],
    run: Run[S],
) -> int:
    """Read the settings, then run, or with `--check` check and print them; returns the exit status.

    `check` raises ConfigError for settings that cannot work; `ports` are those that they ask for.
    """
    try:
        read = functools.partial(
            load,
            struct,
            file=flags.config_file or None,
            environment=os.environ,
            flags=flags.settings,
            flag_names=flags.names,
            wrong_flags=flags.wrong,
        )
        settings = read()
        notes = [*flags.notes, *pod_link_notes(os.environ)]
        if flags.check:
            check(settings)
            print(json.dumps(shown(msgspec.to_builtins(settings))[0], indent=2))
            for note in notes:
                print(f"{command}: note: {note}", file=sys.stderr)
            lacking = list(taken(ports(settings)))
            for lack in lacking:
                print(f"{command}: not on this machine: {lack}", file=sys.stderr)
            return Exit.LATER if lacking else Exit.DONE
        return run(settings, notes=notes, reread=read, ready_fd=flags.ready_fd, restarts=restarts)
    except KvstrataError as error:
        return start_failed(command, error)
