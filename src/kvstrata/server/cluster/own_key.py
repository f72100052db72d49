"""The key by which an instance without a key file proves its id to controllers; only its user can read it.

    $XDG_STATE_HOME/kvstrata/members/ID.key     beside the state of controllers: both survive a restart of the host
    SOCKET_DIR/member.key                       if the user has no such folder, or it cannot be written

The key is made at the first start.  Controllers refuse an instance with a known id and another key, so whoever deletes
the file has the id forgotten there too (`kvstrata ctl cluster remove ID`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from kvstrata.config.folders import user_folder
from kvstrata.config.private_dir import make_private_dir
from kvstrata.config.private_file import read_private_file, write_private_file
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.zmq_curve import ClusterKeys, new_secret, open_keys, public_of
from kvstrata.text import remember_secret

_FIELD = "controller.curve_file"


def own_keys(instance_id: str, socket_dir: Path, environment: Mapping[str, str]) -> ClusterKeys:
    """The keys of this instance for a cluster without key files; its file is made if missing. Raises ConfigError."""
    state = user_folder(environment, "XDG_STATE_HOME", ".local/state")
    if state:
        try:
            return open_keys(_kept_in(Path(state) / "kvstrata" / "members" / f"{instance_id}.key"))
        except OSError as error:
            EventLog("cluster").warning("own_key_in_socket_dir", folder=state, reason=error.strerror)
    path = socket_dir / "member.key"
    try:
        return open_keys(_kept_in(path))
    except OSError as error:
        raise ConfigError(
            f"{_FIELD}: no file is given, and this instance's own key cannot be kept in {path}: {error.strerror}; set "
            "XDG_STATE_HOME to a folder that this user may write",
            field=_FIELD,
        ) from None


def _kept_in(path: Path) -> bytes:
    """The secret key in this file, or a new one that is put there. Raises OSError, ConfigError for a damaged file."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_private_dir(path.parent, _FIELD)
        with contextlib.suppress(FileExistsError):  # another process of this instance was quicker
            write_private_file(path, new_secret() + b"\n", overwrite=False)
    secret = read_private_file(str(path), _FIELD).strip()
    remember_secret(secret)
    try:
        public_of(secret.encode())
    except ValueError:
        raise ConfigError(
            f"{_FIELD}: {path} is damaged: it holds no CURVE key; delete it, and let controllers forget the instance "
            "(kvstrata ctl cluster remove)",
            field=_FIELD,
        ) from None
    return secret.encode()
