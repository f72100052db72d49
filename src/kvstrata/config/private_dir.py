"""Folders that belong to one user alone, and the user's folder for the files of running processes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstrata.errors import ConfigError

SYSTEM_RUN = Path("/run/user")
"""Where a login gets its XDG_RUNTIME_DIR, in a folder named after the uid."""
UNITS_RUN = Path("/run/kvstrata")
"""The XDG_RUNTIME_DIR of the units in configs/systemd."""
MOST_PASSED_OVER = 1_000

log = logging.getLogger(__name__)


def own_path(path: Path) -> Path:
    """`path`, or if another user has made it the first of `path`+2, `path`+3 … that no other user has made.

    Anybody may make any name in /tmp and /dev/shm, and nobody else may remove it there.  The log says once which
    names were passed over.
    """
    for number in range(2, MOST_PASSED_OVER):
        if not _is_another_users(path):
            return path
        _tell_passed_over(path)
        path = path.with_name(f"{path.name.partition('+')[0]}+{number}")
    return path


@functools.cache
def _tell_passed_over(path: Path) -> None:
    log.warning(
        "%s belongs to another user, so another name is used; set XDG_RUNTIME_DIR, or --socket-dir and l1.segment_dir, "
        "to folders that only you can write",
        path,
    )


def run_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_RUNTIME_DIR/kvstrata-<uid>`, or `/tmp/kvstrata-<uid>` if the variable names no directory of our own.

    After sudo or su the variable often names another user's directory, or one that no longer exists: both count as
    unset.  Raises ConfigError for a relative value, whose meaning would depend on a process's working directory.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and not runtime.startswith("/"):
        raise ConfigError(
            f"XDG_RUNTIME_DIR: {runtime!r} is not an absolute path; correct or unset it, or set --socket-dir",
            field="XDG_RUNTIME_DIR",
        )
    base = Path(runtime) if runtime and _is_ours(runtime) else Path("/tmp")
    return own_path(base / f"kvstrata-{os.geteuid()}")


def run_dirs(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The places where `run_dir` lies for processes of our user whose XDG_RUNTIME_DIR differs; that of `environ` first.

    systemd and cron start processes without the variable, a login shell has it.  Raises ConfigError as `run_dir`.
    """
    name = f"kvstrata-{os.geteuid()}"
    systems = [base / name for base in (SYSTEM_RUN / str(os.geteuid()), UNITS_RUN) if _is_ours(str(base))]
    in_tmp = Path("/tmp") / name
    return list(dict.fromkeys([run_dir(environ), *systems, in_tmp, own_path(in_tmp)]))


def shared_run_dirs(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where processes of our user keep what they share, the first place first: the same list for all of them.

    It does not depend on how a process was started, since systemd and cron leave out the XDG_RUNTIME_DIR that a login
    sets.  An XDG_RUNTIME_DIR of our own that is no login's is the only place, so it keeps processes apart.  Raises
    ConfigError as `run_dir`.
    """
    own, in_tmp_first = run_dir(environ), [place for place in run_dirs({}) if not _is_another_users(place)]
    return in_tmp_first[::-1] if own in in_tmp_first else [own]


def make_private_dir(path: Path, field: str) -> None:
    """Makes `path` and its missing parents with mode 0700, then checks `path` as `check_private_dir` does."""
    missing = [parent for parent in (path, *path.parents) if not os.path.lexists(parent)]
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass  # another starting server was quicker
        except OSError as error:
            raise ConfigError(
                f"{field}: cannot make directory {str(directory)!r}: {error.strerror}; choose another place",
                field=field,
            ) from error
    check_private_dir(path, field)


def check_private_dir(path: Path, field: str) -> None:
    """Raises ConfigError unless `path` is a directory of ours that no other user may write to.

    The per-user directory above a default path is checked the same way, since its owner could replace ours.
    """
    ours = f"kvstrata-{os.geteuid()}"
    for directory in [path.parent, path] if path.parent.name.partition("+")[0] == ours else [path]:
        try:
            status = os.lstat(directory)
        except OSError as error:
            raise ConfigError(f"{field}: {str(directory)!r}: {error.strerror}", field=field) from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(
                f"{field}: {str(directory)!r} is not a directory (a link to one does not count); remove it or choose "
                "another place",
                field=field,
            )
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{field}: directory {str(directory)!r} belongs to uid {status.st_uid}, not to us (uid "
                f"{os.geteuid()}); choose a directory of your own",
                field=field,
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"{field}: directory {str(directory)!r} has mode {stat.S_IMODE(status.st_mode):04o}, so others may "
                "write to it; chmod 700 it or choose another place",
                field=field,
            )


def path_id(path: Path | str) -> tuple[int, int] | None:
    """(device, inode) of the file at a path, links not followed; None if none is there."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_another_users(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid != os.geteuid()
    except OSError:
        return False


def _is_ours(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def user_folder(environment: Mapping[str, str], variable: str, below_home: str) -> str:
    """The folder that `variable` names, else `below_home` in the user's home; empty if neither can be found.

    A relative path in the variable is ignored.
    """
    folder = environment.get(variable, "")
    if folder.startswith("/"):
        return folder
    home = environment.get("HOME", "")
    if not home.startswith("/"):
        with contextlib.suppress(KeyError):  # the system does not know the user's number
            home = pwd.getpwuid(os.getuid()).pw_dir
    return f"{home}/{below_home}" if home.startswith("/") else ""
