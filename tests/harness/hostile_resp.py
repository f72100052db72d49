"""A server that speaks RESP and gives the answers that a test has chosen."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

INFO = b"used_memory:1\r\nmaxmemory:0\r\n"


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Hostile:
    """The server. `answers` has the answer to each command: bytes, or a function that makes bytes or a stream."""

    def __init__(self) -> None:
        self.answers: dict[bytes, bytes | Callable[[list[bytes]], bytes | AsyncIterator[bytes]]] = {
            b"PING": b"+PONG\r\n",
            b"INFO": bulk(INFO),
            b"DBSIZE": b":1\r\n",
            b"UNLINK": b":1\r\n",
        }
        self.asked: list[bytes] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Hostile:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def entry(self, **more: Any) -> dict[str, Any]:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return {"type": "resp", "host": "127.0.0.1", "port": port, "request_timeout": 1.0, **more}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                count = int((await reader.readuntil(b"\r\n"))[1:])
                words = []
                for _ in range(count):
                    length = int((await reader.readuntil(b"\r\n"))[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                self.asked.append(words[0])
                answer = self.answers.get(words[0], b"-ERR unknown command\r\n")
                said = answer(words) if callable(answer) else answer
                if isinstance(said, bytes):
                    writer.write(said)
                else:
                    async for piece in said:
                        writer.write(piece)
                        await writer.drain()
                await writer.drain()
        writer.close()


def cursors(*more: int) -> Callable[[list[bytes]], bytes]:
    """Answers SCAN with these cursors for ever, each with a name that is a record's."""
    numbers: Iterator[int] = itertools.cycle(more) if more else itertools.count(1)
    name = bulk(b"kvstrata:" + b"0" * 64)
    return lambda words: b"*2\r\n" + bulk(b"%d" % next(numbers)) + b"*1\r\n" + name
