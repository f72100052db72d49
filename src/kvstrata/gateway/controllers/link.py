"""The link to one controller: heartbeats with what it tells of instances, and questions with a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.gateway.controllers.directory import Directory
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge, histogram
from kvstrata.patience import patience
from kvstrata.rpc.cluster_wire import (
    Done,
    GatewayBeat,
    GatewayHeard,
    Holding,
    Holdings,
    HoldingsReply,
    Replicate,
)
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import Links
from kvstrata.tiers.breaker import Breaker, BreakerState

BEAT_S, BEAT_MAX_S = 0.5, 30.0
"""Bounds of the interval that a controller names for heartbeats."""
ANSWER_S = 2.0
"""Time for the answer to a heartbeat."""
STALE_BEATS = 5
"""Heartbeats after which what was told counts no more, unless one of them was answered."""
FAILURES, AGAIN_S, AGAIN_MAX_S = 4, 1.0, 30.0
"""Late or wrong answers in a row after which a controller is asked only now and then, and how often."""
BOUNDS = (0.000_25, 0.000_5, 0.001, 0.001_5, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1)


class ControllerLink(Numbers):
    """See the module. Belongs to the event loop."""

    questions = counter(
        "Prompts about which a controller was asked: `answered`, `late` (the request went on without), `failed`.",
        "outcome",
        name="controller_questions",
    )
    seconds = histogram(
        "Time until answers came that were in time.", name="controller_answer_seconds", bounds=BOUNDS
    )
    asks = gauge(
        "1 while a controller is connected and asked, else 0.",
        lambda self: self._asks(),
        name="controller_up",
    )

    def __init__(self, url: str, links: Links, keys: ClusterKeys, now_s: Callable[[], float]) -> None:
        """Raises Unavailable if `url` is not an endpoint."""
        self.url = url
        self._now_s = now_s
        self._beat_s = ANSWER_S
        self._wake = asyncio.Event()
        self._breaker = Breaker(FAILURES, AGAIN_S, AGAIN_MAX_S)
        self._log = EventLog("controllers")
        self.up = False
        """Whether there is a connection."""
        self.directory: Directory | None = None
        self.questions.update(answered=0, late=0, failed=0)
        self.asked = 0
        self._complaint = ""
        self._link = links.ask(url, keys=keys, changed=self._changed, refused=self._refused)

    @property
    def usable(self) -> bool:
        """Whether a question may be asked now."""
        return self.up and self.known is not None and self._breaker.would_admit(self._now_s())

    def _asks(self) -> bool:
        """Whether prompts are asked about as they come."""
        return self.up and self.known is not None and self._breaker.state is BreakerState.CLOSED

    @property
    def known(self) -> Directory | None:
        """What the controller told lately; None: nothing."""
        found = self.directory
        if found is None or self._now_s() - found.heard_s > patience(STALE_BEATS * self._beat_s):
            return None
        return found

    async def holdings(self, questions: list[Holdings], deadline_s: float) -> list[list[Holding]] | None:
        """The answers to questions that are asked at once; None if they do not all come within `deadline_s`."""
        began_s = self._now_s()
        if not self._breaker.admit(began_s):
            return None
        self.asked += 1
        try:
            async with asyncio.timeout(deadline_s):
                # One after the other: nearly always there is one.
                replies = [await self._link.ask(one, HoldingsReply, ANSWER_S) for one in questions]
        except asyncio.CancelledError:
            if self._breaker.state is BreakerState.PROBING:
                self._breaker.ended(False, self._now_s())
            raise
        except TimeoutError:
            self._failed("late")
            return None
        except (ClusterFailure, Unavailable) as error:
            self._failed("failed")
            self._log.repeated(
                logging.WARNING, f"{self.url} asked", "controller_fails", url=self.url, reason=error.message
            )
            return None
        self.questions["answered"] += 1
        self.seconds.add(self._now_s() - began_s)
        self._breaker.ended(True, self._now_s())
        if self.directory is not None and replies and replies[0].epoch != self.directory.epoch:
            self._wake.set()
        return [reply.holdings for reply in replies]

    async def replicate(self, order: Replicate) -> str | None:
        """Order a copy; returns why it was not ordered, None if it was."""
        if not self.up:
            return "it is not connected"
        try:
            await self._link.ask(order, Done, ANSWER_S)
        except (ClusterFailure, Unavailable) as error:
            return error.message
        return None

    async def keep(self, beat: Callable[[], GatewayBeat]) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self._wake.clear()
            if self.up:
                await self._beat(beat())
            try:
                async with asyncio.timeout(self._beat_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _beat(self, beat: GatewayBeat) -> None:
        try:
            heard = await self._link.ask(beat, GatewayHeard, ANSWER_S)
        except (ClusterFailure, Unavailable) as error:
            if self._complaint != error.message:
                self._complaint = error.message
                self._log.repeated(
                    logging.WARNING, self.url, "controller_refuses", url=self.url, reason=error.message
                )
            return
        self._complaint = ""
        self._beat_s = min(max(BEAT_S, heard.beat_ms / 1000), BEAT_MAX_S)
        self.directory = Directory(heard, self._now_s())

    def page(self) -> dict[str, Any]:
        """State and counts, for operators."""
        known = self.directory
        return {
            "url": self.url,
            "connected": self.up,
            "told_ago_s": None if known is None else round(self._now_s() - known.heard_s, 3),
            "instances": 0 if known is None else len(known.instances),
            "engines": 0 if known is None else len(known.urls),
            "asks": self.asks,
            "asked": self.asked,
            **self.questions,
            "garbage": self._link.garbage_count,
        }

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def _failed(self, how: str) -> None:
        was_closed = self._breaker.state is BreakerState.CLOSED
        self.questions[how] += 1
        self._breaker.ended(False, self._now_s())
        if was_closed and self._breaker.state is BreakerState.OPEN:
            self._log.repeated(
                logging.WARNING, f"{self.url} slow", "controller_not_asked", url=self.url,
                why="it has not answered several questions in a row in time; it is tried again now and then",
            )  # fmt: skip

    def _changed(self, up: bool) -> None:
        self.up = up
        if up:
            self._wake.set()

    def _refused(self) -> None:
        why = "it ends the handshake: it does not list this gateway's key, or has keys of another cluster"
        self._log.repeated(
            logging.WARNING, f"{self.url} keys", "controller_has_other_keys", url=self.url, why=why
        )
