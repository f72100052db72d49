"""The transfer engine of a tier that reads peers, opened at the start, or as soon as a network device can be used.

UCX, and NIXL with it, opens no engine while no network device has a link, and uses only the devices that had one when
the engine was opened.  So opening is tried again only while no engine is open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstrata.errors import TransferError
from kvstrata.p2p.engines.base import Region, TransferEngine
from kvstrata.tiers.base import MAX_REMARK_CHARS

log = logging.getLogger(__name__)

RETRY_S = 10.0
"""Time between two tries to open an engine."""


class PeerEngine:
    """See the module. Belongs to the loop."""

    def __init__(self, name: str, make: Callable[[], TransferEngine]) -> None:
        """`make` may raise TransferError."""
        self.metadata = b""
        """The metadata by which peers reach the memory; empty while no engine is open."""
        self._name = name
        self._make = make
        self._engine: TransferEngine | None = None
        self._opening: asyncio.Task[None] | None = None
        self._why_not = ""

    @property
    def current(self) -> TransferEngine:
        """The engine for connections and reads. Raises TransferError while none is open."""
        if self._engine is None:
            raise TransferError("no network device of this instance can be used", field="engine")
        return self._engine

    async def open(self, region: Region) -> None:
        """Open the engine. Raises TransferError.

        If only a usable network device is missing, that is logged instead, and a task tries again every RETRY_S.
        """
        try:
            await self._open(region)
        except TransferError as error:
            if error.field != "network":
                raise
            self._why_not = error.message[:MAX_REMARK_CHARS]
            log.warning(
                "%s: no peers are read until a network device can be used: %s", self._name, error.message
            )
            self._opening = asyncio.create_task(self._retry(region), name=f"{self._name}-engine")

    def remarks(self) -> dict[str, str]:
        """Why no engine is open."""
        return {"engine": self._why_not} if self._why_not else {}

    async def close(self) -> None:
        """Try no more, and close the engine. Idempotent."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._engine is not None:
            await self._engine.close()

    async def _open(self, region: Region) -> None:
        engine = self._make()
        try:
            self.metadata = await engine.open(region)
        except asyncio.CancelledError:
            await engine.close()
            raise
        self._engine = engine

    async def _retry(self, region: Region) -> None:
        while self._engine is None:
            await asyncio.sleep(RETRY_S)
            try:
                await self._open(region)
            except (TransferError, OSError, RuntimeError) as error:  # RuntimeError: no thread for native code
                self._why_not = str(error)[:MAX_REMARK_CHARS]
        self._why_not = ""
        log.info("%s: the transfer engine is open, and peers are read", self._name)
