"""The simulated engine (`tests/harness/gpu_engine`) with a real server: it loads what it stored, whatever happens.

The device is simulated (`tests/harness/cuda_driver`); what needs no fault of it runs on a real one, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cache_engine import eventually
from tests.harness.child import Child
from tests.harness.cuda_driver import DRIVERS, environment_of
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

L1_MB = 256
SLAB_BYTES = 64 << 20
CHUNK_BLOCKS = 2
LAYERS = 3

Start = Callable[..., Child]


@pytest.fixture
def server(start: Callable[..., ServerProcess]) -> ServerProcess:
    return start(l1_mb=L1_MB, chunk_tokens=16)


@pytest.fixture
def engine(server: ServerProcess, tmp_path: Path) -> Iterator[Start]:
    """Starts engines; keywords in capitals are options of the simulated driver, others arguments of the engine.

    A real driver takes its time without options.
    """
    children: list[Child] = []

    def start(driver: str = "simulated", **arguments: Any) -> Child:
        options = {name.lower(): arguments.pop(name) for name in list(arguments) if name.isupper()}
        log = tmp_path / "engine.log"
        child = Child(
            "tests.integration.connectors.gpu_child", log=log, environment=environment_of(driver, **options)
        )
        children.append(child)
        child.ask("start", socket_dir=str(server.socket_dir), **arguments)
        child.ask("connect")
        return child

    yield start
    for child in children:
        child.__exit__(None, None, None)


def blocks(n_chunks: int) -> int:
    """Blocks of all layers that are compared when so many chunks are loaded."""
    return n_chunks * CHUNK_BLOCKS * LAYERS


@DRIVERS
def test_what_was_stored_is_loaded_byte_for_byte_by_another_engine(engine, driver):
    first = engine(driver, engine="dma")
    assert first.ask("store", seed=1, n_chunks=6) == 6
    assert first.ask("store", seed=1, n_chunks=6) == 0, "what was loaded is not stored again"
    for unknown, load_mode, layerwise in ((2, "async", False), (3, "sync", True), (4, "sync", False)):
        second = engine(driver, engine="kernel", load_mode=load_mode)
        found = second.ask("load", seed=1, n_chunks=6, layerwise=layerwise)
        assert found == {"chunks": 6, "right": blocks(6), "bad": 0}
        assert second.ask("load", seed=unknown, n_chunks=6) == {"chunks": 0, "right": 0, "bad": 0}
        second.ask("close")
    first.ask("close")


@DRIVERS
def test_preempted_aborted_and_ended_requests_leave_no_wrong_byte(engine: Start, driver: str) -> None:
    seed = 1
    child = engine(driver, engine="kernel", layout="LHBNC", save_decode_cache=True, DELAY_US=300, SEED=seed)
    counts = child.ask("churn", seed=seed, steps=400)
    assert counts["loaded blocks"] > 50 and counts["stored"] > 20 and not counts["bad blocks"]
    assert min(counts[what] for what in ("preempted", "aborted", "received")) > 0
    assert child.ask("check") > 0
    child.ask("close")


ROUNDED = {"fidelity": "fp8"}


@DRIVERS
def test_kv_rounded_by_the_gpu_takes_less_room_and_is_loaded_only_by_engines_that_round(
    engine: Start, server: ServerProcess, driver: str
) -> None:
    def stored_bytes(child: Child, n_chunks: int) -> int:
        before = server.get("/v1/status")["pool"]["used_bytes"]
        assert child.ask("store", seed=1, n_chunks=n_chunks) == n_chunks
        return int(server.get("/v1/status")["pool"]["used_bytes"]) - int(before)

    first = engine(driver, settings=ROUNDED)
    rounded_bytes = stored_bytes(first, 5)
    second = engine(driver, load_mode="sync", settings=ROUNDED)
    found = second.ask("load", seed=1, n_chunks=5, layerwise=True)
    assert found == {"chunks": 5, "right": blocks(5), "bad": 0}
    other = engine(driver, settings={})
    assert stored_bytes(other, 5) > rounded_bytes, "nothing was there for it"
    assert other.ask("load", seed=1, n_chunks=5) == {"chunks": 5, "right": blocks(5), "bad": 0}


def test_a_server_killed_in_mid_copy_leaves_no_wrong_byte(engine: Start, server: ServerProcess) -> None:
    child = engine(DELAY_US=300, SEED=3)
    over = threading.Event()

    def kill_and_start() -> None:
        while not over.wait(0.7):
            server.kill()
            server.start()

    killer = threading.Thread(target=kill_and_start)
    killer.start()
    try:
        counts = child.ask("churn", seed=3, steps=600)
    finally:
        over.set()
        killer.join()
    assert counts["loaded blocks"] > 0
    child.ask("connect")
    child.ask("check")
    assert child.ask("store", seed=99, n_chunks=4) == 4
    assert child.ask("load", seed=99, n_chunks=4)["right"] == blocks(4)
    child.ask("close")


def test_an_engine_killed_in_mid_copy_while_no_server_runs_is_stranded(engine, server):
    child = engine()
    child.ask("set_driver", name="delay_us", value="300000")
    session = child.ask("connect")
    assert child.ask("begin_store", seed=1, n_chunks=4)
    server.kill()
    child.kill()
    server.start()
    [row] = server.get("/v1/stranded")["stranded"]
    assert row["session"] == session
    assert server.get("/v1/status")["pool"]["quarantined_bytes"] == row["kept_bytes"] > 0


def test_the_pool_is_pinned_whole_and_let_go_with_the_server_that_owned_it(engine, server):
    child = engine()
    child.ask("wait_pinned", n_bytes=L1_MB << 20)
    server.kill()
    server.wipe_segment()
    server.start()
    child.ask("connect")
    child.ask("wait_pinned", n_bytes=L1_MB << 20)
    child.ask("wait_registrations", count=L1_MB * (1 << 20) // SLAB_BYTES)
    assert child.ask("store", seed=1, n_chunks=4) == 4
    assert child.ask("load", seed=1, n_chunks=4)["right"] == blocks(4)
    child.ask("close")
    assert child.ask("registrations") == 0


def test_where_pinning_is_refused_the_rest_of_the_pool_is_copied_unpinned(engine, server):
    child = engine(engine="kernel", REGISTER=2 * SLAB_BYTES)
    refusal = child.ask("wait_stat", name="pin_refusal")
    assert "cuMemHostRegister" in refusal
    assert child.ask("stats")["pinned_bytes"] <= 2 * SLAB_BYTES
    eventually("the server was told", lambda: (copies_of(server) or {}).get("pin_refusal") == refusal)
    assert child.ask("take_counts")["pin_refusals"] == 1
    assert "pin_refusals" not in child.ask("take_counts")
    counts = child.ask("churn", seed=5, steps=60)
    assert counts["loaded blocks"] > 0 and not counts["bad blocks"]
    child.ask("close")


def test_an_engine_attaches_and_works_while_pinning_hangs(engine: Start) -> None:
    held = engine(HOLD_REGISTER=1)
    held.ask("wait_call", name="cuMemHostRegister")
    other = engine()
    for child, seed in ((other, 1), (held, 2)):
        assert child.ask("store", seed=seed, n_chunks=4) == 4
    assert held.ask("load", seed=1, n_chunks=4)["right"] == blocks(4)
    assert other.ask("load", seed=2, n_chunks=4)["right"] == blocks(4)
    other.ask("wait_pinned", n_bytes=L1_MB << 20)
    assert held.ask("stats")["pinned_bytes"] == 0
    held.ask("set_driver", name="hold_register", value="0")
    held.ask("wait_pinned", n_bytes=L1_MB << 20)
    held.ask("close")
    other.ask("close")


def test_how_an_engine_copies_is_reported_to_every_server_and_counted_once(engine, server):
    child = engine()
    child.ask("wait_pinned", n_bytes=L1_MB << 20)
    assert child.ask("stats")["copy_engine"] == "kernel", "runs are shorter than 32 KB"
    wanted = {"engine": "kernel", "pinned_bytes": L1_MB << 20, "pin_refusal": ""}
    eventually("the server was told", lambda: copies_of(server) == wanted)
    server.kill()
    server.start()
    child.ask("connect")
    eventually("the server that came back was told", lambda: copies_of(server) == wanted)
    counts = child.ask("take_counts")
    assert counts == {"copy_kernel_workers": 1, "pinned_bytes": L1_MB << 20}
    assert child.ask("take_counts") == {}
    child.ask("close")


def copies_of(server: ServerProcess) -> Any:
    """What the only worker that is attached to a server said of its copies."""
    peers = server.get("/v1/status")["peers"]
    return next((peer["copies"] for peer in peers if peer["copies"]), None)


def test_a_copy_that_the_driver_refuses_costs_its_request_alone(engine: Start) -> None:
    child = engine(engine="dma")
    child.ask("wait_pinned", n_bytes=L1_MB << 20)  # other memory is not copied in batches
    assert child.ask("store", seed=1, n_chunks=4) == 4
    child.ask("set_driver", name="fail", value="cuMemcpyBatchAsync:1+:1")
    assert child.ask("load", seed=1, n_chunks=4) == {"chunks": 4, "right": 0, "bad": blocks(4)}
    assert child.ask("store", seed=7, n_chunks=2) == 0
    child.ask("set_driver", name="fail", value="")
    assert child.ask("load", seed=1, n_chunks=4) == {"chunks": 4, "right": blocks(4), "bad": 0}
    assert child.ask("store", seed=7, n_chunks=2) == 2
    assert not child.ask("broken")


def test_a_sticky_error_switches_the_cache_off_and_the_engine_goes_on(engine: Start, tmp_path: Path) -> None:
    child = engine()
    assert child.ask("store", seed=1, n_chunks=4) == 4
    told = child.ask("break_device", seed=1, n_chunks=3, fault="copy:1+:700,kernel:1+:700")
    assert told == {"bad": True, "none": True, "broken": True}
    log = (tmp_path / "engine.log").read_text()
    assert log.count("the cache is off for this worker") == 1 and "CUDA_ERROR" in log
    child.ask("close")
