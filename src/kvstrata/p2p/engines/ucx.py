"""Our own transfer engine over UCX: shared memory and kernel copies on one host, tcp, and verbs on network cards.

The native part (ext/ucx/engine.h) has one thread for all of UCX; this module connects its events with the event loop.
Users configure UCX in its usual way, by UCX_TLS, UCX_NET_DEVICES and so on in the environment, or by `settings`.

Invariants
1. A read's `ended` is called when the event of the native read has come, or when no native read was begun.
2. Each connection has a number that is never used again, so no event of an old connection is taken for one of a new
   connection.

On one host, where UCX can copy through the kernel (cma), a stopped peer can still be read, and a read from a peer that
is gone fails at once.  Over network cards that read by themselves (verbs), an abandoned read keeps its destinations
until the card has finished, at the latest until `disconnect` forces the read to its end.  Over tcp an abandoned read
ends at once.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvstrata.errors import TransferError, install
from kvstrata.observability.logging import Thinning
from kvstrata.p2p.engines.base import (
    BUSY,
    CANCELLED,
    CLOSED,
    DEADLINE,
    FAILED,
    MAX_ITEMS,
    NOT_CONNECTED,
    OUT_OF_RANGE,
    PEER_GONE,
    ReadItem,
    Region,
    TransferEngine,
    check_region,
    in_range,
    pack_metadata,
    unpack_metadata,
)

if TYPE_CHECKING:
    from kvstrata.native.ucx import UcxEngine as NativeEngine

log = logging.getLogger(__name__)

INSTALL = f"{install('p2p')}, or a system package such as libucx0"
BUILD = "run `make setup` where PyPI can be reached, or install libucx-dev, and build again"
MAX_ITEMS_UNDER_WAY = 16 * MAX_ITEMS

_DONE, _CANCELLED, _PEER_GONE, _NOT_CONNECTED, _NO_WAY = 0, 1, 2, 3, 5
_REASONS = {_DONE: "", _CANCELLED: CANCELLED, _PEER_GONE: PEER_GONE, _NOT_CONNECTED: NOT_CONNECTED}

_PROCESS_SETTINGS = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n", "UCX_LOG_FILE": "stderr"}
"""Defaults that UCX reads once for the whole process, when it is loaded.  With them UCX installs no signal handlers,
does not hook the functions that map memory (this code unregisters memory itself), and writes no messages to stdout."""
_load_lock = threading.Lock()


def native_module() -> type[NativeEngine]:
    """The class of the compiled part. Raises TransferError if it was not built."""
    try:
        module = importlib.import_module("kvstrata.native.ucx")
    except ModuleNotFoundError:
        raise TransferError(f"ucx: this build has no UCX engine; {BUILD}", field="engine") from None
    engine: type[NativeEngine] = module.UcxEngine
    return engine


def find_library() -> str:
    """The path of libucp in the Python package `libucx` if that is installed, else a name for the system's loader."""
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        library = Path(folder) / "lib" / "libucp.so.0"
        if library.exists():
            return str(library)
    return "libucp.so.0"


class _Connection:
    """The connection to one process of a peer."""

    def __init__(self, number: int, metadata: bytes, region_bytes: int) -> None:
        self.number = number
        self.metadata = metadata
        self.region_bytes = region_bytes
        self.broken = False
        self.transports = ""


class UcxEngine(TransferEngine):
    """See the module. `library` is a path or name of libucp; `settings` are UCX's, with or without the prefix UCX_."""

    name = "ucx"
    quiesce: Literal["drain", "never"] = "drain"

    def __init__(self, settings: Mapping[str, str] | None = None, *, library: str = "") -> None:
        self._settings = {key.removeprefix("UCX_"): value for key, value in (settings or {}).items()}
        self._library = library
        self._native: NativeEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[int, bytes], None]] = {}
        """By ticket: the function to call when the ticket's command has ended."""
        self._connections: dict[str, _Connection] = {}
        self._connecting = asyncio.Lock()
        self._region_bytes = 0
        self._items_under_way = 0
        self._thinning = Thinning()
        self._closed: asyncio.Future[None] | None = None

    async def open(self, region: Region) -> bytes:
        """See the contract."""
        check_region(self.name, region)
        if self._native is not None or self._closed is not None:
            raise TransferError("ucx: an engine can be opened only once", field="engine")
        native = native_module()
        self._loop = asyncio.get_running_loop()
        library = self._library or find_library()
        opened = self._expect(0)
        with _load_lock:
            unset = [name for name in _PROCESS_SETTINGS if name not in os.environ]
            os.environ.update({name: _PROCESS_SETTINGS[name] for name in unset})
            self._native = native(library, self._settings, region)
        self._loop.add_reader(self._native.event_fd, self._take_events)
        try:
            end, text = await asyncio.shield(opened)
        finally:
            for name in unset:
                os.environ.pop(name, None)
        if end != _DONE:
            await self.close()
            what = text.decode(errors="replace")
            advice = f"; install UCX: {INSTALL}" if "libucp" in what else ""
            field = "network" if end == _NO_WAY else "engine"
            raise TransferError(f"ucx: {what}{advice}", field=field)
        self._region_bytes = region.length
        return pack_metadata(self.name, region, text)

    async def connect(self, peer: str, metadata: bytes) -> None:
        """See the contract."""
        known = unpack_metadata(self.name, peer, metadata)
        async with self._connecting:
            old = self._connections.get(peer)
            if old is not None and old.metadata == metadata and not old.broken:
                return
            native = self._open_native()
            connection = _Connection(next(self._numbers), metadata, known.region_bytes)
            ticket = next(self._numbers)
            ended = self._expect(ticket)
            native.connect(ticket, connection.number, known.part, known.region_bytes)
            end, text = await asyncio.shield(ended)
            if end == _CANCELLED:
                raise TransferError("ucx: the engine is closed", field="engine")
            if end != _DONE:
                what = text.decode(errors="replace")
                field = "network" if end == _NO_WAY else "metadata"
                raise TransferError(f"ucx: metadata of peer {peer!r:.80}: {what}", field=field)
            connection.transports = text.decode()
            old = self._connections.pop(peer, None)
            self._connections[peer] = connection
            if old is not None:
                self._forget(old)

    def transports(self, peer: str) -> str:
        """UCX's names of the transports for reads from a connected peer, comma-separated; "" if UCX does not say."""
        connection = self._connections.get(peer)
        return connection.transports if connection is not None else ""

    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        """See the contract."""
        connection = self._connections.get(peer)
        refused = ""
        if self._native is None or self._closed is not None:
            refused = CLOSED
        elif connection is None:
            refused = NOT_CONNECTED
        elif not in_range(items, self._region_bytes, connection.region_bytes):
            refused = OUT_OF_RANGE
        elif self._items_under_way + len(items) > MAX_ITEMS_UNDER_WAY:
            refused = BUSY
        if refused or connection is None or self._native is None or self._loop is None:
            ended()
            return refused
        ticket, count = next(self._numbers), len(items)
        answer: asyncio.Future[str] = self._loop.create_future()

        def over(end: int, text: bytes) -> None:
            self._items_under_way -= count
            if end == _PEER_GONE:
                connection.broken = True
                why = text.decode(errors="replace")
                self._thinning.log(log, logging.INFO, peer, "ucx: a read from peer %r ended: %s", peer, why)
            ended()
            if not answer.done():
                answer.set_result(_REASONS.get(end, FAILED))

        self._waiting[ticket] = over
        self._items_under_way += count
        self._native.read(ticket, connection.number, items)
        try:
            done, _ = await asyncio.wait([answer], timeout=max(0.0, deadline_s))
        except asyncio.CancelledError:
            self._native.cancel(ticket)
            raise
        if done:
            return answer.result()
        self._native.cancel(ticket)
        answer.cancel()
        return DEADLINE

    async def disconnect(self, peer: str) -> None:
        """See the contract. Returns when all reads from that peer have ended."""
        connection = self._connections.pop(peer, None)
        if connection is not None and self._closed is None:
            await asyncio.shield(self._forget(connection))

    async def close(self) -> None:
        """See the contract."""
        if self._native is None or self._loop is None:
            return
        if self._closed is None:
            self._closed = self._loop.create_future()
            ticket = next(self._numbers)
            self._waiting[ticket] = self._end
            self._native.begin_close(ticket)
        await asyncio.shield(self._closed)

    def _end(self, end: int, text: bytes) -> None:
        """All connections and reads have ended: the native thread returns now, so joining it takes no time."""
        assert self._native is not None and self._loop is not None and self._closed is not None
        self._loop.remove_reader(self._native.event_fd)
        self._native.close()
        self._connections.clear()
        self._closed.set_result(None)

    def _open_native(self) -> NativeEngine:
        if self._native is None or self._closed is not None:
            raise TransferError("ucx: the engine is not open", field="engine")
        return self._native

    def _forget(self, connection: _Connection) -> asyncio.Future[tuple[int, bytes]]:
        assert self._native is not None
        ticket = next(self._numbers)
        gone = self._expect(ticket)
        self._native.disconnect(ticket, connection.number)
        return gone

    def _expect(self, ticket: int) -> asyncio.Future[tuple[int, bytes]]:
        assert self._loop is not None
        future: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()
        self._waiting[ticket] = lambda end, text: future.set_result((end, text))
        return future

    def _take_events(self) -> None:
        assert self._native is not None
        for ticket, end, text in self._native.take_events():
            self._waiting.pop(ticket)(end, text)
