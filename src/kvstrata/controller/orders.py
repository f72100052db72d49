"""What admins have ordered and what holds until they say otherwise: drained instances, removed ones, and pins.

Of several controllers that share an etcd, the one that leads writes an order there before it acts, and all read it
from there (election.py).  A single controller has only the file.  Every controller writes what it knows to the file,
whole, at each change: with it a controller begins, until etcd has answered, and an etcd that has lost its data gets it
back.

Orders have names: `drained/INSTANCE`, `removed/INSTANCE`, `pins/CLAIM`.  What cannot be read is left out, and said.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import Refused
from kvstrata.observability.logging import EventLog

MAX_PINS = 4_096
MAX_INSTANCES = 1_024
"""Drained ones, and removed ones."""
FILE = "orders.json"
PINS_FILE = "pins.json"
"""Of versions that kept pins alone; read where there is no FILE."""
VERSION = 1
DRAINED, REMOVED, PINS = "drained", "removed", "pins"
STANDS = b"1"
"""The value of an order that has nothing but its name."""


class Pin(msgspec.Struct, frozen=True):
    """Chunks that an instance was asked to keep; it ends the pin by its own clock."""

    claim: str
    instance: str
    n_keys: int
    """That it keeps, or that it was asked for."""
    expires_unix_ms: int
    incarnation: int = 0
    """Of the instance: its next process keeps nothing. 0: not known."""
    parts: int = 1
    """Commands that it took; each part has a claim of its own at the instance."""
    kept: bool = True
    """False until the instance has said so."""

    @property
    def claims(self) -> list[str]:
        """At the instance."""
        return [self.claim, *(f"{self.claim}.{part}" for part in range(1, self.parts))]


class _File(msgspec.Struct, frozen=True):
    version: int
    pins: list[Pin]
    drained: list[str] = []
    removed: list[str] = []


class Orders:
    """Belongs to the event loop."""

    def __init__(self, clock: Clock, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when drained or removed instances are others than before."""
        self._clock = clock
        self._changed = changed
        self._pins: dict[str, Pin] = {}
        self.drained: dict[str, None] = {}
        self.removed: dict[str, None] = {}
        """Removed while they lived; they are not let in."""
        self.write_first: Callable[[Mapping[str, bytes | None]], Awaitable[None]] | None = None
        """Where orders are written before they hold here; raises NotLeading. None: nowhere."""
        self._path: Path | None = None
        self._failed: Callable[[Path, OSError], None] = lambda path, error: None
        self._saving = asyncio.Lock()
        self._unsaved = False
        self._log = EventLog("orders")

    # --- looking ------------------------------------------------------------------------------------------

    def pin(self, claim: str) -> Pin | None:
        """One whose time is not over."""
        pin = self._pins.get(claim)
        return None if pin is None or self.is_over(pin) else pin

    def pins(self) -> list[Pin]:
        """Those whose time is not over, in the order in which they were made."""
        return [pin for pin in self._pins.values() if not self.is_over(pin)]

    def all_pins(self) -> list[Pin]:
        """Those too whose time is over, until they are taken away."""
        return list(self._pins.values())

    def is_over(self, pin: Pin) -> bool:
        """Whether its time is over."""
        return pin.expires_unix_ms <= self._clock.unix_ms()

    def entries(self) -> dict[str, bytes]:
        """All orders by name."""
        return {
            **{f"{DRAINED}/{instance}": STANDS for instance in self.drained},
            **{f"{REMOVED}/{instance}": STANDS for instance in self.removed},
            **{f"{PINS}/{pin.claim}": msgspec.json.encode(pin) for pin in self._pins.values()},
        }

    # --- changing -----------------------------------------------------------------------------------------

    async def drain(self, instance: str, on: bool) -> None:
        """Peers are sent to it no more, or again. Raises Refused, NotLeading."""
        if on == (instance in self.drained):
            return
        if on and len(self.drained) >= MAX_INSTANCES:
            raise Refused(f"{MAX_INSTANCES} instances are drained already; undrain some first")
        await self._change({f"{DRAINED}/{instance}": STANDS if on else None})

    async def remove(self, instance: str, *, bar: bool) -> None:
        """It is drained no more, and with `bar` not let in until `allow`. Raises Refused, NotLeading."""
        changes: dict[str, bytes | None] = {f"{DRAINED}/{instance}": None} if instance in self.drained else {}
        if bar:
            if len(self.removed) >= MAX_INSTANCES:
                raise Refused(f"{MAX_INSTANCES} instances are removed already; allow some first")
            changes[f"{REMOVED}/{instance}"] = STANDS
        await self._change(changes)

    async def allow(self, instance: str) -> bool:
        """Let a removed one in again; whether it was removed. Raises NotLeading."""
        if instance not in self.removed:
            return False
        await self._change({f"{REMOVED}/{instance}": None})
        return True

    async def put_pin(self, pin: Pin) -> None:
        """A new one, or what has become of one. Raises Refused, NotLeading."""
        if pin.claim not in self._pins and len(self._pins) >= MAX_PINS:
            raise Refused(f"{MAX_PINS} pins are there already; end some first")
        await self._change({f"{PINS}/{pin.claim}": msgspec.json.encode(pin)})

    async def end_pins(self, *claims: str) -> None:
        """They are listed no more. Raises NotLeading."""
        await self._change({f"{PINS}/{claim}": None for claim in claims if claim in self._pins})

    def load(self, entries: Mapping[str, bytes]) -> None:
        """What holds, as etcd has it."""
        before = self.entries()
        self._pins, self.drained, self.removed = {}, {}, {}
        self._apply(entries)
        self._unsaved |= self.entries() != before
        self._changed()

    async def _change(self, changes: Mapping[str, bytes | None]) -> None:
        if not changes:
            return
        if self.write_first is not None:
            await self.write_first(changes)
        self._apply(changes)
        self._unsaved = True
        self._changed()
        await self.save()

    def _apply(self, changes: Mapping[str, bytes | None]) -> None:
        for name, value in changes.items():
            kind, _, what = name.partition("/")
            instances = {DRAINED: self.drained, REMOVED: self.removed}.get(kind)
            try:
                if instances is not None and value is not None:
                    instances[what] = None
                elif instances is not None:
                    instances.pop(what, None)
                elif kind == PINS and value is not None:
                    self._pins[what] = msgspec.json.decode(value, type=Pin)
                elif kind == PINS:
                    self._pins.pop(what, None)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self._log.warning("order_ignored", name=name, reason=str(error))

    # --- on disk --------------------------------------------------------------------------------------------

    async def keep_in(self, folder: Path, failed: Callable[[Path, OSError], None]) -> tuple[Path, str]:
        """Go on with the orders in this folder and write them there from now on.

        The file, and why it is ignored, or empty.  `failed` is called when a write has failed; the orders hold all the
        same.
        """
        self._path, self._failed = folder / FILE, failed
        loop = asyncio.get_running_loop()
        for path in (self._path, folder / PINS_FILE):
            try:
                content = await loop.run_in_executor(None, path.read_bytes)
                told = msgspec.json.decode(content, type=_File)
            except FileNotFoundError:
                continue
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                return path, f"it cannot be read: {error}"
            if told.version != VERSION:
                return path, f"it has format version {told.version}, this controller reads {VERSION}"
            self._pins = {pin.claim: pin for pin in told.pins[:MAX_PINS]}
            self.drained = dict.fromkeys(told.drained[:MAX_INSTANCES])
            self.removed = dict.fromkeys(told.removed[:MAX_INSTANCES])
            break
        return self._path, ""

    async def save(self) -> None:
        """Returns when the file has what holds, or when writing it has failed."""
        if self._path is None:
            return
        async with self._saving:
            if not self._unsaved:
                return
            self._unsaved = False
            told = msgspec.json.encode(
                _File(VERSION, list(self._pins.values()), list(self.drained), list(self.removed))
            )
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
