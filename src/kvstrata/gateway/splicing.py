"""Answers that a thread passes on, from the engine's socket to the client's (native/core.pyi).

    both sockets lent ─▶ the thread reads, measures and writes ─▶ its end is told here ─▶ both taken back

The event loop does nothing for a token, so a new request need not wait until a step of all streams was passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.gateway.engine_link import Answer
from kvstrata.native.core import Splice, Splicer
from kvstrata.observability.numbers import SECONDS_BUCKETS

if TYPE_CHECKING:
    from kvstrata.gateway.connections import GatewayConnection

SILENT = "silent"
ENGINES_FAULT = frozenset(("engine_closed", "engine_failed", "not_chunked", SILENT))
"""Ends after which the client can be told what happened."""


class Splices:
    """All answers of a gateway that a thread passes on. Belongs to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._native = Splicer(SECONDS_BUCKETS)
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._loop.add_reader(self._native.event_fd, self._take)

    async def pass_on(
        self,
        answer: Answer,
        client: GatewayConnection,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        silence_s: float,
        events: bool,
    ) -> Splice | None:
        """Pass an answer on; None if it cannot be lent.

        After an end that is neither `done` nor an engine's fault the caller cuts the client's connection.
        """
        splice: Splice | None = None

        def stop() -> None:
            if splice is not None:
                self._native.stop(splice)

        client_fd = client.lend(stop) if answer.lendable else None
        if client_fd is None:
            return None
        engine_fd, coded = answer.lend(stop)
        try:
            splice = self._native.start(
                engine_fd,
                client_fd,
                client.head(status, headers),
                coded,
                silence_s=silence_s,
                stalled_s=client.bounds.stalled_s,
                events=events,
            )
            if not splice.is_over:
                await self._ended(splice)
        finally:
            answer.taken_back(whole=splice is not None and splice.exact)
            client.taken_back()
        if splice.end == "done":
            client.answered()
        elif splice.end == "stalled":
            client.bounds.close(client, "stalled")
        return splice

    async def _ended(self, splice: Splice) -> None:
        """Wait for the end, even when cancelled: the sockets are not ours before it."""
        cancelled: asyncio.CancelledError | None = None
        while not splice.is_over:
            ended = self._ends[splice.number] = self._loop.create_future()
            try:
                await ended
            except asyncio.CancelledError as error:
                cancelled = error
                self._native.stop(splice)
        if cancelled is not None:
            raise cancelled

    def _take(self) -> None:
        for splice in self._native.take_ended():
            ended = self._ends.pop(splice.number)
            if not ended.done():
                ended.set_result(None)

    async def close(self) -> None:
        """End all that are under way, and give their sockets back."""
        self._loop.remove_reader(self._native.event_fd)
        self._native.close()
        self._take()
