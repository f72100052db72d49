"""Keeps what the gateway has learned over its restarts: takes it from the parts, and gives it back to them at a start.

    changed ─▶ taken ─▶ written by a thread (state_file.py) ─▶ saved
                           └─ the disk is full, … ─▶ failing, until a later save succeeds

It is saved every SAVE_S if anything that is kept has changed, and once more at a stop; after a kill what was learned in
the last SAVE_S is missing.

1. What the loop does for it does not grow with what is known: prefixes and stored responses are taken as what was
   touched since the last time, and the thread keeps a mirror of their order; samples are read by the thread.
2. The thread works in short pieces, so that no stream waits for it.
3. A save that fails is tried again after SAVE_S, whether something has changed or not, and is shown until one succeeds.

An engine that was restarted while the gateway was down is still taken for warm: its KV events, or the cached tokens
that it reports, correct that.
"""

from __future__ import annotations

import asyncio
import collections
import fcntl
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvstrata.config.private_dir import make_private_dir
from kvstrata.errors import ConfigError
from kvstrata.gateway.fleet import Fleet
from kvstrata.gateway.prefixes import MAX_TOUCHED, Prefixes, Touched
from kvstrata.gateway.reading import Reader
from kvstrata.gateway.residency.knowledge import Pace, Residency
from kvstrata.gateway.state_file import (
    NAME,
    Piece,
    State,
    StateRefused,
    read_state,
    remove_unfinished,
    write_state,
)
from kvstrata.gateway.stored_responses import MAX_RESPONSES
from kvstrata.observability.logging import EventLog

SAVE_S = 2.0
MAX_PIECES = MAX_TOUCHED
"""Pieces that are kept, the latest used: 8 million tokens."""
AT_A_TIME = 256
"""Pieces between two pauses of the thread, in which others may run."""
PAUSE_S = 0.000_2
FIELD = "state_dir"
T = TypeVar("T")


class Mirror:
    """The order of pieces and responses, as they were touched. Belongs to the thread that writes."""

    def __init__(self) -> None:
        self.pieces: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self.responses: collections.OrderedDict[str, str] = collections.OrderedDict()

    def apply(self, touched: Touched, responses: Iterable[tuple[str, str]]) -> None:
        """What was touched since the last time."""
        for key in paused(itertools.chain.from_iterable(touched)):
            self.pieces[key] = None
            self.pieces.move_to_end(key)
        while len(self.pieces) > MAX_PIECES:
            self.pieces.popitem(last=False)
        for response, engine in paused(responses):
            self.responses[response] = engine
            self.responses.move_to_end(response)
        while len(self.responses) > MAX_RESPONSES:
            self.responses.popitem(last=False)

    def known(self, prefixes: Prefixes, generations: dict[str, int], now_s: float) -> Iterator[Piece]:
        """The pieces that engines of these generations have, with pauses; those that are forgotten are dropped."""
        gone = []
        for key in paused(self.pieces):
            engines = prefixes.computed_by(key, generations)
            if engines:
                yield Piece(key, [(name, max(0.0, now_s - at_s)) for name, at_s in engines])
            elif key not in prefixes:
                gone.append(key)
        for key in gone:
            del self.pieces[key]


class Keeper:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        folder: str,
        fleet: Fleet,
        prefixes: Prefixes,
        reader: Reader,
        residency: Residency,
        now_s: Callable[[], float],
    ) -> None:
        """Take the folder for this process. Raises ConfigError."""
        self._folder = Path(folder)
        self._fleet = fleet
        self._prefixes = prefixes
        self._reader = reader
        self._residency = residency
        self._now_s = now_s
        self._mirror = Mirror()
        self._writing = threading.Lock()
        self._saved: object = None
        """The numbers of changes that the file has; None: none, or not all of them."""
        self._saves = 0
        self._error = ""
        """Why the last save failed."""
        self._log = EventLog("state")
        self._lock = self._locked()
        remove_unfinished(self._folder)

    @property
    def failing(self) -> bool:
        """Whether what was learned lately could not be saved."""
        return bool(self._error)

    def page(self) -> dict[str, Any]:
        """What is kept, for operators."""
        return {"path": str(self._folder / NAME), "saves": self._saves, "error": self._error}

    def restore(self, *, secret: bytes | None = None) -> None:
        """Give what is kept to the parts. `secret`: what keys of pieces must have been made with; None: any."""
        try:
            state = read_state(self._folder)
        except StateRefused as error:
            path = self._folder / NAME
            self._log.warning(
                "state_refused", path=path, reason=str(error), note="the gateway starts without it"
            )
            return
        if state is None:
            return
        down_s = max(0.0, time.time() - state.saved_s)
        if secret is None:
            self._reader.secret = state.secret
        if secret in (None, state.secret):
            now_s = self._now_s()
            for piece in state.pieces[-MAX_PIECES:]:
                for engine, age_s in piece.engines:
                    self._prefixes.note([piece.key], engine, 0, now_s - age_s - down_s, computed=True)
        for response, engine in state.responses:
            self._reader.responses.note(response, engine, ours=False)
        self._fleet.rates.restore(state.rates)
        for engine, tier, tokens, seconds in state.load_rates:
            self._fleet.load_rates.observe(engine, tier, tokens, seconds)
        self._residency.restore(state.paces)
        self._log.info("state_restored", pieces=len(state.pieces), age_s=round(down_s, 1))

    async def keep(self) -> None:
        """Save again and again, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Save if something has changed since the last save, or if that has failed."""
        loop = asyncio.get_running_loop()
        paces = await loop.run_in_executor(None, self._residency.paces)
        changes = self._changes(paces)
        if changes == self._saved:
            return
        self._saved = None
        if await loop.run_in_executor(None, self._save, self._taken(paces)):
            self._saved = changes

    async def close(self) -> None:
        """Save for the last time, and leave the folder."""
        await self.save()
        os.close(self._lock)

    def _changes(self, paces: list[Pace]) -> object:
        """Differs from what it was if something that is kept has changed."""
        fleet, responses = self._fleet, self._reader.responses
        return (
            self._prefixes.changes,
            responses.changes,
            fleet.rates.changes,
            fleet.load_rates.changes,
            paces,
        )

    def _taken(self, paces: list[Pace]) -> Callable[[], None]:
        """What the thread is to do."""
        fleet, prefixes, mirror = self._fleet, self._prefixes, self._mirror
        targets = [one for engine in fleet.engines.values() for one in engine.targets]
        generations = {one.name: one.generation for one in targets}
        touched, fresh = prefixes.take_touched(), self._reader.responses.take_fresh()
        now_s, saved_s, secret = self._now_s(), time.time(), self._reader.secret

        def write() -> None:
            mirror.apply(touched, fresh)
            write_state(
                self._folder,
                State(saved_s, secret, [], [], [], [], paces),
                pieces=mirror.known(prefixes, generations, now_s),
                responses=paused(mirror.responses.items()),
                rates=paused(fleet.rates.kept()),
                load_rates=paused(fleet.load_rates.kept()),
            )

        return write

    def _save(self, write: Callable[[], None]) -> bool:
        """Write the file; on a thread. Returns whether it is written."""
        path = self._folder / NAME
        try:
            with self._writing:  # at a stop the thread of a save that was cancelled may still be at it
                write()
        except OSError as error:
            self._error = error.strerror or str(error)
            self._log.repeated(logging.WARNING, "save", "state_not_saved", path=path, reason=self._error)
            return False
        self._saves += 1
        if self._error:
            self._error = ""
            self._log.info("state_saved_again", path=path)
        return True

    def _locked(self) -> int:
        """The descriptor of the folder's lock, which ends with this process."""
        make_private_dir(self._folder, FIELD)
        try:
            fd = os.open(self._folder / "gateway.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{FIELD}: {self._folder}: {error.strerror}; give a folder that this user can write to",
                field=FIELD,
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise ConfigError(
                f"{FIELD}: {self._folder} is used by another gateway that runs; give each its own",
                field=FIELD,
            ) from None
        return fd


def paused(items: Iterable[T]) -> Iterator[T]:
    """The same, on a thread, with pauses in which others may run."""
    for number, item in enumerate(items):
        if not number % AT_A_TIME:
            time.sleep(PAUSE_S)
        yield item
