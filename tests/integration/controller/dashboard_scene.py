"""A cluster of twelve instances in all states, and the answers to lookups that the dashboard's explorer shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from playwright.async_api import Page

from tests.harness.dashboard_cluster import Cluster, instance, now_ms

Visit = Callable[..., AbstractAsyncContextManager[Page]]


def twelve() -> Cluster:
    """A cluster in which something of everything is going on."""
    cluster = Cluster(*(instance(f"{'abc'[number % 3]}-{number}", number) for number in range(12)))
    sync = {"state": "running", "keys": 412_000, "parts": 52, "count": 1}
    changes: dict[str, dict[str, Any]] = {
        "b-4": {"reported_state": "syncing", "confirmed": False, "sync": sync},
        "c-5": {"draining": True},
        "a-6": {"state": "dead", "heard_ago_s": 48.0, "confirmed": False, "sync": {"state": "none"}},
        "b-7": {"state": "restored", "confirmed": False, "sync": {"state": "none"}},
        "c-8": {"confirmed": False, "sync": {"state": "wanted", "wanted_because": "a gap in the events"}},
        "a-9": {"reported_state": "frozen", "sync": sync},
    }
    for name, change in changes.items():
        cluster.instances[name].update(change)
    cluster.removed.append("z-99")
    cluster.tell("joined", "a-0", host="node-00.example.net", version="0.1.0")
    cluster.tell("synced", "a-0", tags={"l1": 8_311, "disk-0": 43_781}, took_s=0.081)
    cluster.tell("resync", "c-8", reason="a gap in the events", expected=12, got=14)
    cluster.tell("died", "a-6", silent_s=30.2)
    cluster.tell("snapshot_restored", members=11, path="/var/lib/kvstrata/directory.snapshot")
    cluster.lookup = lookup(40, {"a-0": 28, "b-1": 16})
    cluster.misses = [miss(28, "evicted", "by lru"), miss(29, "unknown_key", "")]
    cluster.explained["cmpl-1"] = explained("evicted")
    return cluster


def miss(chunk: int, reason: str, detail: str) -> dict[str, Any]:
    """A chunk that nobody has, as one instance explains it."""
    told = [{"instance": "a-0", "tier": "", "reason": reason, "detail": detail}]
    key = {"key": "cd" * 32, "slice": "ab" * 32, "window": False}
    return {"chunk": chunk, **key, "reason": reason, "told": told}


def lookup(n_chunks: int, holders: dict[str, int]) -> dict[str, Any]:
    """The answer for a prompt whose first chunks some instances hold: so many each."""
    chunks = []
    for index in range(n_chunks):
        places = [
            {"instance": name, "tier": "l1" if index < 20 else "disk-0", "confirmed": name != "b-1"}
            for name, held in holders.items()
            if index < held
        ]
        keys = [f"{index * 2 + part:064x}" for part in range(2)]
        chunks.append({"index": index, "keys": keys, "places": places})
    longest = [
        {"instance": name, "chunks": min(20, held), "tokens": min(20, held) * 256, "confirmed": name != "b-1"}
        for name, held in holders.items()
    ]
    return {
        "n_chunks": n_chunks,
        "n_slices": 2,
        "chunk_tokens": 256,
        "identity": "ef" * 32,
        "held_chunks": max(holders.values(), default=0),
        "longest": longest,
        "chunks": chunks,
    }


def explained(reason: str) -> dict[str, Any]:
    """One lookup of a request, as an instance's explain tells it."""
    miss = {"chunk": 16, "reason": reason, "detail": "by lru", "storage_key": "cd" * 32}
    return {
        "request_id": "cmpl-1",
        "tenant": "acme",
        "identity": "ab" * 32,
        "unix_ms": now_ms(),
        "duration_ms": 1.83,
        "chunks": 24,
        "hits": {"l1": 12, "l2": 4, "served": 16},
        "first_miss": miss,
    }
