"""The keys of an instance in a cluster: from its key file, its user's key (rpc/zmq_curve.py), or the open key.

An instance without a key file proves its id to controllers by a key of its own, which only its user can read:

    $XDG_STATE_HOME/kvstrata/members/ID.key     beside the state of controllers: both survive a restart of the host
    SOCKET_DIR/member.key                       if the user has no such folder, or it cannot be written

The key is made at the first start.  Controllers refuse an instance with a known id and another key, so after deleting
the file, remove the id there too (`kvstrata ctl cluster remove ID`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvstrata.config.model import ServerSettings
from kvstrata.config.private_dir import make_private_dir, user_folder
from kvstrata.config.private_file import read_private_file, write_private_file
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.zmq_curve import (
    ADVICE,
    ClusterKeys,
    KeyFile,
    Keys,
    SharedKey,
    new_secret,
    open_keys,
    public_of,
    read_cluster_keys,
)
from kvstrata.server.plan import InstanceFacts
from kvstrata.text import remember_secret

_FIELD = "controller.curve_file"


class MemberKeys(NamedTuple):
    """The keys of one instance, and the texts about them."""

    own: ClusterKeys
    """For connections to controllers."""
    listening: Keys
    """For the control port."""
    file: str
    """The key file by which this instance reads from peers; empty for an open cluster."""
    refused_note: str
    """The log's advice about a client with other keys."""
    refused_why: str
    """The log's explanation of a controller that ends the handshake."""


def member_keys(
    settings: ServerSettings, facts: InstanceFacts, supervisor: Supervisor, environment: Mapping[str, str]
) -> MemberKeys:
    """The keys by these settings; files of the user are made if missing, and kept by a task. Raises ConfigError."""
    path = settings.controller.curve_file
    if path:
        file = KeyFile(path, functools.partial(read_cluster_keys, field=_FIELD))
        why = (
            "it does not list this instance's key, or has keys of another cluster (docs/cluster.md, Security)"
        )
        return MemberKeys(file.now(), file, path, "", why)
    secret = own_secret(facts.instance_id, facts.socket_dir, environment)
    if settings.security.insecure:
        EventLog("cluster").warning(
            "cluster_ports_open",
            note="--insecure: this instance trusts any process on the controller's port, and lets anyone who can reach "
            "its port for peers read its chunks; start all processes of the cluster without it, or give key files "
            "(kvstrata cluster init)",
        )
        keys = open_keys(secret)
        why = "this instance was started with --insecure, and the controller without; start both in the same way"
        return MemberKeys(keys, keys, "", "", why)
    shared = SharedKey(_FIELD, environment)
    supervisor.spawn(shared.keep(), "cluster-key")
    why = f"it does not have the key in {shared.path}, or runs with --insecure; {ADVICE}"
    own = shared.keys._replace(secret=secret)  # the instance proves its id with this key
    return MemberKeys(own, own, str(shared.path), ADVICE, why)


def own_secret(instance_id: str, socket_dir: Path, environment: Mapping[str, str]) -> bytes:
    """The secret key of this instance, for a cluster without key files; made if missing. Raises ConfigError."""
    state = user_folder(environment, "XDG_STATE_HOME", ".local/state")
    if state:
        try:
            return _kept_in(Path(state) / "kvstrata" / "members" / f"{instance_id}.key")
        except OSError as error:
            EventLog("cluster").warning("own_key_in_socket_dir", folder=state, reason=error.strerror)
    path = socket_dir / "member.key"
    try:
        return _kept_in(path)
    except OSError as error:
        raise ConfigError(
            f"{_FIELD}: no file is given, and this instance's own key cannot be kept in {path}: {error.strerror}; set "
            "XDG_STATE_HOME to a folder that this user may write",
            field=_FIELD,
        ) from None


def _kept_in(path: Path) -> bytes:
    """The secret key in this file, or a new one written to it. Raises OSError, ConfigError for a damaged file."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_private_dir(path.parent, _FIELD)
        with contextlib.suppress(FileExistsError):  # another process of this instance was faster
            write_private_file(path, new_secret() + b"\n", overwrite=False)
    secret = read_private_file(str(path), _FIELD).strip()
    remember_secret(secret)
    try:
        public_of(secret.encode())
    except ValueError:
        raise ConfigError(
            f"{_FIELD}: {path} is damaged: it contains no CURVE key; delete it, and release the instance's id "
            "(kvstrata ctl cluster remove)",
            field=_FIELD,
        ) from None
    return secret.encode()
