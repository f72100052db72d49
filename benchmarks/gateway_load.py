"""The clients of `benchmarks.gateway`: streams of completions at a drawn rate; prints what they saw as JSON.

    python -m benchmarks.gateway_load PORT '{"rate": 500, "seconds": 8, "tokens": 50, "prompt_tokens": 8000, "seed": 1}'

Requests come as a Poisson process, whatever the answers do.  `"streams": N` opens N streams instead, and keeps them
until a line on standard input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any, cast

import uvloop

WORDS = 512
CHARS = 4
"""Characters for one token of a prompt."""


class Stream(asyncio.Protocol):
    """A connection that carries one answer at a time."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._sent_ns = 0
        self._first = False
        self.done: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError("the connection was cut"))

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future ends with its answer."""
        self.done = asyncio.get_running_loop().create_future()
        self._first = True
        self._sent_ns = time.monotonic_ns()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        seen = self._seen
        at = data.rfind(b'"t":')
        if at >= 0:
            seen.delays.append(now_ns - int(data[at + 4 : data.index(b"}", at)]))
            seen.events += data.count(b'"t":')
            if self._first:
                self._first = False
                seen.ttft.append(now_ns - self._sent_ns)
                if not data.startswith(b"HTTP/1.1 200") and b"HTTP/1.1" in data[:9]:
                    seen.refused += 1
        if data.endswith(b"0\r\n\r\n") and self.done is not None and not self.done.done():
            self.done.set_result(None)


class Seen:
    """What all streams have seen. Times are in ns."""

    def __init__(self) -> None:
        self.ttft: list[int] = []
        self.delays: list[int] = []
        """From the writing of an event in the engine to its arrival."""
        self.events = 0
        self.refused = 0
        self.failed = 0


def bodies(asked: dict[str, Any]) -> list[bytes]:
    """Requests with drawn prompts."""
    draw = random.Random(asked["seed"])
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=CHARS - 1)) for _ in range(WORDS)]
    found = []
    for number in range(asked.get("prompts", 64)):
        text = " ".join(draw.choices(words, k=asked["prompt_tokens"]))
        messages = [{"role": "system", "content": f"{number}"}, {"role": "user", "content": text}]
        body = json.dumps(
            {"model": "m", "messages": messages, "stream": True, "max_tokens": asked["tokens"]}
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"accept: */*\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        found.append(head.encode() + body)
    return found


async def load(port: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the load; return percentiles in ms, and counts."""
    loop = asyncio.get_running_loop()
    draw, requests, seen = random.Random(asked["seed"] + 1), bodies(asked), Seen()
    free: list[Stream] = []
    tasks: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        stream = free.pop() if free else None
        if stream is None or stream.transport.is_closing():
            _, stream = await loop.create_connection(lambda: Stream(seen), "127.0.0.1", port)
        try:
            await stream.ask(requests[number % len(requests)])
            free.append(stream)
        except ConnectionError:
            seen.failed += 1

    if "streams" in asked:
        for number in range(asked["streams"]):
            tasks.add(loop.create_task(one(number)))
            if number % 50 == 49:
                await asyncio.sleep(0.01)
        while len(seen.ttft) + seen.failed < asked["streams"]:  # noqa: ASYNC110 (the streams share no event)
            await asyncio.sleep(0.05)
        print(json.dumps({"open": len(seen.ttft), "failed": seen.failed}), flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        return {}
    begun_s = next_s = loop.time()
    warm_s = begun_s + asked["seconds"] / 5
    number, warm = 0, False
    while next_s < begun_s + asked["seconds"]:
        if not warm and next_s > warm_s:
            warm = True
            seen.ttft.clear()
            seen.delays.clear()
        next_s += draw.expovariate(asked["rate"])
        if (wait_s := next_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        task = loop.create_task(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    late_s = loop.time() - next_s
    if tasks:
        await asyncio.wait(tasks, timeout=30)
    return {
        "requests": number,
        "failed": seen.failed + len(tasks),
        "refused": seen.refused,
        "events": seen.events,
        "late_ms": late_s * 1000,
        "ttft_ms": percentiles(seen.ttft),
        "delay_ms": percentiles(seen.delays),
    }


def percentiles(values: list[int]) -> dict[str, float]:
    """p50, p90 and p99 in ms."""
    ordered = sorted(values)
    return {
        name: ordered[int(len(ordered) * part)] / 1e6
        for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(load(int(sys.argv[1]), json.loads(sys.argv[2])))), flush=True)
