"""Our connector for TensorRT-LLM over a real server, under an engine that is a double of TensorRT-LLM's interface."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.connectors import device
from kvstrata.errors import ConfigError, InternalError, MediumError
from tests.harness.cache_engine import eventually
from tests.harness.cuda_driver import SimulatedGpu, simulated
from tests.harness.server_process import ServerProcess
from tests.integration.connectors.tensorrt_llm_double import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Engine,
    LlmRequest,
    RequestData,
    SchedulerOutput,
    kv_of,
    modules,
)

pytestmark = pytest.mark.integration

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=64, l2="fs") as server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def connectors():
    yield from modules()


@pytest.fixture
def open_engine(connectors, server, monkeypatch, request):
    """Opens engines of a model that no other test has."""
    monkeypatch.setenv("KVSTRATA_SOCKET_DIR", str(server.socket_dir))
    monkeypatch.setenv("KVSTRATA_CHUNK_SIZE", str(CHUNK_TOKENS))
    opened: list[Engine] = []

    def open_one(**more) -> Engine:
        engine = Engine(connectors, model=f"org/{request.node.name}", **more)
        opened.append(engine)
        eventually("scheduler and workers have a server", engine.connected)
        return engine

    yield open_one
    for engine in opened:
        engine.close()


def request_of(n_tokens: int, seed: int = 0, **more) -> LlmRequest:
    return LlmRequest(next(NUMBERS), [seed * 100_000 + i for i in range(n_tokens)], **more)


def kept(engine: Engine, n_tokens: int, seed: int = 0, *, hit: int, **more) -> None:
    """Serve a prompt until its chunks are in the cache and taken from there."""

    def served() -> bool:
        matched = engine.serve(request_of(n_tokens, seed, **more))
        engine.poll()
        return matched == hit

    eventually("the prompt is a hit", served)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_what_one_engine_computed_another_one_loads(open_engine, ranks):
    first = open_engine(ranks=ranks)
    assert first.serve(request_of(35)) == 0
    kept(first, 35, hit=32)
    second = open_engine(ranks=ranks)
    assert second.serve(request_of(35)) == 32
    assert second.serve(request_of(33)) == 32
    assert second.serve(request_of(32)) == 24, "the last token of a prompt is always computed"
    assert second.serve(request_of(7)) == 0
    longer = request_of(35)
    longer.tokens = longer.tokens[:20] + [7] * 20
    assert second.serve(longer) == 16


def planned_blocks(engine: Engine, computed: int, cancel: int | None = None) -> list[list[int]]:
    """The blocks that a step writes, if a prompt of 35 tokens gets blocks 0, 1, 2, …; the step is not done."""
    request = request_of(35)
    engine.scheduler.get_num_new_matched_tokens(request, computed)
    if cancel is not None:
        engine.scheduler.cancel_load(request, cancel, 32)
    data = RequestData(request.request_id, request.tokens, list(range(9)), computed, 3)
    plan = engine.scheduler.build_connector_meta(SchedulerOutput([data], []))
    for worker in engine.workers:
        worker._side._opened[0]._client.release([load.lease for load in plan.loads])
    engine.scheduler.request_finished(request, [])
    [load] = plan.loads
    return load.blocks


@pytest.mark.long
def test_chunks_that_a_step_completes_behind_loaded_ones_are_stored(open_engine):
    engine = open_engine()
    kept(engine, 35, hit=32)
    assert engine.serve(request_of(49)) == 32
    kept(engine, 49, hit=48)


@pytest.mark.long
def test_tokens_that_the_engine_has_itself_are_neither_counted_nor_written(open_engine):
    engine = open_engine()
    kept(engine, 35, hit=32)
    assert engine.serve(request_of(35), computed=12) == 20, "within a chunk"
    assert engine.serve(request_of(35), computed=32) == 0
    assert engine.serve(request_of(35), computed=13) == 0, "within a block"
    assert planned_blocks(engine, computed=12) == [[-1, 3], [4, 5], [6, 7]]
    assert planned_blocks(engine, computed=12, cancel=20) == [[-1, 3], [4, -1]]


@pytest.mark.long
def test_prompts_in_several_steps_and_answers_are_stored_as_they_are_computed(open_engine, monkeypatch):
    engine = open_engine()
    assert engine.serve(request_of(40, seed=1), prefill=6, answers=9) == 0
    kept(engine, 45, seed=1, hit=40)
    tokens = request_of(40, seed=1).tokens + [1000 + at for at in range(40, 49)]
    assert engine.serve(LlmRequest(next(NUMBERS), [*tokens, 5])) == 40, "answers are not stored"
    monkeypatch.setenv("KVSTRATA_SAVE_DECODE_CACHE", "true")
    keeps = open_engine()

    def served() -> bool:
        keeps.serve(request_of(40, seed=1), answers=9)
        return keeps.serve(LlmRequest(next(NUMBERS), [*tokens, 5])) == 48

    eventually("the answer is a hit", served)


@pytest.mark.long
def test_salts_are_kept_apart_and_requests_with_adapters_are_left_out(open_engine):
    engine = open_engine()
    kept(engine, 17, hit=16, cache_salt="a")
    assert engine.serve(request_of(17, cache_salt="b")) == 0
    assert engine.serve(request_of(17)) == 0
    assert engine.serve(request_of(17, seed=3, lora_task_id=1)) == 0
    assert engine.serve(request_of(17, seed=3, lora_task_id=1)) == 0
    assert engine.serve(request_of(17, seed=3)) == 0


@pytest.mark.long
def test_what_the_engine_does_not_use_of_a_promise_is_not_written(open_engine, server):
    engine = open_engine()
    kept(engine, 35, hit=32)
    assert engine.serve(request_of(35), cancel=20) == 20
    assert engine.serve(request_of(35), cancel=0) == 0
    assert engine.serve(request_of(35), computed=8, cancel=8) == 0
    request = request_of(35)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
    engine.scheduler.request_reset(request)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
    assert engine.scheduler.request_finished(request, []) is False
    eventually("no lease is left", lambda: server.get("/v1/status")["pool"]["leased_bytes"] == 0)


@pytest.mark.long
def test_a_promise_without_blocks_is_raised_rather_than_computed_wrongly(open_engine):
    engine = open_engine()
    kept(engine, 35, hit=32)
    request = request_of(35)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
    short = RequestData(request.request_id, request.tokens, [1, 2], 0, 3)
    with pytest.raises(InternalError, match="only 2 blocks of 4 tokens"):
        engine.scheduler.build_connector_meta(SchedulerOutput([short], []))


def test_a_damaged_chunk_is_raised_rather_than_computed_with(open_engine, server):
    engine = open_engine()
    kept(engine, 35, seed=9, hit=32)
    needle = kv_of(request_of(35, seed=9).tokens, 2, 0)[:64]
    with (
        open(next(server.segment_dir.rglob("extents")), "r+b") as file,
        mmap.mmap(file.fileno(), 0) as extents,
    ):
        extents[extents.find(needle)] ^= 1
    with pytest.raises(MediumError, match="1 chunks of KV that TensorRT-LLM was promised"):
        engine.serve(request_of(35, seed=9))


@pytest.mark.long
def test_blocks_of_a_finished_request_stay_until_its_stores_have_read_them(open_engine, server):
    engine = open_engine()
    engine.serve(request_of(9, seed=5))
    server.freeze()
    request = request_of(33, seed=6)
    engine.serve(request)
    assert request.request_id in engine.held, "the reserve of its store is not answered yet"
    server.thaw()
    eventually("the blocks come back", lambda: engine.poll() or not engine.held)
    assert sorted(engine.free) == list(range(64))


@pytest.mark.parametrize(
    "fault", [pytest.param("SIGSTOP", marks=[pytest.mark.long, pytest.mark.silence]), "SIGKILL"]
)
def test_a_server_that_stops_means_misses_and_is_used_again(open_engine, server, fault):
    engine = open_engine()
    kept(engine, 35, hit=32)
    stop, go_on = (server.freeze, server.thaw) if fault == "SIGSTOP" else (server.kill, server.start)
    stop()
    for seed in range(10, 14):
        assert engine.serve(request_of(35)) in (0, 32)
        engine.serve(request_of(17, seed))
        eventually("all blocks are free again", lambda: engine.poll() or not engine.held)
    eventually("the server counts as silent", lambda: not engine.connected())
    assert engine.serve(request_of(35)) == 0
    go_on()
    eventually("the cache is used again", engine.connected)
    kept(engine, 35, hit=32)
    eventually("all blocks are free again", lambda: engine.poll() or len(engine.free) == 64)


@pytest.mark.long
def test_arguments_and_tensors_that_are_not_supported_stop_the_start(open_engine, connectors, monkeypatch):
    for name, value in (("pipeline_parallel_size", 2), ("enable_attention_dp", True)):
        with pytest.raises(ConfigError, match=name):
            Engine(connectors, **{name: value})
    monkeypatch.setenv("KVSTRATA_CHUNK_SIZE", str(BLOCK_TOKENS + 1))
    with pytest.raises(ConfigError, match="chunk_size: 5 tokens are not whole blocks of 4"):
        Engine(connectors)
    monkeypatch.setenv("KVSTRATA_CHUNK_SIZE", str(CHUNK_TOKENS))
    worker = open_engine().workers[0]
    strange = type("T", (), {"shape": (4, 2, 8), "stride": lambda _: (16, 8, 2)})()
    with pytest.raises(ConfigError, match=r"KV cache: shape \[4, 2, 8\]"):
        worker.register_kv_caches(strange)


@pytest.mark.long
@simulated()
def test_blocks_in_the_memory_of_a_gpu_are_stored_and_loaded() -> None:
    """The driver is simulated, and so is the one function of torch that is called."""
    gpu = SimulatedGpu()
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(current_device=lambda: 0)
    sys.modules["torch"] = torch
    device.choose_way = lambda *_: None  # it measures with 64 MB, which take minutes in blocks of 192 bytes
    double = modules()
    connectors = next(double)
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder), l1_mb=64) as server:
        server.start()
        os.environ |= {
            "KVSTRATA_SOCKET_DIR": str(server.socket_dir),
            "KVSTRATA_CHUNK_SIZE": str(CHUNK_TOKENS),
        }
        for hit in (0, 32):
            engine = Engine(connectors, gpu=gpu)
            eventually("scheduler and worker have a server", engine.connected)
            assert engine.serve(request_of(35)) == hit
            kept(engine, 35, hit=32)
            eventually("all blocks are free again", lambda engine=engine: engine.poll() or not engine.held)
            assert isinstance(engine.workers[0]._side._opened[0], device.DeviceMover)
            engine.close()
        assert gpu.calls("copy") + gpu.calls("kernel") > 0
    double.close()
