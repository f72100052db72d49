"""Where an instance's sockets and files lie, and that nobody else can meddle with them.

    <socket dir>/   attach.sock  rpc.sock  holder.sock  server.pid     one per instance; what a container
    must share <segment dir>/  index  extents  sessions.lock  server.pid          on /dev/shm, handed out as
    descriptors

The default socket directory follows from uid, port and XDG_RUNTIME_DIR alone, so that server and engine
find the same one without talking.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstrata.errors import ConfigError

ATTACH_SOCKET = "attach.sock"
RPC_SOCKET = "rpc.sock"
HOLDER_SOCKET = "holder.sock"
PID_FILE = "server.pid"
SOCKET_NAMES = (ATTACH_SOCKET, RPC_SOCKET, HOLDER_SOCKET)

MAX_SOCKET_PATH_BYTES = 100
"""The kernel takes 107; the rest is left for names to come."""
SHM_ROOT = Path("/dev/shm")

_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_socket_dir(port: int, environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_RUNTIME_DIR/kvstrata-<uid>/<port>`, under /tmp where that variable does not name our own
    directory.

    A login by sudo or su often leaves the variable of another user, or of a directory that is gone: both
    count as unset.  Raises ConfigError for a relative value, whose meaning would depend on where a process
    started.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and not runtime.startswith("/"):
        raise ConfigError(
            f"XDG_RUNTIME_DIR: {runtime!r} is not an absolute path; correct or unset it, or set --socket-dir",
            field="XDG_RUNTIME_DIR",
        )
    base = Path(runtime) if runtime and _is_ours(runtime) else Path("/tmp")
    return base / f"kvstrata-{os.geteuid()}" / str(port)


def socket_dir(
    setting: str | os.PathLike[str] | None, port: int, environ: Mapping[str, str] = os.environ
) -> Path:
    """The instance's socket directory as an absolute path: `setting` (`~` expanded) or the default for
    `port`.

    Nothing is created.  Raises ConfigError when a socket in it would have too long a path, or when `~`
    cannot be expanded.
    """
    if setting is None or not os.fspath(setting):
        directory = default_socket_dir(port, environ)
    else:
        expanded = os.path.expanduser(os.fspath(setting))
        if expanded.startswith("~"):
            raise ConfigError(
                f"socket_dir: {os.fspath(setting)!r} cannot be expanded: HOME is not set and uid "
                f"{os.getuid()} has no home directory in the user database; give an absolute path",
                field="socket_dir",
            )
        directory = Path(os.path.abspath(expanded))
    check_socket_path(directory / max(SOCKET_NAMES, key=len))
    return directory


def check_socket_path(path: Path) -> None:
    """Raises ConfigError for a path that does not fit into a unix socket's address."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket_dir: {str(path)!r} is {length} bytes long, a unix socket's path may have "
            f"{MAX_SOCKET_PATH_BYTES}; set --socket-dir (engines: socket_dir) to a shorter directory, "
            f"at most {MAX_SOCKET_PATH_BYTES - len(path.name) - 1} bytes",
            field="socket_dir",
        )


def segment_dir(port: int, instance_id: str = "", root: Path = SHM_ROOT) -> Path:
    """Directory of the segment's files: one per uid, port and instance id."""
    if instance_id and not _INSTANCE_ID.fullmatch(instance_id):
        raise ConfigError(
            f"instance_id: {instance_id!r} must be 1 to 64 letters, digits, '.', '_' or '-', the first a "
            "letter or digit",
            field="instance_id",
        )
    return root / "-".join(["kvstrata", str(os.geteuid()), str(port), *filter(None, [instance_id])])


def make_private_dir(path: Path, field: str) -> None:
    """Makes `path` with mode 0700, parents too, then checks it as `check_private_dir` does."""
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
    """Raises ConfigError unless `path` is a directory of our own that nobody else may write to.

    The per-user directory above a default path is checked the same way: whoever owned it could swap ours.
    """
    ours = f"kvstrata-{os.geteuid()}"
    for directory in [path.parent, path] if path.parent.name == ours else [path]:
        try:
            status = os.lstat(directory)
        except OSError as error:
            raise ConfigError(f"{field}: {str(directory)!r}: {error.strerror}", field=field) from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(
                f"{field}: {str(directory)!r} is not a directory (nor may it be a symbolic link); remove it "
                "or choose another place",
                field=field,
            )
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{field}: directory {str(directory)!r} belongs to uid {status.st_uid}, not to us (uid "
                f"{os.geteuid()}); choose a directory of our own",
                field=field,
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"{field}: directory {str(directory)!r} has mode {stat.S_IMODE(status.st_mode):04o}, others "
                "may write to it; chmod 700 it or choose another place",
                field=field,
            )


def _is_ours(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
