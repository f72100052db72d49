"""`cluster_follow`: how late a follower knows of a change, and what two followers cost an instance.

A process with a real pool and a real control port notes 10,000 changes a second of an L2 tier, 100 at a time; two
followers of this process poll it over CURVE.  Each tag is the time at which it was noted, so a follower sees how late
it is.  `cpu_percent` is the share of a core that the instance's process uses more than before they began.

Sketch: changes are gathered for 15 ms, so a change waits 8 ms on average and little more than 15 ms at most; two
followers ask 130 times a second.

`cluster_listing`: how long a controller needs to list 100 instances of a million chunks each, at once.
The instances are stand-ins in one process, which makes pages of random tags; no instance keeps what it said.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import struct
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.common import cpu_seconds, figure, percentile, scratch, sized, wait_until
from kvstrata.errors import Unavailable
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_curve import ClusterKeys, KeyKind, new_secret, open_keys, public_of
from kvstrata.rpc.zmq_link import Links
from kvstrata.rpc.zmq_server import Address
from kvstrata.server.cluster.held import GATHER_S, HeldChunks
from kvstrata.tiers.set import TierSet
from tests.harness.cluster_instance import PAGE_TAGS, ClusterInstance, Holdings
from tests.harness.controller_process import ControllerProcess
from tests.harness.l1 import L1

CHANGES_S, AT_ONCE = 10_000, 100
SECONDS = sized(10.0, 0.3)
TARGET_P99_MS, TARGET_CPU_PERCENT = 20.0, 1.0
INSTANCES, CHUNKS = sized((100, 1_000_000), (3, 100_000))
TARGET_LISTING_S = 12.0


def instance(pipe: Connection) -> None:
    """Serve followers, and note changes; the main function of the instance's process."""

    async def main() -> None:
        loop, secret = asyncio.get_running_loop(), new_secret()
        pool = L1().pool
        held = HeldChunks(pool, TierSet(), Supervisor(loop))
        number = held._number("disk-0")

        def changes(asked: wire.Changes, _: Address) -> asyncio.Future[wire.Changed]:
            return held.changes(
                asked.cursor, asked.wait_ms / 1000, lambda *found: wire.Changed(asked.seq, 1, *found)
            )

        port = ControlPort(loop, 1)
        port.serve((KeyKind.CONTROLLER,), {wire.Changes: changes})
        where = port.server.bind_tcp("127.0.0.1", 0, keys=ClusterKeys(secret), anywhere=False)
        port.start()
        pipe.send((where, public_of(secret)))
        began_s, cpu_s, rows = loop.time(), time.process_time(), []
        for seconds in (SECONDS / 2, SECONDS):  # alone, and with followers
            ends_s, n = began_s + seconds, 0
            while loop.time() < ends_s:
                tags = struct.pack("<Q", time.monotonic_ns()) + bytes(24)
                keys = b"".join(
                    (int.from_bytes(tags[:8], "little") + one).to_bytes(8, "little") + bytes(24)
                    for one in range(AT_ONCE)
                )
                pool.note_changes(number, wire.Change.ADMIT, keys)
                n += AT_ONCE
                await asyncio.sleep(max(0.0, began_s + n / CHANGES_S - loop.time()))
            rows.append(((time.process_time() - cpu_s) / (loop.time() - began_s), n))
            began_s, cpu_s = loop.time(), time.process_time()
            if len(rows) == 1:
                pipe.send("alone")
                await loop.run_in_executor(None, pipe.recv)
                began_s, cpu_s = loop.time(), time.process_time()
        pipe.send((rows, held.polls))
        await port.close()
        await held.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as a server does
        runner.run(main())


async def follow(endpoint: str, public: bytes, ended: threading.Event, late_ns: list[int]) -> None:
    """Poll until `ended`, and note how late each change is."""
    links = Links(asyncio.get_running_loop())
    link = links.ask(endpoint, keys=open_keys().to(public.decode()))
    cursor = (await link.ask(wire.Changes(0, -1), wire.Changed, 10.0)).next
    while not ended.is_set():
        try:
            changed = await link.ask(wire.Changes(0, cursor, 200), wire.Changed, 2.0)
        except Unavailable:  # the instance has ended
            break
        now_ns, cursor = time.monotonic_ns(), changed.next
        for run in changed.runs:
            late_ns += [now_ns - tag for (tag,) in struct.iter_unpack("<Q", run.tags)]
    links.close()


def run() -> list[dict[str, Any]]:
    """Measure with two followers; return the figure."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=instance, args=(theirs,))
    process.start()
    number, public = pipe.recv()
    pipe.recv()
    ended, late = threading.Event(), ([], [])  # type: tuple[threading.Event, tuple[list[int], list[int]]]

    async def both() -> None:
        await asyncio.gather(*(follow(f"tcp://127.0.0.1:{number}", public, ended, one) for one in late))

    thread = threading.Thread(target=lambda: asyncio.run(both()))
    thread.start()
    pipe.send("go")
    (alone, _), (followed, n_changes) = (told := pipe.recv())[0]
    ended.set()
    thread.join()
    process.join()
    seconds = [one / 1e9 for of in late for one in of]
    p99_ms, cpu_percent = percentile(seconds, 0.99) * 1e3, (followed - alone) * 100
    return [
        figure(
            "cluster_follow",
            value=p99_ms,
            unit="ms from a change to a follower's answer, p99",
            ratio=p99_ms / (GATHER_S * 1e3),
            ratio_to=f"{GATHER_S * 1e3:g} ms, for which changes are gathered",
            target=f"<= {TARGET_P99_MS:g} ms, <= {TARGET_CPU_PERCENT:g} % of a core",
            ok=p99_ms <= TARGET_P99_MS and cpu_percent <= TARGET_CPU_PERCENT,
            p50_ms=percentile(seconds, 0.5) * 1e3,
            cpu_percent=cpu_percent,
            changes=n_changes,
            answers=told[1],
        )
    ]


class Vast(Holdings):
    """Holds a million chunks: makes each page of random tags when it is asked for."""

    async def _list(self, asked: wire.List, _: Address) -> wire.Listed:
        left = CHUNKS - asked.cursor if asked.tier == "l1" else 0
        n = min(left, PAGE_TAGS)
        following = asked.cursor + n if left > n else 0
        return wire.Listed(asked.seq, self._incarnation, following, os.urandom(8 * n))


def run_cluster_listing() -> list[dict[str, Any]]:
    """Measure how long a controller needs to list all instances; return the figure."""
    flags = ("--heartbeat-s", "60", "--dead-after-s", "600")
    with scratch("controller") as folder, ControllerProcess(folder, flags=flags) as controller:
        port = controller.ports["reply"]
        instances = [ClusterInstance(port, f"i{n}", holds=Vast) for n in range(INSTANCES)]
        began_s, spent_s = time.perf_counter(), cpu_seconds(controller.pid)
        for one in instances:
            one.register()
        for one in instances:
            one.until_followed()
        took_s = time.perf_counter() - began_s
        controller_s = cpu_seconds(controller.pid) - spent_s
        wait_until(lambda: not controller.ask("/v1/cluster")["instances"]["unconfirmed"], "all are confirmed")
        told = controller.ask("/v1/cluster")["directory"]
        for one in instances:
            one.close()
    sketch_s = 8 * INSTANCES * CHUNKS / 1e9
    return [
        figure(
            "cluster_listing",
            value=took_s,
            unit="s",
            ratio=took_s / sketch_s,
            ratio_to="the tags at 1 GB/s",
            target=f"<= {TARGET_LISTING_S:g} s",
            ok=took_s <= TARGET_LISTING_S,
            controller_cpu_s=controller_s,
            placements=told["placements"],
            directory_bytes=told["bytes"],
        )
    ]
