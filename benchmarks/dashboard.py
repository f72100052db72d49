"""`dashboard_*`: the CPU time that 500 instances cost a browser that shows them, and that readers cost the controller.

The instances are simulated over the real protocol, with 4 tiers and 4 workers each.  Each sends a heartbeat every 10 s,
evenly spread, with new numbers each time, and a batch of changed chunks every second.

`dashboard_NAME` is the share of the time in which the main thread of the page's process is busy (TaskDuration of the
DevTools protocol), in a real Chromium.  The figure also has the thread's CPU time, and the growth of the heap of the
page's scripts, measured after garbage collections.  `dashboard_readers` is the CPU time that 16 readers of /v1/state
add to the controller's own; its ratio compares the two.  The ratio of a page compares with the target, since no other
program shows the same pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import random
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, CDPSession, Page

from benchmarks.common import NotHere, cpu_seconds, figure, scratch, sized, wait_until
from kvstrata import __version__
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.native.copying import crc32c
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_fields import TAG_BYTES, KvKind
from kvstrata.rpc.shared_key import SharedKey
from kvstrata.rpc.zmq_curve import ClusterKeys, new_secret
from kvstrata.rpc.zmq_link import AskLink, Links, PushLink
from kvstrata.types import LayoutIdentity
from tests.harness import chromium
from tests.harness.controller_process import ControllerProcess

TARGET_BUSY = 0.10
TARGET_CORES = 0.10
INSTANCES = sized(500, 12)
TIERS = ("l1", "disk-0", "redis-1", "mooncake-2")
WORKERS = 4
CHUNKS = sized(2_000, 50)
CHANGED = 8
"""Chunks in each batch of changes."""
READERS = sized(16, 2)
POLL_S = 2.0
SETTLE_S = sized(4.0, 0.5)
SECONDS = sized(12.0, 1.0)
GIB = 1 << 30
ANSWER_S = 5.0
PART_TAGS = 65_536
SYNC_ATTEMPTS = 100
EVICT_SHARE = 8
"""One in this many changes evicts a chunk that the previous batch admitted."""
NO_LOAD = wire.Load({}, {}, {}, {}, 0, 0, 0, 0)
PAGES = {
    "overview": "#/",
    "instances": "#/instances",
    "instance": "#/instances/node-0007",
    "tiers": "#/tiers",
    "explorer": "#/explorer",
    "events": "#/events",
    "metrics": "#/metrics",
}


@functools.cache
def own_address(url: str) -> str:
    """The address of this machine from which it connects to `url`, as endpoints write it. Raises Unavailable."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"cannot connect to {url!r}: {error.strerror}") from None
    return f"[{address}]" if family == socket.AF_INET6 else address


class Instance:
    """One simulated instance."""

    def __init__(
        self,
        links: Links,
        url: str,
        keys: ClusterKeys,
        name: str,
        chunks: int,
        tiers: Sequence[str] = ("l1",),
    ) -> None:
        """The instance holds `chunks` chunks in L1 once it has joined. `tiers` begins with `l1`."""
        self.name = name
        self.tiers = list(tiers)
        self.incarnation = secrets.randbelow(1 << 62) + 1
        self.held = os.urandom(TAG_BYTES * chunks)
        """Tags that the instance names in its sync and never evicts."""
        self._links = links
        self._host = url.rpartition(":")[0]
        self._peer_endpoint = f"tcp://{own_address(url)}:9"
        self._keys = keys
        self._reply = links.ask(url, keys=keys)
        self._push: PushLink | None = None
        self._heart: AskLink | None = None
        self._seq = 0
        self._before = b""
        self._frame = b""

    async def join(self) -> float:
        """Register and sync; returns the seconds between two heartbeats. Raises Unavailable or ClusterFailure."""
        request = wire.Register(
            0, wire.CLUSTER_PROTOCOL_VERSION, self.name, self.incarnation, __version__, self.tiers, len(self.held), 256,
            self._peer_endpoint, "", "bench", "bench", os.getpid(),
        )  # fmt: skip
        registered = await self._reply.ask(request, wire.Registered, ANSWER_S)
        self._push = self._links.push(f"{self._host}:{registered.pull_port}", keys=self._keys)
        self._heart = self._links.ask(f"{self._host}:{registered.heartbeat_port}", keys=self._keys)
        me = (self.name, self.incarnation, 1)
        await self._reply.ask(wire.SyncBegin(0, *me, 0), wire.Done, ANSWER_S)
        size = PART_TAGS * TAG_BYTES
        parts = [self.held[at : at + size] for at in range(0, len(self.held), size)]
        for index, tags in enumerate(parts):
            await self._part(wire.SyncPart(0, *me, index, "l1", tags, crc32c(tags)))
        counts = {"l1": len(self.held) // TAG_BYTES}
        await self._reply.ask(wire.SyncEnd(0, *me, len(parts), counts), wire.Done, ANSWER_S)
        await self.beat()
        return registered.heartbeat_ms / 1000

    async def _part(self, part: wire.SyncPart) -> None:
        for attempt in range(SYNC_ATTEMPTS):
            try:
                await self._reply.ask(part, wire.Done, ANSWER_S)
            except ClusterFailure as refused:
                if not refused.retryable or attempt == SYNC_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(refused.retry_after_ms / 1000)
            else:
                return

    async def beat(self, load: wire.Load = NO_LOAD, models: Sequence[KvKind] = ()) -> None:
        """Send one heartbeat. Raises Unavailable or ClusterFailure."""
        assert self._heart is not None
        told = wire.Heartbeat(0, self.name, self.incarnation, self._seq, "ready", load, list(models), [])
        await self._heart.ask(told, wire.Beat, ANSWER_S)

    def try_tell(self, keys: int, tier: str = "l1") -> bool:
        """Send a batch of `keys` changes of one tier; returns False if the socket accepts no message now.

        The next call then sends that same batch, whatever its arguments.
        """
        assert self._push is not None
        if not self._frame:
            evicts = self._before[: TAG_BYTES * (keys // EVICT_SHARE)]
            admits = os.urandom(TAG_BYTES * keys - len(evicts))
            runs = [wire.Run(wire.Change.ADMIT, tier, admits)]
            if evicts:
                runs.append(wire.Run(wire.Change.EVICT, tier, evicts))
            self._frame = wire.encode(wire.Events(self.name, self.incarnation, self._seq + 1, runs))
            self._before = admits
        if not self._push.try_send(self._frame):
            return False
        self._seq += 1
        self._frame = b""
        return True


def load_of(chance: random.Random, one: Instance, before: wire.Load | None) -> wire.Load:
    """Return an instance's load, whose numbers have moved since its last heartbeat."""
    hits = dict(before.hits_total) if before else {"l1": 0, "l2": 0, "peer": 0, "miss": 0}
    for source, most in {"l1": 900, "l2": 200, "peer": 90, "miss": 300}.items():
        hits[source] += chance.randrange(most)
    return wire.Load(
        {},
        {tier: chance.randrange(20 * GIB, 60 * GIB) for tier in one.tiers},
        dict.fromkeys(one.tiers, 64 * GIB),
        hits,
        chance.randrange(GIB),
        (before.peer_sent_bytes_total if before else 0) + chance.randrange(GIB),
        (before.peer_read_bytes_total if before else 0) + chance.randrange(GIB),
        WORKERS,
    )


def live(port: int, joined: Event, stop: Event) -> None:
    """Run the instances until `stop`, in a process of its own."""
    asyncio.run(_live(port, joined, stop))


async def _live(port: int, joined: Event, stop: Event) -> None:
    links = Links(asyncio.get_running_loop())
    chance = random.Random(1)
    shared = SharedKey("controller.curve_file")
    ones = [
        Instance(
            links,
            f"tcp://127.0.0.1:{port}",
            shared.of_member(new_secret()),
            f"node-{number:04}",
            CHUNKS,
            TIERS,
        )
        for number in range(INSTANCES)
    ]
    layout = LayoutIdentity(model="meta-llama/Llama-3.1-8B-Instruct", kv_dtype="bf16", chunk_tokens=256)
    models = [KvKind(layout, [])]
    try:
        beats_s = 0.0
        for one in ones:
            beats_s = await one.join()
        joined.set()
        loads: dict[str, wire.Load] = {}
        started_s, beats, batches = time.monotonic(), 0, 0
        while not stop.is_set():
            passed_s = time.monotonic() - started_s
            while beats < passed_s * len(ones) / beats_s:
                one = ones[beats % len(ones)]
                loads[one.name] = load_of(chance, one, loads.get(one.name))
                await one.beat(loads[one.name], models)
                beats += 1
            while batches < passed_s * len(ones):
                ones[batches % len(ones)].try_tell(CHANGED, TIERS[batches // len(ones) % len(TIERS)])
                batches += 1
            await asyncio.sleep(0.005)
    finally:
        links.close()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[ControllerProcess]:
    """Run a controller and the instances until the end of the block."""
    flags = ("--heartbeat-s", "10", "--dead-after-s", "60")
    context = multiprocessing.get_context("spawn")
    with ControllerProcess(folder, flags=flags) as controller:
        joined, stop = context.Event(), context.Event()
        process = context.Process(target=live, args=(controller.ports["reply"], joined, stop))
        process.start()
        try:
            wait_until(lambda: joined.is_set() or not process.is_alive(), "the instances join", 120)
            if not joined.is_set():
                raise RuntimeError("the instances could not join; see above")
            yield controller
        finally:
            stop.set()
            process.join()


async def read(controller: ControllerProcess, ready: asyncio.Event, counts: list[int]) -> None:
    """Ask for the state as the page does until cancelled; `counts` gets the length of each answer."""
    async with httpx.AsyncClient(base_url=controller.url, headers=controller.bearer()) as client:
        while True:
            answer = await client.get("/v1/state")
            answer.raise_for_status()
            counts.append(len(answer.content))
            ready.set()
            await asyncio.sleep(POLL_S)


async def cores(controller: ControllerProcess, readers: int) -> tuple[float, float]:
    """Return how many cores the controller uses with `readers` readers, and how many bytes a second each one gets."""
    counts: list[int] = []
    ready = [asyncio.Event() for _ in range(readers)]
    tasks = [asyncio.create_task(read(controller, each, counts)) for each in ready]
    for each in ready:
        await asyncio.wait_for(each.wait(), 30)
    await asyncio.sleep(SETTLE_S)
    counts.clear()
    begun_s, used_s = time.monotonic(), cpu_seconds(controller.pid)
    await asyncio.sleep(SECONDS)
    seconds = time.monotonic() - begun_s
    used = (cpu_seconds(controller.pid) - used_s) / seconds
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            raise RuntimeError(f"a reader ended: {ended}")
    return used, sum(counts) / seconds / max(1, readers)


async def metrics(session: CDPSession) -> dict[str, float]:
    """Return the metrics of the page's process by name."""
    told = await session.send("Performance.getMetrics")
    return {one["name"]: one["value"] for one in told["metrics"]}


async def heap(session: CDPSession) -> float:
    """Return the bytes of the scripts' heap after a garbage collection."""
    await session.send("HeapProfiler.collectGarbage")
    return (await metrics(session))["JSHeapUsedSize"]


async def renderers(browser: Browser) -> dict[int, float]:
    """Return the CPU time of the main thread of each renderer process; only one of them shows a page."""
    session = await browser.new_browser_cdp_session()
    told = await session.send("SystemInfo.getProcessInfo")
    await session.detach()
    return {
        pid: thread_seconds(pid)
        for pid in (int(one["id"]) for one in told["processInfo"] if one["type"] == "renderer")
    }


def thread_seconds(pid: int) -> float:
    """Return the CPU time of a process's main thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def busy(browser: Browser, page: Page, path: str) -> dict[str, float]:
    """Show a page for SECONDS and return its costs by name."""
    await page.evaluate("(hash) => { location.hash = hash; }", path)
    await asyncio.sleep(SETTLE_S)
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")
    first_heap = await heap(session)
    threads_s = await renderers(browser)
    begun_s, first = time.monotonic(), await metrics(session)
    await asyncio.sleep(SECONDS)
    seconds, last = time.monotonic() - begun_s, await metrics(session)
    thread_s = max(
        used_s - threads_s[pid] for pid, used_s in (await renderers(browser)).items() if pid in threads_s
    )
    grown = await heap(session) - first_heap
    await session.detach()
    return {
        "value": (last["TaskDuration"] - first["TaskDuration"]) / seconds,
        "thread_cpu": thread_s / seconds,
        "script": (last["ScriptDuration"] - first["ScriptDuration"]) / seconds,
        "layout": (last["LayoutDuration"] - first["LayoutDuration"]) / seconds,
        "nodes": last["Nodes"],
        "heap_mb": last["JSHeapUsedSize"] / 1e6,
        "heap_grown_mb": grown / 1e6,
    }


async def measure(controller: ControllerProcess) -> list[dict[str, Any]]:
    """Measure the readers, then the pages; return the figures."""
    alone, _ = await cores(controller, 0)
    with_readers, read_bytes = await cores(controller, READERS)
    figures = [
        figure(
            "dashboard_readers",
            value=with_readers - alone,
            unit="cores",
            ratio=with_readers / alone,
            target=f"≤ {TARGET_CORES:g} cores more for {READERS} readers than for none",
            ok=with_readers - alone <= TARGET_CORES,
            ratio_to=f"the controller without readers, {alone:.3f} cores",
            read_bytes_per_s=read_bytes,
        )
    ]
    try:
        async with (
            chromium.browser() as browser,
            chromium.visit(
                browser, f"{controller.url}/", live=False, link=controller.dashboard_link()
            ) as page,
        ):
            await page.locator("#connection.live").wait_for()
            for name, path in PAGES.items():
                found = await busy(browser, page, path)
                value = found.pop("value")
                figures.append(
                    figure(
                        f"dashboard_{name}",
                        value=value,
                        unit="of the main thread",
                        ratio=value / TARGET_BUSY,
                        ratio_to="the target",
                        target=f"≤ {TARGET_BUSY:.0%}",
                        ok=value <= TARGET_BUSY,
                        **{key: round(number, 4) for key, number in found.items()},
                    )
                )
    except chromium.Unavailable as unavailable:
        raise NotHere(str(unavailable)) from None
    return figures


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with scratch("dashboard") as folder, cluster(folder) as controller:
        return asyncio.run(measure(controller))
