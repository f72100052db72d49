"""The child process of an adapter host: `python -c BOOT root server-pid channel extents [lock]`, where the last three
are descriptors.

It maps the pool's extents, makes and opens the adapter that Configure describes, passes batches from the channel
(frames.py) to it, and their outcomes back.  The adapter has the same environment as in the server: an event loop, a
context, items with holds.

Invariants
1. It ends with its server: the kernel kills it, and a closed channel ends it too.
2. It keeps no descriptor of the pool except that of sessions.lock, on which it has a shared lock of HOSTS_BYTE.  That
   lock outlives every thread that can touch the extents, and no server adopts the pool while the lock is held.  Forks
   do not inherit the mapping.
3. The drop of a hold is never reported before it happens.  It is reported with the answer of its batch if it happened
   before that answer was sent, else soon after the drop.
4. Counters, remarks and the advertisement are checked every COUNT_S, and reported when they have changed.
5. An exception of the adapter is reported and does not end this process (the plugin boundary).  The server detects a
   hang or a crash.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import logging
import os
import socket
import sys
from collections import deque
from typing import Any, NoReturn, cast

import msgspec
import uvloop

from kvstrata.clock import SystemClock
from kvstrata.errors import KvstrataError, StorageError
from kvstrata.memory import linux
from kvstrata.memory.segment_files import HOSTS_BYTE
from kvstrata.naming import name_process
from kvstrata.native.core import ExtentsMap, Hold, LentHold
from kvstrata.observability.logging import FLUSH_S, STDERR, LogWriter, Thinning
from kvstrata.process.keeper import die_with_parent
from kvstrata.tiers import config as tier_config
from kvstrata.tiers.base import (
    MORE_KEYS,
    AdapterContext,
    Ask,
    Counts,
    Item,
    ReadsPeers,
    Remarks,
    StorageAdapter,
    log_broken_contract,
    read_checked,
)
from kvstrata.tiers.host import frames
from kvstrata.tiers.host.frames import MAX_FRAME_BYTES, MAX_ITEMS, Call, Channel, Configure, Message
from kvstrata.tiers.host.process import LEVEL_MARK
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)

REPORT_S = 0.05
"""Maximum time from a drop or an eviction to its report; an answer may report it earlier."""
COUNT_S = 1.0
MAX_ADVERTISED_BYTES = MAX_FRAME_BYTES - 1024
_thinning = Thinning()


def main() -> NoReturn:
    """Run the process; never returns."""
    server_pid, channel_fd, extents_fd, *lock_fds = map(int, sys.argv[2:])
    die_with_parent(server_pid)
    faulthandler.enable()
    for fd in (channel_fd, extents_fd, *lock_fds):
        os.set_inheritable(fd, False)
    for fd in lock_fds:
        if not linux.share_byte(fd, HOSTS_BYTE):
            raise SystemExit("byte HOSTS_BYTE of sessions.lock is locked for writing")
    channel = socket.socket(fileno=channel_fd)
    frame = channel.recv(MAX_FRAME_BYTES)
    if not frame:
        os._exit(0)  # the server has closed the channel already
    config = frames.read_request(frame)
    assert isinstance(config, Configure)
    name_process(f"kv-host-{config.name}")
    _log_to_server(config.log_level)
    sys.path[:] = config.import_paths
    extents = ExtentsMap(extents_fd, config.region_bytes)
    os.close(extents_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(channel, extents, config))
    raise AssertionError  # `run` ends the process


async def _serve(channel: socket.socket, extents: ExtentsMap, config: Configure) -> None:
    await Host(channel, extents, config).run()


class Host:
    """The child's side of the channel. Everything but `_hold_dropped` and `_evicted` runs on the loop."""

    def __init__(self, sock: socket.socket, extents: ExtentsMap, config: Configure) -> None:
        # The channel ends if the server has died or has abandoned this process.
        self._channel = Channel(sock, self._read, lambda: os._exit(0))
        self._extents = extents
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._adapter: StorageAdapter
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._drops: deque[tuple[int, int]] = deque()
        self._evictions: deque[bytes] = deque()
        self._report_is_due = False
        self._unreported: dict[int, list[int]] = {}
        """Indices of the dropped items not reported yet, by request."""
        self._counted = frames.Report()
        self._advertised = b""

    async def run(self) -> None:
        """Open the adapter, serve until CLOSE, close it. Exits the process; at once if the adapter cannot be opened."""
        config, extents = self._config, self._extents
        context = AdapterContext(
            config.instance_id, SystemClock(), extents.address, extents.length, self._evicted
        )
        try:
            self._adapter = adapter = _made(config)
            await adapter.open(context)
            self._advertised = self._advertisement()
            self._send(frames.Opened(adapter.capabilities, self._advertised))
        except Exception as error:  # the plugin boundary
            if not isinstance(error, KvstrataError):
                log_broken_contract(config.name, "open", error)
            self._send(frames.raised(0, error))
            self._end(1)
        self._count()
        await self._closing.wait()
        try:
            await adapter.close()
        except Exception as error:  # the plugin boundary
            log_broken_contract(config.name, "close", error)
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._report()
        self._end(0)

    def _end(self, status: int) -> NoReturn:
        self._channel.flush()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, LogWriter):
                handler.flush_within(FLUSH_S)
        os._exit(status)

    # --- requests ----------------------------------------------------------------------------------------

    def _read(self, frame: bytes) -> None:
        request = frames.read_request(frame)
        if isinstance(request, frames.Close):
            self._closing.set()
            return
        root = logging.getLogger()
        if request.log_level != root.level:
            root.setLevel(request.log_level)
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Call) -> None:
        answer: frames.Answer | frames.Raised
        try:
            answer = frames.answer_of(call.number, await self._result_of(call), [])
        except Exception as error:  # the plugin boundary
            if not (call.operation == "clear" and isinstance(error, StorageError)):
                log_broken_contract(self._config.name, call.operation, error)
            answer = frames.raised(call.number, error)
        self._collect()
        answer.dropped = self._unreported.pop(call.number, [])
        self._report_evictions()
        self._send(answer)

    async def _result_of(self, call: Call) -> Any:
        """The adapter's answer. Raises the adapter's exceptions, and TypeError for an invalid answer."""
        adapter, ask = self._adapter, Ask(each=call.each, owner=call.owner)
        match call.operation:
            case "exists":
                return await adapter.exists(call.keys, ask), frames.word_of(ask.reason)
            case "put" | "load":
                asks = ask, Ask(each=True, owner=call.owner)
                writes, move = call.operation == "load", getattr(adapter, call.operation)
                items = [
                    Item(row[0], self._hold(call, i, writes), asks[row[3]])
                    for i, row in enumerate(call.items)
                ]
                await move(items)
                return items
            case "delete":
                return await adapter.delete(call.keys)
            case "clear":
                return await adapter.clear()
            case "list_keys":
                page = await adapter.list_keys(call.cursor, call.most)
                if page is not None and len(page.keys) > call.most + MORE_KEYS:
                    raise TypeError(f"{len(page.keys)} keys are listed, but only {call.most} were asked for")
                return page
        return await adapter.usage()

    def _hold(self, call: Call, index: int, writable: bool) -> Hold:
        if (
            not self._report_is_due
        ):  # report after REPORT_S, so that no drop of this batch has to wake the loop
            self._report_is_due = True
            self._loop.call_later(REPORT_S, self._report)
        dropped = functools.partial(self._hold_dropped, call.number, index)
        key, offset, length, _ = call.items[index]
        return cast("Hold", LentHold(self._extents, key, offset, length, writable=writable, dropped=dropped))

    # --- reports -----------------------------------------------------------------------------------------

    def _hold_dropped(self, number: int, index: int) -> None:
        """The adapter has finished with an item's bytes (any thread)."""
        self._drops.append((number, index))
        self._wake()

    def _evicted(self, key: bytes) -> None:
        """The adapter's cap dropped a key (any thread)."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"key: must have {KEY_BYTES} bytes, not {len(key)}")
        self._evictions.append(bytes(key))
        self._wake()

    def _wake(self) -> None:
        if not self._report_is_due:
            self._report_is_due = True
            self._loop.call_soon_threadsafe(self._loop.call_later, REPORT_S, self._report)

    def _collect(self) -> None:
        while self._drops:
            number, index = self._drops.popleft()
            self._unreported.setdefault(number, []).append(index)

    def _report(self) -> None:
        self._report_is_due = (
            False  # set first, so that a drop or eviction during the rest schedules another call
        )
        self._collect()
        for number, indices in self._unreported.items():
            self._send(frames.Dropped(number, indices))
        self._unreported.clear()
        self._report_evictions()

    def _report_evictions(self) -> None:
        keys = [self._evictions.popleft() for _ in range(len(self._evictions))]
        for at in range(0, len(keys), MAX_ITEMS):
            self._send(frames.Report(evicted=keys[at : at + MAX_ITEMS]))

    def _advertisement(self) -> bytes:
        """The adapter's advertisement; empty, which is logged once, if it is too long for a frame."""
        found = self._adapter.advertisement() if isinstance(self._adapter, ReadsPeers) else b""
        if len(found) <= MAX_ADVERTISED_BYTES:
            return found
        what = "its advertisement for other instances has %d bytes, but an adapter host passes on at most %d"
        text = f"%s: {what}; make the adapter use fewer network devices"
        name = self._config.name
        _thinning.log(log, logging.ERROR, "advertised", text, name, len(found), MAX_ADVERTISED_BYTES)
        return b""

    def _count(self) -> None:
        """Report counters, remarks and the advertisement where they have changed; repeats itself every COUNT_S."""
        if self._closing.is_set():
            return
        name, adapter = self._config.name, self._adapter
        counted = frames.Report(
            read_checked(name, "numbers", adapter.numbers, Counts),
            read_checked(name, "remarks", adapter.remarks, Remarks),
        )
        advertisement = self._advertisement()
        if (counted != self._counted or advertisement != self._advertised) and self._channel.is_idle:
            self._counted = counted
            report = msgspec.structs.replace(counted)
            if advertisement != self._advertised:
                report.advertisement = self._advertised = advertisement
            self._send(report)
        self._loop.call_later(COUNT_S, self._count)

    def _send(self, message: Message) -> None:
        self._channel.send(frames.frame_of(message))


def _made(config: Configure) -> StorageAdapter:
    """The adapter, not open. Raises ConfigError."""
    medium = tier_config.load(config.medium)
    fields = msgspec.json.decode(config.config, type=medium.config)
    adapter = medium.prepare(fields, config.place, config.name)()
    adapter.name = config.name
    return adapter


class _ToServer(logging.Formatter):
    """Marks each line with its level, so that the server can log it at that level."""

    def format(self, record: logging.LogRecord) -> str:
        mark = f"{LEVEL_MARK}{min(50, max(10, record.levelno // 10 * 10))}{LEVEL_MARK}"
        return "\n".join(f"{mark}{record.name}: {line}" for line in super().format(record).splitlines())


def _log_to_server(level: int) -> None:
    """Log to stderr, which the server reads, and wait for the server only at the end."""
    handler = LogWriter(STDERR)
    handler.setFormatter(_ToServer())
    logging.basicConfig(level=level, handlers=[handler], force=True)
