"""Real vLLM and the codec fp8: engines that accept it load rounded KV from L2, and other engines never see that KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.server_process import ServerProcess
from tests.harness.vllm_model import ensure_model
from tests.vllm.conftest import CHUNK, Rig, make_prompt, rig_of, until

pytestmark = pytest.mark.vllm

HIT_CHUNKS = 3
PLAIN, FP8 = bytes(8), bytes([1, 0, 0, 0, 0, 0, 0, 0])
"""The codecs field of the outer header (docs/formats.md)."""


@pytest.fixture
def server(vllm_python: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose L2 rounds KV of engines that accept it."""
    entry = {"type": "fs", "base_path": str(tmp_path / "l2"), "min_free_gb": 0, "codec": ["fp8"]}
    flags = ("--l2-adapter", json.dumps(entry))
    with ServerProcess(tmp_path / "server", l1_mb=64, l2="embedded", flags=flags) as process:
        process.start()
        yield process


@pytest.fixture
def engine(server: ServerProcess, tmp_path: Path) -> Callable[..., Rig]:
    """Starts an engine of this fidelity, in bf16, which fp8 rounds."""

    def start(fidelity: str, model: str = "19m") -> Rig:
        extra = {"kvstrata.fidelity": fidelity}
        return rig_of(server, ensure_model(model), tmp_path / fidelity, extra, dtype="bfloat16")

    return start


def codecs_in_l2(folder: Path) -> dict[Path, bytes]:
    """The codecs of each record below the folder."""
    return {path: path.read_bytes()[80:88] for path in folder.rglob("*.kvc")}


def empty_l1(rig: Rig) -> None:
    """Restart the server with an empty L1, so that hits come from L2."""
    rig.server.stop()  # in order: what waits for L2 is written
    rig.server.wipe_segment()
    rig.server.start()
    until(rig.connected, "attaching to the new server")


def hit_from_l2(rig: Rig, prompt: list[int], tokens: int, records: int = HIT_CHUNKS) -> None:
    """All of it, by a server that has nothing else."""
    warm = rig.again(prompt)
    loaded = rig.server.get("/v1/status")["l2_prefetch"]["counts"]["loaded"]
    assert (warm["cached_tokens"], loaded) == (HIT_CHUNKS * CHUNK, records), rig.vllm.log_tail()
    assert len(warm["tokens"]) == tokens


def test_rounded_chunks_are_hit_from_l2_only_by_engines_that_accept_them(server, engine, tmp_path):
    prompt = make_prompt(1, HIT_CHUNKS * CHUNK + 100)
    with engine("fp8") as rig:
        cold = rig.stored(prompt)
        empty_l1(rig)
        rounded = codecs_in_l2(tmp_path / "l2")
        assert set(rounded.values()) == {FP8} and len(rounded) == HIT_CHUNKS
        hit_from_l2(rig, prompt, len(cold["tokens"]))
    with engine("lossless") as rig:
        cold = rig.stored(prompt)
        assert cold["cached_tokens"] == 0
        empty_l1(rig)
        codecs = codecs_in_l2(tmp_path / "l2")
        assert {codecs.pop(path) for path in rounded} == {FP8}
        assert set(codecs.values()) == {PLAIN} and len(codecs) == HIT_CHUNKS
        hit_from_l2(rig, prompt, len(cold["tokens"]))


@pytest.mark.long
def test_windows_are_rounded_too(server, engine, tmp_path):
    prompt = make_prompt(2, HIT_CHUNKS * CHUNK + 100)
    with engine("fp8", "gemma3") as rig:
        cold = rig.vllm.generate(prompt)
        rig.settle()
        empty_l1(rig)
        rounded = codecs_in_l2(tmp_path / "l2")
        assert set(rounded.values()) == {FP8} and len(rounded) > HIT_CHUNKS
        hit_from_l2(rig, prompt, len(cold["tokens"]), len(rounded))
