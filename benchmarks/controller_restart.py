"""`controller_restart`: how long a controller needs after SIGKILL until all 10 × 100,000 chunks are confirmed.

The time begins when the new process is started.  The controller reads its snapshot.  The instances try every 10 ms to
register again, and then each makes a full sync over the real protocol.  (A real instance notices the restart by its
heartbeat; that time is not in the figure.)  The ratio compares with the registry alone, which admits the same
placements on one thread.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from benchmarks.common import figure, median_spread, scratch, sized, wait_until
from kvstrata.native.core import Registry
from tests.harness.cluster_instance import ClusterInstance, Refused
from tests.harness.controller_process import ControllerProcess

TARGET_S = 3.0
INSTANCES = sized(10, 2)
CHUNKS = sized(100_000, 1_000)
ROUNDS = sized(5, 1)
TRY_S = 0.01


def come_back(one: ClusterInstance, tags: bytes, ended: list[float]) -> None:
    """Register with the controller as soon as it answers, and sync; append the time of the end to `ended`."""
    while True:
        try:
            told = one.register(timeout_s=0.1)
            break
        except (TimeoutError, Refused):
            time.sleep(TRY_S)
    if told.sync:
        one.sync({"l1": tags})
    one.heartbeat()
    ended.append(time.perf_counter())


def bare_seconds(held: list[bytes]) -> float:
    """Return the seconds that a registry alone needs to admit the same placements."""
    registry = Registry()
    started = time.perf_counter()
    for group, tags in enumerate(held):
        slot = registry.open_slot(group)
        assert slot is not None
        registry.admit(slot, tags)
        registry.publish(slot)
    return time.perf_counter() - started


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    held = [os.urandom(8 * CHUNKS) for _ in range(INSTANCES)]
    environment = {**os.environ, "KVSTRATA_CONTROLLER_DIRECTORY_SNAPSHOT_S": "1"}
    seconds, starts, bare = [], [], []
    with scratch("controller") as folder, ControllerProcess(folder, environment=environment) as controller:
        instances = [ClusterInstance(controller.ports["reply"], f"i{number}") for number in range(INSTANCES)]
        for one, tags in zip(instances, held, strict=True):
            one.join({"l1": tags})
        writes = controller.ask("/v1/cluster")["snapshot"]["writes"]
        wait_until(
            lambda: controller.ask("/v1/cluster")["snapshot"]["writes"] >= writes + 2,
            "the snapshot is written",
        )
        for _ in range(ROUNDS):
            controller.kill()
            ended: list[float] = []
            threads = [
                threading.Thread(target=come_back, args=(one, tags, ended))
                for one, tags in zip(instances, held, strict=True)
            ]
            started = time.perf_counter()
            for thread in threads:
                thread.start()
            controller.start()
            starts.append(time.perf_counter() - started)
            for thread in threads:
                thread.join()
            seconds.append(max(ended) - started)
            rows = controller.ask("/v1/instances")["instances"]
            if [(row["confirmed"], row["keys"]["l1"]) for row in rows] != [(True, CHUNKS)] * INSTANCES:
                raise RuntimeError(f"some chunks are not confirmed: {rows}")
            bare.append(bare_seconds(held))
        status = controller.ask("/v1/cluster")["snapshot"]
        for one in instances:
            one.close()
    value, spread = median_spread(seconds)
    limit = median_spread(bare)[0]
    return [
        figure(
            "controller_restart",
            value=value,
            unit="s",
            ratio=value / limit,
            target=f"≤ {TARGET_S:g} s",
            ok=value <= TARGET_S,
            spread=spread,
            ratio_to=f"the registry alone admitting the same, {limit:.3f} s",
            start_s=median_spread(starts)[0],
            restored_members=status["restored_members"],
            snapshot_bytes=status["written_bytes"],
            snapshot_took_s=status["written_took_s"],
        )
    ]
