"""A defect in the thread that hears KV events is told, and ends what is known by events."""

from __future__ import annotations

import time
from threading import Lock

from kvstrata.gateway.residency.knowledge import Heard, Residency
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.residency.sources import Source
from tests.harness.cache_engine import eventually


def test_a_dead_thread_is_told_with_its_defect_and_nothing_counts_as_heard() -> None:
    residency = Residency(time.monotonic)
    try:
        residency.watch("a", Source("tcp://127.0.0.1:9", "", ""))
        assert residency.thread() == {"hears": True, "error": ""}
        watched = residency._watched["a"]
        watched.connected = True  # as if it were heard
        assert residency.known(Prompt([1, 2, 3]), ["a"]).heard == {"a": Heard(float("-inf"), float("-inf"))}
        residency._watcher.post(Lock().release)  # a defect
        eventually("the thread has ended", lambda: not residency.thread()["hears"])
        assert residency.thread()["error"].startswith("RuntimeError: ")
        assert residency.known(Prompt([1, 2, 3]), ["a"]).heard == {}
    finally:
        residency.close()
    assert residency.thread()["error"].startswith("RuntimeError: ")
