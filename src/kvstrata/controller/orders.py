"""The standing orders of admins: drained instances and removed instances.

The public keys of instance ids (instance_keys.py) are kept with them.  Every controller learns keys when instances
register with it; the leader writes those that it has learnt to etcd, and the keys in etcd are authoritative.

If several controllers share an etcd, the leader writes each order there before it acts, and all controllers read it
from there (election.py).  A single controller has only a file.  Every controller writes all orders that it knows to its
file at each change, and starts with the orders of its file until etcd has answered.  If etcd has lost its data, the
leader writes the orders to it again.

Orders have names: `drained/INSTANCE`, `removed/INSTANCE`, `keys/INSTANCE`.  An order that cannot be read is left out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from kvstrata.errors import Refused
from kvstrata.observability.logging import EventLog

MAX_INSTANCES = 1_024
"""Maximum number of drained instances, and of removed instances."""
FILE = "orders.json"
VERSION = 1
DRAINED, REMOVED, KEYS = "drained", "removed", "keys"
STANDS = b"1"
"""The value of an order that consists of its name."""


class KeyOfId(msgspec.Struct, frozen=True):
    """The key that an instance id belongs to."""

    key: str
    """Public key in Z85."""
    seen_unix_s: int
    """Time at which the instance was last a member, accurate to a day."""


class _File(msgspec.Struct, frozen=True):
    version: int
    drained: list[str] = []
    removed: list[str] = []
    keys: dict[str, KeyOfId] = {}


class Orders:
    """All standing orders. Belongs to the event loop."""

    def __init__(
        self, write_first: Callable[[Mapping[str, bytes | None]], Awaitable[None]] | None = None
    ) -> None:
        """`write_first` writes orders to etcd before they take effect here, or raises NotLeading."""
        self._write_first = write_first
        self.changed: Callable[[], None] = lambda: None
        """Called whenever orders have changed."""
        self.drained: dict[str, None] = {}
        self.removed: dict[str, None] = {}
        """Instances that were removed while they lived; they may not join."""
        self.keys: dict[str, KeyOfId] = {}
        """Keys by instance id; an id that is missing belongs to no key yet."""
        self._unwritten: dict[str, KeyOfId | None] = {}
        """Keys that were learnt or forgotten here and are not in an order yet."""
        self._path: Path | None = None
        self._failed: Callable[[Path, OSError], None] = lambda path, error: None
        self._saving = asyncio.Lock()
        self._unsaved = False
        self._log = EventLog("orders")

    # --- reading ------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, bytes]:
        """All orders by name."""
        return {
            **{f"{DRAINED}/{instance}": STANDS for instance in self.drained},
            **{f"{REMOVED}/{instance}": STANDS for instance in self.removed},
            **{f"{KEYS}/{instance}": msgspec.json.encode(known) for instance, known in self.keys.items()},
        }

    # --- changing -----------------------------------------------------------------------------------------

    async def drain(self, instance: str, on: bool) -> None:
        """Order that no peers are sent to an instance, or that they are sent again. Raises Refused, NotLeading."""
        if on == (instance in self.drained):
            return
        if on and len(self.drained) >= MAX_INSTANCES:
            raise Refused(f"{MAX_INSTANCES} instances are already drained; undrain some first")
        await self._change({f"{DRAINED}/{instance}": STANDS if on else None})

    async def remove(self, instance: str, *, bar: bool) -> None:
        """Remove an instance's drain and key; with `bar` it may not join until `allow`. Raises Refused, NotLeading."""
        changes: dict[str, bytes | None] = {f"{DRAINED}/{instance}": None} if instance in self.drained else {}
        if instance in self.keys:
            changes[f"{KEYS}/{instance}"] = None
        if bar:
            if len(self.removed) >= MAX_INSTANCES:
                raise Refused(f"{MAX_INSTANCES} instances are already removed; allow some first")
            changes[f"{REMOVED}/{instance}"] = STANDS
        await self._change(changes)

    async def allow(self, instance: str) -> bool:
        """Let a removed instance join again; returns whether it was removed. Raises NotLeading."""
        if instance not in self.removed:
            return False
        await self._change({f"{REMOVED}/{instance}": None})
        return True

    def learn_key(self, instance: str, known: KeyOfId | None) -> None:
        """Set the key of an id, or none; `write_keys` makes that an order."""
        self._unwritten[instance] = known
        self._unsaved = True
        if known is None:
            self.keys.pop(instance, None)
        else:
            self.keys[instance] = known

    async def write_keys(self) -> None:
        """Write the learnt keys as orders. Raises NotLeading."""
        await self._change(
            {
                f"{KEYS}/{instance}": None if known is None else msgspec.json.encode(known)
                for instance, known in self._unwritten.items()
            }
        )

    def load(self, entries: Mapping[str, bytes]) -> None:
        """Replace all orders by those of etcd; keys of ids that etcd lacks stay if they were learnt here."""
        before = self.entries()
        self.drained, self.removed, self.keys = {}, {}, {}
        self._apply(entries)
        self._unwritten = {name: known for name, known in self._unwritten.items() if known is not None}
        self.keys.update((name, known) for name, known in self._unwritten.items() if known is not None)
        self._unsaved |= self.entries() != before
        self.changed()

    async def _change(self, changes: Mapping[str, bytes | None]) -> None:
        if not changes:
            return
        if self._write_first is not None:
            await self._write_first(changes)
        self._apply(changes)
        self._unsaved = True
        self.changed()
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
                elif kind == KEYS:
                    self._unwritten.pop(what, None)
                    if value is not None:
                        self.keys[what] = msgspec.json.decode(value, type=KeyOfId)
                    else:
                        self.keys.pop(what, None)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self._log.warning("order_ignored", name=name, reason=str(error))

    # --- on disk --------------------------------------------------------------------------------------------

    async def keep_in(self, folder: Path, failed: Callable[[Path, OSError], None]) -> tuple[Path, str]:
        """Take over the orders of the file in this folder, and write all orders there from now on.

        Returns the file, and why it is ignored (empty if it is not).  `failed` is called when a write fails; the orders
        hold nevertheless.
        """
        self._path, self._failed = folder / FILE, failed
        try:
            content = await asyncio.get_running_loop().run_in_executor(None, self._path.read_bytes)
            told = msgspec.json.decode(content, type=_File)
        except FileNotFoundError:
            return self._path, ""
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return self._path, f"it cannot be read: {error}"
        if told.version != VERSION:
            return self._path, f"it has format version {told.version}, this controller reads {VERSION}"
        self.drained = dict.fromkeys(told.drained[:MAX_INSTANCES])
        self.removed = dict.fromkeys(told.removed[:MAX_INSTANCES])
        self.keys = dict(told.keys)
        return self._path, ""

    async def save(self) -> None:
        """Write the file if orders have changed since it was last written. A failed write is not repeated.

        A change during the write is written by the call of `save` that follows that change.
        """
        if self._path is None:
            return
        async with self._saving:
            if not self._unsaved:
                return
            self._unsaved = False
            told = msgspec.json.encode(_File(VERSION, list(self.drained), list(self.removed), self.keys))
            done = asyncio.get_running_loop().run_in_executor(None, replace_file, self._path, told)
            try:
                await asyncio.shield(done)
            except OSError as error:
                self._failed(self._path, error)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: a crash leaves the old file or the new one. Raises OSError."""
    fresh = path.with_suffix(".new")
    with open(fresh, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames in it survive a power cut. Raises OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
