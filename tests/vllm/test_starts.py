"""The ways in which vLLM is started with us: bare name, file of settings, API server, tensor parallel; and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmFailed, VllmProcess
from tests.vllm.conftest import OPTIONS, chunks_in_l1, make_prompt, rig_of, until

pytestmark = pytest.mark.vllm


def settings_file(folder: Path, server: ServerProcess) -> Path:
    """The file that `LMCACHE_CONFIG_FILE` names."""
    path = folder / "kv strata.yaml"
    path.write_text(f"port: {server.port}\nsocket_dir: {server.socket_dir}\nchunk_size: 256\n")
    return path


def until_attached(server: ServerProcess, *workers: str) -> None:
    """Wait until exactly one engine's processes are attached."""

    def attached() -> bool:
        roles = sorted(peer["role"] for peer in server.get("/v1/status")["peers"])
        return roles == ["scheduler", *workers]

    until(attached, "attaching")


def test_the_published_command_line_with_a_settings_file_hits(server, small_model, tmp_path):
    """The published command line: no module path, and the engine has a process of its own.

    In bf16, so the hit is compared with one of vLLM's own prefix cache, of the same length.
    """
    environment = {"LMCACHE_CONFIG_FILE": str(settings_file(tmp_path, server))}
    prompt = make_prompt(501, 1_330)
    stored = chunks_in_l1(server) + 5
    tokens = []
    for run in ("first", "second"):
        with VllmProcess(
            small_model,
            tmp_path / run,
            extra={},
            bare_name=True,
            processes=True,
            environment=environment,
            options=OPTIONS | {"dtype": "bfloat16"},
        ) as vllm:
            until_attached(server, "worker")
            vllm.generate([5, 6, 7])  # the first request waits for the worker's report of its weights
            result = vllm.generate(prompt)
            if run == "first":
                assert result["cached_tokens"] == 0
                until(lambda: chunks_in_l1(server) >= stored, "storing")
                result = vllm.generate(prompt)
            assert result["cached_tokens"] == 1_280, vllm.log_tail()
            tokens.append(result["tokens"])
            vllm.quit()
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_processes_that_import_vllm_by_themselves_find_the_connector(
    server, small_model, tmp_path, monkeypatch
):
    """All other tests fork theirs."""
    monkeypatch.setattr(VllmProcess, "fork_server", None)
    extra = server.connector_config()
    with VllmProcess(small_model, tmp_path, extra=extra, bare_name=True, processes=True) as vllm:
        until_attached(server, "worker")
        stored = chunks_in_l1(server) + 3
        assert "are provided by kvstrata" in vllm.log_text()
        vllm.generate(make_prompt(505, 700))
        until(lambda: chunks_in_l1(server) >= stored, "storing")
        vllm.quit()


@pytest.mark.long
def test_tensor_parallel_workers_store_and_load_their_own_heads(server, small_model, tmp_path):
    """Two workers, two slices: a prompt hits only where both have stored. One worker hits what the two have stored."""
    options = OPTIONS | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompt = make_prompt(503, 1_500)
    with VllmProcess(
        small_model, tmp_path / "two", extra=server.connector_config(), processes=True, options=options
    ) as vllm:
        until_attached(server, "worker", "worker")
        cold = vllm.generate(prompt)
        assert cold["cached_tokens"] == 0

        def hit():
            until(lambda: vllm.ask("reset_prefix_cache"), "letting all blocks go")
            result = vllm.generate(prompt)
            return result if result["cached_tokens"] == 1_408 else None

        warm = until(hit, "hitting what both workers stored")
        assert warm["tokens"] == cold["tokens"]
        vllm.quit()
    with rig_of(server, small_model, tmp_path / "one") as one:
        until(lambda: server.get("/v1/status")["recuts"]["plans"] == 2, "planning how to recut")
        found = one.vllm.generate(prompt)
        assert (found["cached_tokens"], found["tokens"]) == (1_280, cold["tokens"])
        assert server.get("/v1/status")["recuts"]["chunks"] == 5


@pytest.mark.long
def test_a_wrong_setting_stops_the_start_with_advice(small_model, tmp_path):
    with pytest.raises(VllmFailed, match=r"fidelity: 'fp8' rounds KV on a GPU, .* set it to 'lossless'"):
        VllmProcess(small_model, tmp_path, extra={"kvstrata.fidelity": "fp8"}, options=OPTIONS)
