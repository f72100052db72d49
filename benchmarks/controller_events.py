"""`controller_events`: how many keys per second a controller on one core takes in from changes, over the real protocol.

Eight instances answer with batches of 16,384 tags as fast as the controller asks.  A batch admits 14,336 tags and
evicts 2,048 tags of the batch before it (an instance's first batch only admits).  The clock stops when lookups find a
tag of each instance's last batch.  The controller has one core; the instances share the others.  `lookup_p99_ms` is the
round trip of a lookup of 512 tags (a prompt of 128k tokens).  A lookup is sent a millisecond after the answer to the
one before, while another instance is listed with a million keys one time after another.

Sketch: a batch is 128 KiB through a TCP socket and msgpack, and 16,384 changes in the registry.  The ratio compares
with the registry alone, which makes the same changes on one thread.  `keys_per_cpu_s` is by the controller's own CPU
time, which other work on the machine disturbs less.

`controller_restart`: how long a controller needs after SIGKILL until all 100 × 1,000,000 chunks are confirmed.  The
time begins when the new process is started.  The controller reads its snapshot.  The instances try every 10 ms to
register again, and then each is followed, or listed, over the real protocol.  (A real instance notices the restart by
its connection; that time is not in the figure.)  The ratio compares with the registry alone.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.cluster_follow import CHUNKS, Vast
from benchmarks.cluster_follow import INSTANCES as RESTARTED
from benchmarks.common import compared, cpu_seconds, median_spread, percentile, scratch, sized, wait_until
from kvstrata.native.core import Registry
from kvstrata.rpc import cluster_wire as wire
from tests.harness.cluster_instance import ClusterInstance, Refused
from tests.harness.controller_process import ControllerProcess

TARGET_KEYS = 500_000
TARGET_P99_MS = 2.0
INSTANCES = 8
BATCH = 16_384
BATCHES = sized(64, 2)
"""Batches of each instance in a round; in a full run all instances together send 8,388,608 keys per round."""
ROUNDS = sized(5, 1)
LISTED_KEYS = sized(1_000_000, 20_000)
LOOKUP_TAGS = 512
LOOKUPS = sized(3_000, 50)
PAUSE_S = 0.001
RESTART_TARGET_S = 1.0
RESTARTS = sized(5, 1)
RESTART_FLAGS = ("--heartbeat-s", "60", "--dead-after-s", "600")
TRY_S = 0.01


def batches() -> list[list[wire.Run]]:
    """Make the batches of one instance for one round. The tags are random, so processor caches do not help."""
    made: list[list[wire.Run]] = []
    before = b""
    for _ in range(BATCHES):
        tags = os.urandom(8 * BATCH)
        evict = before[: 8 * (BATCH // 8)]
        runs = [wire.Run(wire.Change.ADMIT, "l1", tags[: 8 * (BATCH - len(evict) // 8)])]
        if evict:
            runs.append(wire.Run(wire.Change.EVICT, "l1", evict))
        made.append(runs)
        before = tags
    return made


def bare_seconds(sent: list[list[list[wire.Run]]]) -> float:
    """Return the seconds that the registry alone takes for the same changes. `sent`: the batches of each instance."""
    registry = Registry()
    slots = []
    for group in range(len(sent)):
        slot = registry.open_slot(group)
        assert slot is not None
        registry.publish(slot)
        slots.append(slot)
    started = time.perf_counter()
    for at in range(BATCHES):
        for slot, made in zip(slots, sent, strict=True):
            for run in made[at]:
                (registry.admit if run.change is wire.Change.ADMIT else registry.evict)(slot, run.tags)
    return time.perf_counter() - started


def keep_listing(port: int, lists: Any, stop: Event) -> None:
    """Be listed one time after another until `stop` is set, and count that in `lists`; the main function of a process.

    It runs at the lowest priority, because it may share its core with the process that times the lookups: at equal
    priority the figure would include the time for which it keeps that process waiting.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with ClusterInstance(port, "listed") as one:
        one.join({})
        while not stop.is_set():
            one.hold({"l1": os.urandom(8 * LISTED_KEYS)})
            one.forget_changes()
            one.until_followed()
            lists.value += 1


def run() -> list[dict[str, Any]]:
    """Start a controller on a core of its own and measure. Raises RuntimeError if fewer than two cores are allowed."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(
            "two cores are needed, one for the controller and one for the senders; one is allowed"
        )
    with (
        scratch("controller") as folder,
        ControllerProcess(folder, flags=("--heartbeat-s", "600", "--dead-after-s", "1200")) as controller,
    ):
        os.sched_setaffinity(controller.pid, {cores[0]})
        for task in os.listdir(f"/proc/{controller.pid}/task"):
            os.sched_setaffinity(int(task), {cores[0]})
        os.sched_setaffinity(0, set(cores[1:]))
        try:
            return [measure(controller)]
        finally:
            os.sched_setaffinity(0, set(cores))


def measure(controller: ControllerProcess) -> dict[str, Any]:
    """Measure changes, then lookups during lists; return the figure. Raises RuntimeError if anything was lost."""
    port = controller.ports["reply"]
    reader = ClusterInstance(port, "reader").join({})
    rates, bare, by_cpu = [], [], []
    instances = [ClusterInstance(port, f"i{number}").join({}) for number in range(INSTANCES)]
    for _ in range(ROUNDS):
        sent = [batches() for _ in range(INSTANCES)]
        keys = sum(len(run.tags) // 8 for made in sent for runs in made for run in runs)
        started, spent_s = time.perf_counter(), cpu_seconds(controller.pid)
        for one, made in zip(instances, sent, strict=True):
            one.log(run for runs in made for run in runs)
        for made in sent:
            reader.until_where(made[-1][0].tags[:8], bool)
        rates.append(keys / (time.perf_counter() - started))
        by_cpu.append(keys / (cpu_seconds(controller.pid) - spent_s))
        bare.append(keys / bare_seconds(sent))
        for one in instances:
            one.log([wire.Run(wire.Change.CLEAR, "l1", b"")])
            one.until_followed()
    rows = controller.ask("/v1/instances")["instances"]
    if any(row["following"]["lists"] != 1 or not row["confirmed"] for row in rows):
        raise RuntimeError(f"an instance was listed again, or is not confirmed: {rows}")
    for one in instances:
        one.close()
    context = multiprocessing.get_context("spawn")
    stop, lists = context.Event(), context.Value("i", 0)
    process = context.Process(target=keep_listing, args=(port, lists, stop))
    process.start()
    holder = ClusterInstance(port, "holder")
    held = os.urandom(8 * LOOKUP_TAGS)
    holder.join({"l1": held})
    while not lists.value:
        time.sleep(0.01)
    first, seconds = lists.value, []
    started = time.perf_counter()
    for _ in range(LOOKUPS):
        asked = time.perf_counter()
        owners = reader.where(held)
        seconds.append(time.perf_counter() - asked)
        if [owner.n_keys for owner in owners] != [LOOKUP_TAGS]:
            raise RuntimeError(f"the lookup found {owners}, not one owner of {LOOKUP_TAGS} keys")
        time.sleep(PAUSE_S)
    listed_keys = (lists.value - first) * LISTED_KEYS / (time.perf_counter() - started)
    stop.set()
    process.join()
    for one in (holder, reader):
        one.close()
    p99_ms = percentile(seconds, 0.99) * 1e3
    return compared(
        "controller_events",
        rates,
        "keys/s on one core, lookups in a list meanwhile",
        "the registry alone",
        bare,
        ok=median_spread(rates)[0] >= TARGET_KEYS and p99_ms <= TARGET_P99_MS,
        keys_per_cpu_s=median_spread(by_cpu)[0],
        lookup_p50_ms=percentile(seconds, 0.5) * 1e3,
        lookup_p99_ms=p99_ms,
        lookup_max_ms=max(seconds) * 1e3,
        listed_keys_per_s=listed_keys,
    )


def come_back(one: ClusterInstance, ended: list[float]) -> None:
    """Register with the controller as soon as it answers; append the time at which it is in step to `ended`."""
    one.holdings.in_step.clear()
    while True:
        try:
            one.register(timeout_s=0.5)
            break
        except (TimeoutError, Refused):
            time.sleep(TRY_S)
    one.until_followed()
    ended.append(time.perf_counter())


def admitted_seconds() -> float:
    """Return the seconds that a registry alone needs to admit as many placements."""
    registry, held = Registry(), [os.urandom(8 * CHUNKS) for _ in range(RESTARTED)]
    started = time.perf_counter()
    for group, tags in enumerate(held):
        slot = registry.open_slot(group)
        assert slot is not None
        registry.admit(slot, tags)
        registry.publish(slot)
    return time.perf_counter() - started


def run_controller_restart() -> list[dict[str, Any]]:
    """Measure how long a controller needs after SIGKILL until all chunks are confirmed."""
    environment = {**os.environ, "KVSTRATA_CONTROLLER_DIRECTORY_SNAPSHOT_S": "1"}
    seconds, starts, bare = [], [], []
    with (
        scratch("controller") as folder,
        ControllerProcess(folder, flags=RESTART_FLAGS, environment=environment) as controller,
    ):
        port = controller.ports["reply"]
        instances = [ClusterInstance(port, f"i{number}", holds=Vast) for number in range(RESTARTED)]
        for one in instances:
            one.register()
        for one in instances:
            one.until_followed()
        writes = controller.ask("/v1/cluster")["snapshot"]["writes"]
        wait_until(
            lambda: controller.ask("/v1/cluster")["snapshot"]["writes"] >= writes + 2,
            "the snapshot is written",
        )
        for _ in range(RESTARTS):
            controller.kill()
            ended: list[float] = []
            threads = [threading.Thread(target=come_back, args=(one, ended)) for one in instances]
            started = time.perf_counter()
            for thread in threads:
                thread.start()
            controller.start()
            starts.append(time.perf_counter() - started)
            for thread in threads:
                thread.join()
            seconds.append(max(ended) - started)
            rows = controller.ask("/v1/instances")["instances"]
            if {(row["confirmed"], row["keys"]["l1"]) for row in rows} != {(True, CHUNKS)}:
                raise RuntimeError(f"some chunks are not confirmed: {rows}")
            bare.append(admitted_seconds())
        status = controller.ask("/v1/cluster")["snapshot"]
        for one in instances:
            one.close()
    return [
        compared(
            "controller_restart",
            seconds,
            "s",
            "the registry alone admitting the same",
            median_spread(bare)[0],
            most_value=RESTART_TARGET_S,
            start_s=median_spread(starts)[0],
            restored_members=status["restored_members"],
            snapshot_bytes=status["written_bytes"],
            snapshot_took_s=status["written_took_s"],
        )
    ]
