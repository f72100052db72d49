"""Probes the directories of tiers, and keeps tiers from being used whose directory is gone or cannot be written to.

    gone, replaced, unreachable    nothing is asked: lookups count the tier's chunks as absent, and it gets none
    read_only                      its records are served, and it gets no new ones

Each change of a tier's state has one line in the log.  A probe runs on a thread of its own, since a file system may not
answer for ever; a tier whose probe has not ended is not probed again.
"""

from __future__ import annotations

import asyncio
import logging

from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.policy.reasons import MEDIUM_GONE, READ_ONLY
from kvstrata.process.threads import on_a_thread
from kvstrata.server.l2.tiers import Tier, TierSet
from kvstrata.storage.folder import FolderState, WatchedFolder
from kvstrata.storage.stack import Stack

PROBE_S = 5.0
"""Pause between two rounds of probes."""
ANSWER_S = 3.0
"""A file system that has not answered a probe by then is unreachable."""

_WHAT = {
    FolderState.READ_ONLY: "its directory cannot be written to",
    FolderState.GONE: "its directory was deleted, or the file system was unmounted",
    FolderState.REPLACED: "another directory lies at its path, which is not the one that it opened",
    FolderState.UNREACHABLE: "its file system does not answer, or answers with an error",
}
_RENEW = "restart the server to open it anew"
_NOT_USED = "lookups count its chunks as absent, and it gets no new ones"
_MEANS = {FolderState.READ_ONLY: "its records are served, and it gets no new ones"}


class MediaWatch:
    """The probes of all tiers that have a directory. Belongs to the event loop."""

    def __init__(self, tiers: TierSet, *, probe_s: float = PROBE_S) -> None:
        self._tiers = tiers
        self._probe_s = probe_s
        self._probes: dict[WatchedFolder, asyncio.Future[FolderState]] = {}
        """Probes that have not ended."""
        self._log = EventLog("adapters")

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(self._probe_s)

    async def round(self) -> None:
        """Probe each directory once, for ANSWER_S at most."""
        watched = {tier.configured.folder: tier for tier in self._tiers if tier.is_open}
        asked = [
            (folder, tier, self._probe(folder)) for folder, tier in watched.items() if folder is not None
        ]
        if not asked:
            return
        await asyncio.wait({probe for _, _, probe in asked}, timeout=patience(ANSWER_S))
        for folder, tier, probe in asked:
            self._take(tier, folder, probe.result() if probe.done() else FolderState.UNREACHABLE)

    def _probe(self, folder: WatchedFolder) -> asyncio.Future[FolderState]:
        running = self._probes.get(folder)
        if running is None:
            running = self._probes[folder] = on_a_thread(folder.look, "probe-folder")
            running.add_done_callback(lambda _: self._probes.pop(folder, None))
        return running

    def _take(self, tier: Tier, folder: WatchedFolder, now: FolderState) -> None:
        before, folder.state = folder.state, now
        if now is before:
            return
        guard, path = tier.configured.adapter, folder.path
        if now is FolderState.WELL:
            guard.open_again()
            stays = _stays_read_only(tier.configured)
            level = logging.WARNING if stays else logging.INFO
            note = f"the medium takes no more records after a failed write; {_RENEW}" if stays else ""
            self._say(level, "medium_back", tier, path=path, **({"advice": note} if note else {}))
            return
        guard.shut(
            READ_ONLY if now is FolderState.READ_ONLY else MEDIUM_GONE, loads=now is FolderState.READ_ONLY
        )
        self._say(
            logging.ERROR, f"medium_{now}", tier, path=path, what=_WHAT[now], meaning=_MEANS.get(now, _NOT_USED),
            advice=_advice(now),
        )  # fmt: skip

    def _say(self, level: int, event: str, tier: Tier, **fields: object) -> None:
        self._log.repeated(level, f"{event} {tier.name}", event, adapter=tier.name, **fields)


def _advice(now: FolderState) -> str:
    if now is FolderState.READ_ONLY:
        return "make it writable, or mount its file system read-write; the tier is then used again by itself"
    if now is FolderState.UNREACHABLE:
        return (
            "look at the file system and its disk or server; the tier is used again by itself when it answers"
        )
    if now is FolderState.GONE:
        return (
            f"mount the file system again, and the tier is used again by itself; if it was deleted, {_RENEW}"
        )
    return f"mount the old one again, and the tier is used again by itself; to use the new one, {_RENEW}"


def _stays_read_only(stack: Stack) -> bool:
    """Whether the medium itself has given up writing, as the disk log does when a sync fails."""
    return bool(stack.status().get("numbers", {}).get("read_only"))
