"""Pins that admins made through this controller: chunks that an instance was asked to keep for a while.

The instance keeps the chunks and ends the pin by its own clock.  Here is only the list, so that a pin can be named and
ended.  It is written whole to a file of its own whenever it changes, before the change is answered, so that a pin
outlives the controller; what cannot be read is left out.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import Refused

MAX_PINS = 4_096
FILE = "pins.json"
VERSION = 1


class Pin(msgspec.Struct, frozen=True):
    """Chunks that an instance was asked to keep."""

    claim: str
    instance: str
    n_keys: int
    expires_unix_ms: int


class _File(msgspec.Struct, frozen=True):
    version: int
    pins: list[Pin]


class Pins:
    """Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._path: Path | None = None
        self._failed: Callable[[Path, OSError], None] = lambda path, error: None
        self._writing = asyncio.Lock()

    async def keep_in(self, path: Path, failed: Callable[[Path, OSError], None]) -> str:
        """Go on with the pins of this file and write there from now on; why it is ignored, or empty.

        `failed` is called when a write has failed; the pins are known here all the same.
        """
        self._path, self._failed = path, failed
        try:
            content = await asyncio.get_running_loop().run_in_executor(None, path.read_bytes)
            told = msgspec.json.decode(content, type=_File)
        except FileNotFoundError:
            return ""
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"it cannot be read: {error}"
        if told.version != VERSION:
            return f"it has format version {told.version}, this controller reads {VERSION}"
        self._pins.update((pin.claim, pin) for pin in told.pins[:MAX_PINS])
        return ""

    def get(self, claim: str) -> Pin | None:
        """One that has not ended."""
        self._drop_ended()
        return self._pins.get(claim)

    def all(self) -> list[Pin]:
        """Those that have not ended, in the order in which they were made."""
        self._drop_ended()
        return list(self._pins.values())

    def check_room(self) -> None:
        """Raises Refused when there is no room for one more."""
        self._drop_ended()
        if len(self._pins) >= MAX_PINS:
            raise Refused(f"{MAX_PINS} pins are there already; end some first")

    async def add(self, pin: Pin) -> None:
        """Returns when it is on disk, or when that has failed."""
        self._pins[pin.claim] = pin
        await self._write()

    async def end(self, claim: str) -> None:
        """Returns when that is on disk, or when that has failed."""
        if self._pins.pop(claim, None) is not None:
            await self._write()

    def _drop_ended(self) -> None:
        now = self._clock.unix_ms()
        for claim in [claim for claim, pin in self._pins.items() if pin.expires_unix_ms <= now]:
            del self._pins[claim]

    async def _write(self) -> None:
        if self._path is None:
            return
        async with self._writing:
            told = msgspec.json.encode(_File(VERSION, list(self._pins.values())))
            done = asyncio.get_running_loop().run_in_executor(None, replace_file, self._path, told)
            try:
                await asyncio.shield(done)
            except OSError as error:
                self._failed(self._path, error)


def replace_file(path: Path, content: bytes) -> None:
    """What a crash leaves is the file of before, or this one. Raises OSError."""
    fresh = path.with_suffix(".new")
    with open(fresh, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """What was renamed there stays renamed when the power goes. Raises OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
