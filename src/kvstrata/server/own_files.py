"""Looks after the files by which processes find a running server, which others may remove.

logind removes /run/user/UID at the user's last logout, and with RemoveIPC what the user has in /dev/shm;
systemd-tmpfiles removes what is old in /tmp.  Engines that are attached notice nothing, but no further one could
attach, and the next server would find no pool.

    the socket       is made anew in its folder, or in the default one where that cannot be made
    server.pid       is made and locked anew; if another server has it, nothing more is made anew
    L1's files       have no name any more: the keeper keeps the memory for the next server that it starts

Everything is marked as used once an hour, so that what goes by age leaves it alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from kvstrata.config.private_dir import make_private_dir
from kvstrata.errors import ConfigError, KvstrataError
from kvstrata.memory.attach.server import AttachServer
from kvstrata.memory.paths import RPC_SOCKET, socket_dir
from kvstrata.memory.segment import Segment
from kvstrata.observability.logging import EventLog

LOOK_S = 5.0
TOUCH_ROUNDS = 720
_ADVICE = (
    "keep the socket directory where nobody cleans up: --socket-dir below a RuntimeDirectory of systemd, or "
    "`loginctl enable-linger`; and see configs/systemd/kvstrata.tmpfiles.conf"
)


class OwnFiles:
    """The files of one server. Belongs to the event loop."""

    def __init__(self, folder: Path, port: int, segment: Segment, attach: AttachServer) -> None:
        """`folder`: of the socket. `port` names the default one."""
        self._folder = folder
        self._port = port
        self._segment = segment
        self._attach = attach
        self._rounds = 0
        self._log = EventLog("server")

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.round()

    async def round(self) -> None:
        """Look at every file once, and make anew what is gone."""
        try:
            if not self._segment.has_lock:
                await self._take_folder()
            if not self._attach.listens():
                path = self._folder / RPC_SOCKET
                self._attach.listen(path)
                self._say("socket_made_anew", path=path, note="it was removed")
            if self._segment.files_are_gone():
                self._segment.hold()
                note = "its files were removed; the keeper keeps it for the next server that it starts"
                self._say("l1_held", note=note)
        except (OSError, KvstrataError) as error:
            self._log.repeated(
                logging.ERROR, "lost", "own_files_lost", reason=error, advice=_ADVICE,
                meaning="no further engine can attach, or the next server begins with an empty L1",
            )  # fmt: skip
        if self._rounds % TOUCH_ROUNDS == 0:
            for path in (*self._segment.paths(), *self._folder.glob("*"), self._folder, self._folder.parent):
                with contextlib.suppress(OSError):
                    os.utime(path, follow_symlinks=False)
        self._rounds += 1

    async def _take_folder(self) -> None:
        """Make the folder and lock it. Raises KvstrataError: another server has it, or no folder can be made."""
        folder = self._folder
        try:
            make_private_dir(folder, "socket_dir")
        except ConfigError:
            folder = socket_dir(None, self._port)
            make_private_dir(folder, "socket_dir")
        self._segment.lock_again(folder)
        self._say("socket_dir_made_anew", path=folder, note="the folder, or server.pid in it, was removed")
        self._folder = folder

    def _say(self, event: str, **fields: object) -> None:
        self._log.warning(event, **fields, advice=_ADVICE)
