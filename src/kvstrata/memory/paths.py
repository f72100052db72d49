"""Where an instance's sockets and files lie.

    <socket dir>/   rpc.sock  peers.sock  server.pid  lessons  claims  one per instance; containers must mount it
    <segment dir>/  index  extents  sessions.lock  server.pid          on /dev/shm, handed out as descriptors

The default socket directory depends only on uid, port and XDG_RUNTIME_DIR, so that server and engine find the same one
without communicating.  Where XDG_RUNTIME_DIR may differ between them, clients look in several places (`socket_dirs`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from kvstrata.config.private_dir import own_path, run_dir, run_dirs
from kvstrata.errors import ConfigError

RPC_SOCKET = "rpc.sock"
PEER_SOCKET = "peers.sock"
"""Name of the socket on which instances of this host read records (p2p/serving.py)."""
PID_FILE = "server.pid"
LESSONS = "lessons"
"""Name of the file with the eviction policy's learnt state (`Pool.lessons`), for the next server."""
CLAIMS = "claims"
"""Name of the file with the claims on chunks of L1 (server/claims.py), for the next server."""

MAX_SOCKET_PATH_BYTES = 100
"""Maximum length of a socket's path; the kernel allows 107 bytes, and the rest is spare for longer names."""
SHM_ROOT = Path("/dev/shm")

_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def socket_dir(
    setting: str | os.PathLike[str] | None, port: int, environ: Mapping[str, str] = os.environ
) -> Path:
    """The instance's socket directory as an absolute path: `setting` (`~` expanded) or the default for `port`.

    The default is `$XDG_RUNTIME_DIR/kvstrata-<uid>/<port>`, or the same under /tmp (`config.private_dir.run_dir`).
    Creates nothing.  Raises ConfigError if the socket's path would be too long, if `~` cannot be expanded, or if the
    variable's value is a relative path.
    """
    if setting is None or not os.fspath(setting):
        directory = run_dir(environ) / str(port)
    else:
        expanded = os.path.expanduser(os.fspath(setting))
        if expanded.startswith("~"):
            raise ConfigError(
                f"socket_dir: {os.fspath(setting)!r} cannot be expanded: HOME is not set and uid "
                f"{os.getuid()} has no home directory in the user database; give an absolute path",
                field="socket_dir",
            )
        directory = Path(os.path.abspath(expanded))
    check_socket_path(directory / RPC_SOCKET)
    return directory


def socket_dirs(
    setting: str | os.PathLike[str] | None, port: int, environ: Mapping[str, str] = os.environ
) -> list[Path]:
    """The directories where a client looks for the sockets: `setting`, or all defaults for `port`, its own first.

    Raises ConfigError as `socket_dir`.
    """
    first = socket_dir(setting, port, environ)
    if setting is not None and os.fspath(setting):
        return [first]
    return [first, *(place / str(port) for place in run_dirs(environ)[1:])]


def check_socket_path(path: Path) -> None:
    """Raises ConfigError for a path that does not fit into a unix socket's address."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket_dir: {str(path)!r} is {length} bytes long, but a unix socket's path may have "
            f"{MAX_SOCKET_PATH_BYTES}; set --socket-dir (engines: socket_dir) to a shorter directory, "
            f"at most {MAX_SOCKET_PATH_BYTES - len(path.name) - 1} bytes",
            field="socket_dir",
        )


def segment_dir(port: int, instance_id: str = "", root: Path = SHM_ROOT) -> Path:
    """Directory of the segment's files: one per uid, port and instance id, see `own_path`.

    Raises ConfigError for a bad id.
    """
    if instance_id and not _INSTANCE_ID.fullmatch(instance_id):
        raise ConfigError(
            f"instance_id: {instance_id!r} must be 1 to 64 letters, digits, '.', '_' or '-', the first a "
            "letter or digit",
            field="instance_id",
        )
    return own_path(root / "-".join(["kvstrata", str(os.geteuid()), str(port), *filter(None, [instance_id])]))
