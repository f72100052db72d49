"""`gateway_faults`: what clients see while the gateway stands still, gateways are restarted, and long bodies come.

Clients send 50 prompts of 8,000 tokens a second, of whose answers each has 50 events, to the engine's stand-in of
`gateway`, through one gateway, or through two of which they take those that say they are ready.

- `gateway_frozen`: longest wait for a first event while the gateway's process is stopped for 3 s (its Envoy runs)
- `gateway_rolling`: requests that fail while two gateways are stopped and started, one after the other
- `gateway_image`: p99 of first events while bodies of 48 MB come one after the other, beside that while they go
  straight to the engine's stand-in, which has the same cores
- `gateway_event`: what an Envoy's worker carries of answers' events in its CPU time, beside a bare Envoy

Sketch: the same clients without the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.common import figure, median_spread, percentile, sized, wait_until
from benchmarks.gateway import LOAD, ROUNDS, Run, _answers, _cpu_s, _family, _resident_mb, bare_envoy
from benchmarks.gateway_load import bodies
from kvstrata import patience
from tests.harness import envoy_program
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess

CHAT = "/v1/chat/completions"
RATE, SECONDS = sized(50, 20), sized(8.0, 1.0)
FROZEN_S = 3.0
ASKS_S = 0.1
"""Interval at which clients ask a gateway whether it is ready."""
IMAGE = b'{"model":"m","stream":true,"max_tokens":1,"messages":[{"role":"user","content":"%b"}]}'
IMAGE_BYTES, IMAGES = sized(48_000_000, 100_000), sized(10, 1)
EVENTS = {**LOAD, "rate": sized(40, 5), "tokens": sized(400, 5), "prompt_tokens": 100}


class Seen(NamedTuple):
    """What clients saw: waits for first events in seconds, and requests that failed."""

    waits_s: list[float]
    failed: int


class Clients:
    """Requests at a steady rate, by turns to the gateways that are ready."""

    def __init__(self, gateways: list[GatewayProcess], session: aiohttp.ClientSession) -> None:
        self.gateways = gateways
        self._ready = list(gateways)
        self._session = session
        self._bodies = [one.partition(b"\r\n\r\n")[2] for one in bodies(LOAD)]

    async def ask(self, gateway: GatewayProcess, body: bytes) -> float:
        """Send a request and read its answer; return the seconds to its first event. Raises OSError, ClientError."""
        begun_s = time.monotonic()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(gateway.url + CHAT, data=body, headers=headers) as response:
            first = await response.content.readline()
            waited_s = time.monotonic() - begun_s
            if response.status != 200 or not (first + await response.read()).endswith(b"[DONE]\n\n"):
                raise OSError(f"{response.status}: {first!r}")
        return waited_s

    async def during(self, fault: Callable[[], Coroutine[Any, Any, None]]) -> Seen:
        """What requests see that come while `fault` runs."""
        tasks, running, watching = [], asyncio.create_task(fault()), asyncio.create_task(self._watch())
        while not running.done():
            gateway = self._ready[len(tasks) % len(self._ready)]
            tasks.append(asyncio.create_task(self.ask(gateway, self._bodies[len(tasks) % len(self._bodies)])))
            await asyncio.sleep(1 / RATE)
        await running
        watching.cancel()
        waits = await asyncio.gather(*tasks, return_exceptions=True)
        waits_s = [one for one in waits if isinstance(one, float)]
        return Seen(waits_s, len(waits) - len(waits_s))

    async def _watch(self) -> None:
        while True:
            ready = []
            for gateway in self.gateways:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with self._session.get(f"{gateway.url}/readyz") as response:
                        ready += [gateway] if response.status == 200 else []
            self._ready = ready or self._ready
            await asyncio.sleep(ASKS_S)


def run() -> list[dict[str, Any]]:
    """Return the figures."""
    # In a test it is 20, and a gateway that stops serves on for 100 s without a request.
    os.environ.pop(patience.VARIABLE, None)
    with contextlib.ExitStack() as stack:
        measured, folder = Run(stack), Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wait_until(lambda: _answers(measured.engine_port), "the engine's stand-in serves")
        engine = f"http://127.0.0.1:{measured.engine_port}"
        gateways = [GatewayProcess(folder / name, [engine]) for name in "ab"]
        for one in gateways:
            one.start()
            stack.callback(one.kill)
        found = asyncio.run(_faults(engine, gateways))
        for one in gateways:
            one.kill()
        port = free_port()
        measured.between("envoy", bare_envoy(folder, port, measured.engine_port), port)
        port = free_port()
        words = ["-m", "kvstrata.cli.gateway", "--no-supervise", "--engine", engine, "--port", str(port)]
        measured.between("gateway", [*words, "--envoy", str(envoy_program.program())], port)
        return [*found, _event(measured)]


async def _faults(engine: str, gateways: list[GatewayProcess]) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        one, both = Clients(gateways[:1], session), Clients(gateways, session)
        idle = await one.during(lambda: asyncio.sleep(SECONDS))

        async def freeze() -> None:
            await asyncio.sleep(SECONDS / 4)
            with gateways[0].frozen():
                await asyncio.sleep(FROZEN_S)
            await asyncio.sleep(SECONDS / 4)

        frozen = await one.during(freeze)
        pid = gateways[0].pid
        mb = [_resident_mb(pid)]

        body = IMAGE % (b"x" * IMAGE_BYTES)

        async def images(url: str) -> None:
            request = urllib.request.Request(url + CHAT, body, {"Content-Type": "application/json"})
            for _ in range(IMAGES):
                with await asyncio.to_thread(urllib.request.urlopen, request) as answer:
                    answer.read()
                mb.append(_resident_mb(pid))

        straight = await one.during(lambda: images(engine))
        image = await one.during(lambda: images(gateways[0].url))

        async def roll() -> None:
            for gateway in gateways:
                await asyncio.sleep(SECONDS / 4)
                gateway.signal(signal.SIGTERM)
                await asyncio.to_thread(gateway.ends)
                await asyncio.to_thread(gateway.start)

        rolled = await both.during(roll)
    longest_s = max(frozen.waits_s)
    image_s, beside_s = (percentile(one.waits_s, 0.99) for one in (image, straight))
    return [
        figure(
            "gateway_frozen",
            value=longest_s,
            unit="s",
            ratio=longest_s / max(idle.waits_s),
            ratio_to="the longest wait without",
            target="<= 1.1 s, no request lost",
            ok=longest_s <= 1.1 and not frozen.failed,
            failed=frozen.failed,
        ),
        figure(
            "gateway_rolling",
            value=rolled.failed,
            unit="requests",
            ratio=rolled.failed / len(rolled.waits_s),
            ratio_to="the requests that were answered",
            target="none fails",
            ok=not rolled.failed,
        ),
        figure(
            "gateway_image",
            value=image_s * 1_000,
            unit="ms",
            ratio=image_s / beside_s,
            ratio_to="that while they go straight to the engine",
            idle_ms=1_000 * percentile(idle.waits_s, 0.99),
            target="<= 2 x, memory <= 100 MB, no request lost",
            ok=image_s <= 2 * beside_s and max(mb) - mb[0] <= 100 and not image.failed,
            memory_mb=max(mb) - mb[0],
            failed=image.failed,
        ),
    ]


def _event(measured: Run) -> dict[str, Any]:
    """CPU time of the Envoys alone: the gateway's own process has no part in an event."""

    def cost_us(name: str) -> float:
        [*_, envoy] = _family(measured.pids[name])
        before_s = _cpu_s(envoy)
        events = measured.load(name, EVENTS)["events"]
        return (_cpu_s(envoy) - before_s) * 1e6 / float(events)

    rounds = [(cost_us("gateway"), cost_us("envoy")) for _ in range(ROUNDS)]
    (ours_us, spread), (bare_us, _) = map(median_spread, zip(*rounds, strict=True))
    return figure(
        "gateway_event",
        value=ours_us,
        unit="us",
        ratio=bare_us / ours_us,
        ratio_to="events of a bare Envoy in the same CPU time",
        target=">= 0.95 x",
        ok=bare_us >= 0.95 * ours_us,
        spread=spread,
    )
