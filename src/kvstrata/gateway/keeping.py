"""Keeps what the gateway has learned over its restarts: takes it from the parts, and gives it back to them at a start.

A thread writes it (state_file.py) every SAVE_S if something has changed, and once more at a stop; after a kill what was
learned in the last SAVE_S is missing.  The loop only copies the names of what is to be written, at most MAX_PIECES of
them; the thread makes the rest in short pieces, so that no stream waits for it.

An engine that was restarted while the gateway was down is still taken for warm: its KV events, or the cached tokens
that it reports, correct that.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.config.private_dir import make_private_dir
from kvstrata.errors import ConfigError
from kvstrata.gateway.fleet import Fleet
from kvstrata.gateway.prefixes import Prefixes
from kvstrata.gateway.reading import Reader
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.state_file import NAME, Piece, State, StateRefused, read_state, write_state
from kvstrata.observability.logging import EventLog

SAVE_S = 2.0
MAX_PIECES = 1 << 15
"""Pieces that are kept, the latest used: 8 million tokens."""
AT_A_TIME = 256
"""Pieces between two pauses of the thread, in which others may run."""
PAUSE_S = 0.000_2
FIELD = "state_dir"


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
        self._saved = -1
        """The number of changes that the file has."""
        self._log = EventLog("state")
        self._lock = self._locked()

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
        self._reader.restore(state.responses)
        self._fleet.rates.restore(state.rates)
        for engine, tier, tokens, seconds in state.load_rates:
            self._fleet.load_rates.observe(engine, tier, tokens, seconds)
        self._residency.usual(state.block_life_s, state.event_lag_s)
        self._log.info("state_restored", pieces=len(state.pieces), age_s=round(down_s, 1))

    async def keep(self) -> None:
        """Save again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAVE_S)
            changes = self._prefixes.changes
            if changes != self._saved:
                await loop.run_in_executor(None, self._save, self._taken())
                self._saved = changes

    async def close(self) -> None:
        """Save for the last time, and leave the folder."""
        await asyncio.get_running_loop().run_in_executor(None, self._save, self._taken())
        os.close(self._lock)

    def _taken(self) -> Callable[[], State]:
        """What the thread needs to make the state."""
        keys, now_s, saved_s = self._prefixes.latest(MAX_PIECES), self._now_s(), time.time()
        targets = [one for engine in self._fleet.engines.values() for one in engine.targets]
        generations = {one.name: one.generation for one in targets}
        rates, load_rates = self._fleet.rates.kept(), self._fleet.load_rates.kept()
        responses, secret = self._reader.responses(), self._reader.secret
        life_s, lag_s = self._residency.block_life_s, self._residency.event_lag_s

        def made() -> State:
            pieces = []
            for number, key in enumerate(keys):
                if not number % AT_A_TIME:
                    time.sleep(PAUSE_S)
                found = self._prefixes.computed_by(key, generations)
                if found:
                    pieces.append(Piece(key, [(name, max(0.0, now_s - at_s)) for name, at_s in found]))
            return State(saved_s, secret, pieces, responses, rates, load_rates, life_s, lag_s)

        return made

    def _save(self, made: Callable[[], State]) -> None:
        """Write the file; on a thread."""
        try:
            write_state(self._folder, made())
        except OSError as error:
            self._log.repeated(
                logging.WARNING, "save", "state_not_saved", path=self._folder / NAME, reason=str(error)
            )

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
