"""The key of a cluster without key files, which all processes of one user on one host find by themselves.

    RUN_DIR/cluster.keys      mode 0600; RUN_DIR is private_dir.shared_run_dirs()

The first process that needs the file makes it, with the same form as a key file of members (zmq_curve.py).  Invariants:

1. Controllers listen with its secret.  So instances believe no process that cannot read the file.
2. The public key that belongs to the secret is no less secret: no process shows it, and CURVE never sends it in clear.
   A client seals the first message of each handshake (HELLO) for it, and a controller ends the handshake if the seal
   is wrong.  So a controller may let in clients of any key, and tell instances apart by keys of their own.
3. Readers connect to peers with the secret itself, and peers let in no other client.
4. Each process that uses the file keeps it: what cleans /tmp removes files that nobody has touched for days.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from kvstrata.config.private_dir import check_private_dir, make_private_dir, shared_run_dirs
from kvstrata.config.private_file import write_private_file
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.zmq_curve import ClusterKeys, new_secret, read_cluster_keys
from kvstrata.text import remember_secret

FILE = "cluster.keys"
TOUCH_S = 5.0
"""Interval at which the file is marked as used, and put back if it is gone."""
ADVICE = "processes of other users or hosts need key files: kvstrata cluster init (docs/cluster.md, Security)"
"""What logs say to a process that is refused because it does not have the key."""


class SharedKey:
    """The file, and the keys in it."""

    def __init__(self, field: str, environment: Mapping[str, str] = os.environ) -> None:
        """Find the file, or make it. Raises ConfigError, which names `field`, a setting that would do without."""
        places = [folder / FILE for folder in shared_run_dirs(environment)]
        self.path = next((path for path in places if _is_there(path)), places[0])
        try:
            make_private_dir(self.path.parent, field)
            self._put(new_secret())
        except OSError as error:
            raise ConfigError(
                f"{field}: no file is given, and the key that this user's processes share cannot be kept in "
                f"{self.path}: {error.strerror}; make room there, or give key files (kvstrata cluster init)",
                field=field,
            ) from None
        try:
            self.keys = read_cluster_keys(str(self.path), field)
        except ConfigError as error:
            raise ConfigError(
                f"{error.message}. It is the key that this user's processes share: you may delete it, and then restart "
                "the controller and all instances, which make another one",
                field=field,
            ) from None
        remember_secret(self.keys.server.decode())

    def of_member(self, secret: bytes) -> ClusterKeys:
        """Keys for an instance that proves its id by a secret of its own."""
        return self.keys._replace(secret=secret)

    def touch(self) -> None:
        """Mark the file as used; put it back if it is gone. Raises OSError, ConfigError."""
        try:
            os.utime(self.path, follow_symlinks=False)
        except FileNotFoundError:
            make_private_dir(self.path.parent, FILE)
            self._put(self.keys.secret)

    async def keep(self) -> None:
        """Keep the file until cancelled."""
        loop, log = asyncio.get_running_loop(), EventLog("cluster")
        while True:
            await asyncio.sleep(TOUCH_S)
            try:
                await loop.run_in_executor(None, self.touch)
            except (OSError, ConfigError) as error:
                log.warning("cluster_key_not_kept", path=self.path, reason=error)

    def _put(self, secret: bytes) -> None:
        """Write the file, unless it exists. Raises OSError."""
        if not os.path.lexists(self.path):
            text = f"# shared by the processes of this user; see docs/cluster.md#security\nsecret {secret.decode()}\n"
            with contextlib.suppress(FileExistsError):  # another process was quicker
                write_private_file(self.path, text.encode(), overwrite=False)


def _is_there(path: Path) -> bool:
    """Whether there is such a file in a folder of ours: another user may have made a folder of the name in /tmp."""
    try:
        check_private_dir(path.parent, FILE)
    except ConfigError:
        return False
    return os.path.lexists(path)
