"""Deletes values that are not a record of their key: some media store no record where a value exists."""

from __future__ import annotations

import asyncio
import logging

from kvstrata.observability.logging import Thinning
from kvstrata.server.l2.gate import Loader

log = logging.getLogger(__name__)


class ForeignValues:
    """The deletions under way. Belongs to the event loop; the owner awaits `tasks`."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[int]] = set()
        self._thinning = Thinning()

    def delete(self, loader: Loader, keys: list[bytes]) -> asyncio.Task[int]:
        """Begin to delete these values of a tier."""
        task = asyncio.create_task(loader.adapter.delete(keys), name="delete-foreign")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def deleted(self, loader: Loader, keys: list[bytes], patience_s: float) -> None:
        """Delete these values of a tier; wait for that at most so long, and then let it go on.

        Who hears of a value before it is deleted may store a sound record in its place, which would be deleted.
        """
        if keys:
            await asyncio.wait([self.delete(loader, keys)], timeout=patience_s)

    def delete_other_identity(self, loader: Loader, keys: list[bytes]) -> None:
        """Begin to delete records that name another identity than that of their key, and log that there were some."""
        if keys:
            text = "%s: deleting %d records that name another identity"
            self._thinning.log(log, logging.ERROR, loader.name, text, loader.name, len(keys))
            self.delete(loader, keys)
