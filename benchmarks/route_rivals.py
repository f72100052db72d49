"""`route_rivals_*`: this gateway, smg 1.13.0 and vllm-router 0.1.17 as processes before simulated engines in real time.

Each router in turn serves the same loads before eight fresh engines (`kvstrata sim`), which are so slow that this
machine's CPU limits nothing.  Prompts are text, one token a
byte, and clients read streams.  This gateway has the token ids from the engines' /render, and knows caches by the
engines' KV events; smg and vllm-router's `cache_aware` keep trees of the texts that they sent; vllm-router's `kv_aware`
hears the events too.  All other settings are the defaults.

    _p99   99th percentile of the time to the first token through this gateway, beside the best other router's,
           geometric mean over the loads with reuse; `loads` has all routers
    _none  the same without reuse

Sketch: what benchmarks/route_fleet.py finds in virtual time for the policies, and the time of a hop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.common import ROOT, compared, percentile, scratch, sized, wait_until
from benchmarks.gateway import rival
from benchmarks.route_fleet import OTHERS, REUSE, SEED, drawn
from benchmarks.route_loads import Asked
from tests.harness import envoy_program
from tests.harness.daemon import free_port

ENGINES = sized(8, 2)
REQUESTS = sized(200, 6)
SPEED = float(os.environ.get("BENCH_SPEED", sized("0.1", "1")))
"""Of the engines' clocks."""
LEVEL = 0.85
LOADS = sized(("conversations", "shared", "none"), ("shared", "none"))
MODEL = "sim"
PATIENCE_S = 600.0
STARTS = 3
"""Tries to start a router."""


class Engine(NamedTuple):
    """A simulated engine."""

    port: int
    events_port: int

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"


def gateway(engines: Sequence[Engine], port: int, folder: Path) -> list[str]:
    """The command of this gateway."""
    config = folder / "gateway.yaml"
    urls = "".join(f"  - url: {engine.url}\n" for engine in engines)
    config.write_text(
        f"http:\n  port: {port}\nenvoy: {envoy_program.program()}\nengines:\n{urls}policy: ttft\n"
        "tokens:\n  render: true\n  deadline_ms: 1000\n"
    )
    return [sys.executable, "-m", "kvstrata.cli.gateway", "--no-supervise", "--config", str(config)]


def other(name: str, policy: str) -> Callable[[Sequence[Engine], int, Path], list[str]]:
    """The command of another router."""

    def command(engines: Sequence[Engine], port: int, folder: Path) -> list[str]:
        words = [str(rival(name)), *(["launch"] if name == "smg" else [])]
        words += ["--worker-urls", *(engine.url for engine in engines), "--policy", policy]
        words += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        if policy == "kv_aware":
            words += ["--kv-event-model", MODEL]
            for engine in engines:
                words += ["--kv-event-source", f"{engine.url}=tcp://127.0.0.1:{engine.events_port}"]
        return words

    return command


ROUTERS: dict[str, Callable[[Sequence[Engine], int, Path], list[str]]] = {
    "gateway": gateway,
    **sized(
        {
            "smg": other("smg", "cache_aware"),
            "vllm-router cache_aware": other("vllm-router", "cache_aware"),
            "vllm-router kv_aware": other("vllm-router", "kv_aware"),
        },
        {},
    ),
}


class Seen(NamedTuple):
    """What clients saw of a load, and what engines counted."""

    ttft_s: list[float]
    failed: int
    hit: float


@contextlib.contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, killed with its children at the end of the block."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            start_new_session=True,
        )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def answers(url: str) -> bool:
    """Whether a GET is answered with success."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def engine_words(engine: Engine) -> list[str]:
    """The command of an engine."""
    words = [
        sys.executable,
        "-c",
        "import sys; from kvstrata.cli.sim import main; sys.exit(main(sys.argv[1:]))",
    ]
    words += ["--port", str(engine.port), "--model", MODEL, "--speed", str(SPEED), "--enable-scale-out"]
    return [*words, "--answer-tokens", "600", "--kv-events-endpoint", f"tcp://127.0.0.1:{engine.events_port}"]


def counted(engines: Sequence[Engine]) -> tuple[float, float]:
    """Tokens of prompts that the engines looked up, and that they found."""
    looked = found = 0.0
    for engine in engines:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        looked += sum(float(one) for one in re.findall(r"prefix_cache_queries_total\{.*\} (\S+)", text))
        found += sum(float(one) for one in re.findall(r"prefix_cache_hits_total\{.*\} (\S+)", text))
    return looked, found


def served(name: str, load: list[Asked]) -> Seen:
    """Serve a load through a router."""
    engines = [Engine(free_port(), free_port()) for _ in range(ENGINES)]
    with scratch("rivals") as folder, contextlib.ExitStack() as stack:
        for number, engine in enumerate(engines):
            stack.enter_context(process(engine_words(engine), folder / f"engine-{number}.log"))
        wait_until(lambda: all(answers(f"{engine.url}/health") for engine in engines), "the engines serve")
        port = started(name, engines, folder, stack)
        looked, found = counted(engines)
        ttft_s, failed = asyncio.run(ask(port, load))
        looked, found = (now - before for now, before in zip(counted(engines), (looked, found), strict=True))
        return Seen(ttft_s, failed, found / max(1.0, looked))


def started(name: str, engines: Sequence[Engine], folder: Path, stack: contextlib.ExitStack) -> int:
    """Start a router, and return its port. Raises RuntimeError with what it said."""
    log = folder / "router.log"
    for _ in range(STARTS):
        port = free_port()  # somebody else may take it before the router does
        router = stack.enter_context(process(ROUTERS[name](engines, port, folder), log))

        def settled(port: int = port, router: subprocess.Popen[bytes] = router) -> bool:
            return router.poll() is not None or asyncio.run(warm(port))

        wait_until(settled, f"{name} serves")
        if router.poll() is None:
            return port
    raise RuntimeError(f"{name} ended at once: {log.read_text()[-500:]}")


def body_of(asked: Asked) -> bytes:
    """The request: each token is a letter."""
    text = bytes(35 + token % 56 for token in asked.prompt).decode()  # neither a quote nor a backslash
    return json.dumps(
        {"model": MODEL, "prompt": text, "max_tokens": len(asked.answer), "stream": True}
    ).encode()


async def warm(port: int) -> bool:
    """Whether a short request is answered."""
    async with aiohttp.ClientSession() as session:
        return await first_s(session, port, body_of(Asked(0.0, [0], b"x", "", 0))) is not None


async def first_s(session: aiohttp.ClientSession, port: int, body: bytes) -> float | None:
    """Seconds until the first event of an answer, which is read to its end; None if it failed."""
    begun_s = time.monotonic()
    first: float | None = None
    try:
        headers = {"content-type": "application/json"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with session.post(url, data=body, headers=headers) as response:
            whole = b""
            async for part in response.content.iter_any():
                if first is None and part.strip():
                    first = time.monotonic() - begun_s
                whole = (whole + part)[-64:]
            return first if response.status == 200 and b"[DONE]" in whole else None
    except (aiohttp.ClientError, TimeoutError):
        return None


async def ask(port: int, load: list[Asked]) -> tuple[list[float], int]:
    """Send the requests at their times; return times to first tokens, and how many failed."""
    bodies = [body_of(asked) for asked in load]
    limits = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        begun_s = time.monotonic() + 0.1

        async def one(asked: Asked, body: bytes) -> float | None:
            await asyncio.sleep(begun_s + asked.at / SPEED - time.monotonic())
            return await first_s(session, port, body)

        found = await asyncio.gather(*(one(*pair) for pair in zip(load, bodies, strict=True)))
    ttft_s = [one for one in found if one is not None]
    return ttft_s, len(found) - len(ttft_s)


def row(seen: Seen) -> dict[str, float]:
    """What is shown of a router and a load."""
    return {
        "p50_s": round(statistics.median(seen.ttft_s), 4),
        "p99_s": round(percentile(seen.ttft_s, 0.99), 4),
        "mean_s": round(statistics.fmean(seen.ttft_s), 4),
        "hit": round(seen.hit, 4),
        "failed": seen.failed,
    }


def run() -> list[dict[str, Any]]:
    """Serve all loads through all routers."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        asked = drawn((REUSE | OTHERS)[load], SEED, REQUESTS, ENGINES, LEVEL)
        rows[load] = {}
        for name in ROUTERS:
            rows[load][name] = row(served(name, asked))
            if sized(full=True, small=False):
                print(f"   {load}, {name}: {rows[load][name]}", flush=True)
    return [
        beside("route_rivals_p99", 1.0, {load: rows[load] for load in LOADS if load != "none"}),
        beside("route_rivals_none", 1.02, {"none": rows["none"]}),
    ]


def beside(name: str, most: float, rows: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """The gateway beside the best other router of each load."""

    def ratio(by: dict[str, dict[str, float]]) -> float:
        others = [one["p99_s"] for router, one in by.items() if router != "gateway"]
        return by["gateway"]["p99_s"] / min(others, default=by["gateway"]["p99_s"])

    ratios = {load: ratio(by) for load, by in rows.items()}
    failed = sum(by["gateway"]["failed"] for by in rows.values())
    return compared(
        name,
        math.exp(statistics.fmean(math.log(one) for one in ratios.values())),
        "× the best other router's p99",
        "the best other router's p99; nothing fails",
        1.0,
        most=most,
        ok=not failed,
        by_load=ratios,
        loads=rows,
        speed=SPEED,
        engines=ENGINES,
    )
