"""Tests that need the machine for themselves get it, whichever worker is how fast."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.parallel import ByFile


class Worker:
    """Runs what it was sent in order, as xdist's does: its last test only once it is told that there is no more."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.waiting: list[int] = []
        self.running: int | None = None
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def can_start(self) -> bool:
        return self.running is None and len(self.waiting) > (0 if self.shutting_down else 1)


def files(rng: random.Random) -> list[str]:
    names = [
        f"tests/{folder}/test_{i}.py" for folder in ("unit", "vllm", "zmq") for i in range(rng.randrange(4))
    ]
    return [f"{name}::test_{i}" for name in names for i in range(rng.randrange(1, 6))]


@pytest.mark.parametrize("seed", range(100))
def test_every_test_runs_once_and_none_beside_those_of_vllm(seed: int) -> None:
    rng = random.Random(seed)
    tests = files(rng)
    workers: list[Any] = [Worker(number) for number in range(rng.randrange(1, 4))]
    config: Any = SimpleNamespace(
        getvalue=lambda name: [f"{len(workers)}*popen"],
        option=SimpleNamespace(loadscopereorder=False),
        hook=SimpleNamespace(),
    )
    scheduler = ByFile(config)
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    ran: list[str] = []
    while len(ran) < len(tests):
        movable = [worker for worker in workers if worker.running is not None or worker.can_start()]
        assert movable, f"all wait; ran {ran} of {tests}"
        worker = rng.choice(movable)
        if worker.running is None:
            worker.running = worker.waiting.pop(0)
        else:
            index, worker.running = worker.running, None
            ran.append(tests[index])
            scheduler.mark_test_complete(worker, index)
            if scheduler.tests_finished:  # as xdist's session does
                for each in workers:
                    each.shutdown()
        running = [tests[each.running] for each in workers if each.running is not None]
        assert len(running) == 1 or not any("/vllm/" in test for test in running), running
    assert sorted(ran) == sorted(tests)
    of_vllm = ["/vllm/" in test for test in ran]
    assert of_vllm == sorted(of_vllm), "they come last"
