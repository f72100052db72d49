"""A segment and an attach server in a child process, without the rest of the server.

In a test:

    with AttachServerChild(place, log=tmp_path / "server.log") as server:
        row = ...                       # a process attached
        server.ask("reserve", row=row, keys=[...])
        server.event("gone")

The child sends the events attached, detached and gone, each with the row.  `Handlers` has the operations.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from kvstrata import failpoints
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.memory.segment import Segment, SegmentSettings
from kvstrata.rpc import wire
from kvstrata.server.listener import AttachLimits, AttachServer
from kvstrata.server.processes import Process, Processes, Readiness, TenantTokens
from kvstrata.types import unpack_extents
from tests.harness.child import Child, answer, tell
from tests.harness.open_files import open_files
from tests.harness.validation import validate


class Place(NamedTuple):
    socket_dir: Path
    segment_dir: Path


class AttachServerChild(Child):
    """The test's side of the child. Once this object is made, the child listens for attaches."""

    def __init__(self, place: Place, *, log: Path, under: tuple[str, ...] = (), **options: Any) -> None:
        settings = json.dumps(
            {"socket_dir": str(place.socket_dir), "segment": str(place.segment_dir), **options}
        )
        super().__init__("tests.harness.attach_server", settings, under=under, log=log)
        try:
            self.start = self.event("listening")
        except BaseException:
            self.__exit__(None, None, None)
            raise


class Handlers:
    """The operations that a test can ask for. Bytes travel as base64."""

    def __init__(self, segment: Segment, attach: AttachServer, table: Table) -> None:
        self._pool = segment.pool
        self._attach = attach
        self._table = table

    def rows(self) -> list[dict[str, Any]]:
        return [{"row": row["row"], "old": row["old"]} for row in self._pool.rows()]

    def stats(self) -> dict[str, Any]:
        return {**self._attach.document(), "pool": self._pool.stats()}

    def validate(self) -> None:
        validate(self._pool)

    def open_files(self) -> list[str]:
        """Return the targets of this process's descriptors, sockets included."""
        return sorted(open_files())

    def reserve(self, row: int, keys: str, record_bytes: int) -> dict[str, Any]:
        ticket, outcomes, extents = self._pool.reserve(decode(keys), b"", record_bytes, row, bytes(32), 0)
        return {"ticket": ticket, "outcomes": list(outcomes), "extents": list(unpack_extents(extents))}

    def quiesced(self, row: int) -> None:
        self._pool.row_quiesced(row)

    def stranded(self) -> list[dict[str, Any]]:
        return [
            {"row": one.row, "session": encode(one.session), "kept_bytes": one.kept_bytes}
            for one in self._table.stranded()
        ]

    def clear_stranded(self, sessions: list[str] | None) -> None:
        """Begin to clear stranded sessions (None: all); the event `cleared` has their rows, None for an unknown one."""
        chosen = None if sessions is None else [decode(name) for name in sessions]

        async def clear() -> None:
            try:
                cleared = await self._table.clear_stranded(chosen)
            except KeyError:
                tell("cleared", rows=None)
            else:
                tell("cleared", rows=[one.row for one in cleared])

        self._clearing = asyncio.ensure_future(clear())


class Table(Processes):
    """Sends the test an event for each session that is detached."""

    def lost(self, process: Process, line: Any) -> None:
        super().lost(process, line)
        if process.detached:
            tell("detached", row=process.row)


class NoRequests:
    """There is no server behind the socket. Sends the test an event for each session that comes or goes."""

    def on_frame(self, connection: Any, message: bytes) -> bool:
        connection.send(wire.encode(wire.Error(0, 1, "not_permitted", "no requests here", "op", False)))
        return False

    def on_attached(self, process: Process) -> None:
        tenants = None if process.tenants is None else sorted(process.tenants)
        tell("attached", row=process.row, pid=process.pid, resumed=process.resumed, tenants=tenants)

    async def on_gone(self, process: Process) -> None:
        tell("gone", row=process.row)


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(text: str) -> bytes:
    return base64.b64decode(text)


async def main(options: dict[str, Any]) -> None:
    """Serve until stdin ends, then stop and close in order."""
    failpoints.arm(os.environ)
    tell("started", pid=os.getpid())
    segment = Segment.open(
        SegmentSettings(
            socket_dir=Path(options["socket_dir"]),
            directory=Path(options["segment"]),
            extents_bytes=options.get("extents_bytes", 16 << 20),
        )
    )
    tokens = TenantTokens({name: frozenset(of) for name, of in options.get("tenants", {}).items()})
    processes = Table(segment.pool, segment.pool.epoch, tokens, Readiness())
    attach = AttachServer(
        Path(options["socket_dir"]) / RPC_SOCKET,
        segment.pool,
        segment.descriptors,
        processes,
        instance_id="test",
        limits=AttachLimits(**options.get("limits", {"old_row_interval_s": 0.05})),
    )
    await attach.start(NoRequests())  # type: ignore[arg-type]
    ended = asyncio.Event()
    handlers = Handlers(segment, attach, processes)
    table = {name: getattr(handlers, name) for name in dir(handlers) if not name.startswith("_")}
    buffer = bytearray()

    def readable() -> None:
        part = os.read(0, 1 << 20)
        if not part:
            asyncio.get_running_loop().remove_reader(0)
            ended.set()
        buffer.extend(part)
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            answer(line, table)

    asyncio.get_running_loop().add_reader(0, readable)
    tell("listening", adopted=segment.adopted, epoch=segment.pool.epoch)
    await ended.wait()
    await attach.stop()
    segment.close()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
