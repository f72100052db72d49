"""A storage adapter that misbehaves on command, as third parties' SDKs do, for tests of the adapter host.

The adapter behaves like `fs` until a file `OPERATION.HOW`, for example `put.kill`, appears in its folder of orders.
As long as the file exists, each such operation misbehaves in that way.  With `make.HOW` and `open.HOW` the adapter
misbehaves when it is made or opened.  With `put.late` it answers puts before it has finished with their bytes; it drops
the holds of these puts at the first `exists` after the file was removed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvstrata.errors import StorageError
from kvstrata.tiers.base import AdapterContext, Ask, Item, Outcome
from kvstrata.tiers.media.fs import FsAdapter


def _hang_in_a_thread() -> None:
    """Wait for ever for a thread that nothing can stop; that thread does not hold the GIL."""
    thread = threading.Thread(target=ctypes.CDLL(None).pause)
    thread.start()
    thread.join()


def _write_garbage() -> None:
    """Write garbage into every socket of this process; one of them leads to the server."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        found.send(b"\xff" * 40)
        found.close()


def _raise() -> NoReturn:
    raise RuntimeError("ordered to raise")


def _refuse() -> NoReturn:
    raise StorageError("bad medium: mend it", field="medium")


WAYS: dict[str, Callable[[], None]] = {
    "detail": lambda: logging.getLogger("an_sdk").debug("a detail"),
    "exit": lambda: os._exit(3),
    "garbage": _write_garbage,
    "hang": _hang_in_a_thread,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "null": lambda: ctypes.memset(0, 0, 1),
    "raise": _raise,
    "refuse": _refuse,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


class BadAdapter(FsAdapter):
    """Behaves like `fs` except for the orders in its folder; see the module."""

    def __init__(self, base_path: str, orders: str) -> None:
        self._orders = Path(orders)
        self._late: list[Item] = []
        self._obey("make")
        super().__init__(base_path, name="bad")

    def _obey(self, operation: str) -> None:
        for order in self._orders.glob(f"{operation}.*"):
            WAYS[order.suffix[1:]]()

    async def open(self, context: AdapterContext) -> None:
        self._obey("open")
        await super().open(context)

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        self._obey("exists")
        if not (self._orders / "put.late").exists():
            for item in self._late:
                item.hold.drop()
            self._late.clear()
        return await super().exists(keys, ask)

    async def put(self, items: Sequence[Item]) -> None:
        if (self._orders / "put.late").exists():
            self._late += items
            for item in items:
                item.outcome, item.reason = Outcome.FAILED, "late"
            return
        self._obey("put")
        await super().put(items)

    async def load(self, items: Sequence[Item]) -> None:
        self._obey("load")
        await super().load(items)

    async def clear(self) -> int:
        self._obey("clear")
        return await super().clear()

    def numbers(self) -> dict[str, int]:
        self._obey("numbers")
        return {"late": len(self._late)}

    async def close(self) -> None:
        self._obey("close")
        await super().close()


def entry_of(records: Path, orders: Path) -> dict[str, Any]:
    """Return the `l2_adapters` entry of a BadAdapter in an adapter host; `orders` is its folder of orders."""
    return {
        "type": "plugin",
        "module_path": "tests.harness.bad_adapter",
        "class_name": "BadAdapter",
        "adapter_params": {"base_path": str(records), "orders": str(orders)},
        "isolation": "process",
    }
