"""The ways in which vLLM is started with us: bare name, file of settings, API server, tensor parallel; and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvstrata.connectors.vllm.worker import IN_L1
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_api import VllmApi
from tests.harness.vllm_run import VllmFailed, VllmProcess
from tests.vllm.conftest import EXACT, chunks_in_l1, make_prompt, stores_given_up, unanswered, until

pytestmark = pytest.mark.vllm


def settings_file(folder: Path, server: ServerProcess) -> Path:
    """The file that `LMCACHE_CONFIG_FILE` names."""
    path = folder / "kv strata.yaml"
    path.write_text(f"port: {server.port}\nsocket_dir: {server.socket_dir}\nchunk_size: 256\n")
    return path


def until_stored(vllm: VllmProcess, server: ServerProcess, prompt: list[int], wanted: int) -> None:
    """Wait until L1 holds `wanted` chunks; whenever the engine has given a store up, the prompt is computed again."""
    given_up = 0.0

    def there() -> bool:
        nonlocal given_up
        if chunks_in_l1(server) >= wanted:
            return True
        lost = stores_given_up(vllm)
        if lost > given_up:
            given_up = lost
            until(lambda: vllm.ask("reset_prefix_cache"), "letting all blocks go")
            vllm.generate(prompt)
        return False

    until(there, "storing")


def test_the_published_command_line_with_a_settings_file_hits(server, small_model, tmp_path, monkeypatch):
    """The published command line: no module path. The first engine imports vLLM in each of its processes.

    In bf16, so the hit is compared with one of vLLM's own prefix cache, of the same length.
    """
    environment = {"LMCACHE_CONFIG_FILE": str(settings_file(tmp_path, server))}
    prompt = make_prompt(501, 1_330)
    before = chunks_in_l1(server)
    tokens = []
    for run in ("first", "second"):
        if run == "first":
            monkeypatch.setattr(VllmProcess, "fork_server", None)
        else:
            monkeypatch.undo()
        with VllmProcess(
            small_model,
            tmp_path / run,
            extra={},
            bare_name=True,
            processes=True,
            environment=environment,
            options={"disable_log_stats": False},
        ) as vllm:
            result = vllm.generate(prompt)
            if run == "first":
                assert result["cached_tokens"] == 0
                until_stored(vllm, server, prompt, before + 5)
                result = vllm.generate(prompt)
                assert result["cached_tokens"] == 1_280
            elif result["cached_tokens"] == 0:  # on a busy machine the server may answer late
                assert unanswered(vllm), vllm.log_tail()
                until(lambda: vllm.ask("reset_prefix_cache"), "letting all blocks go")
                result = vllm.generate(prompt)
            assert result["cached_tokens"] == 1_280, vllm.log_tail()
            tokens.append(result["tokens"])
            if run == "first":
                assert "are provided by kvstrata" in vllm.log_text()
            vllm.quit()
    assert tokens[0] == tokens[1]


def test_api_server_serves_hits(server, small_model, tmp_path, vllm_python):
    """vLLM's own prefix cache is off, so every hit is ours."""
    with VllmApi(
        small_model,
        tmp_path,
        extra=server.connector_config(),
        flags=("--no-enable-prefix-caching", "--dtype", EXACT),
    ) as api:
        prompt = make_prompt(502, 1_100)
        before = chunks_in_l1(server)
        _, cold = complete(api.url, small_model, prompt, "a")
        until(lambda: chunks_in_l1(server) == before + 4, "storing")
        request_id, again = complete(api.url, small_model, prompt, "a")
        assert again == cold
        explained = server.get(f"/v1/explain/{request_id}")
        assert explained["request_id"].startswith(f"{request_id}-"), "vLLM appends an ending to the API's id"
        assert explained["lookups"][-1]["hits"]["served"] == 4
        metrics = api.get("/metrics")
        loaded = [
            line for line in metrics.splitlines() if line.startswith("vllm:kvstrata_loaded_chunks_total")
        ]
        assert loaded and float(loaded[0].split()[-1]) == 4, metrics
        before, lost_before = chunks_in_l1(server), given_up(api)
        first = bench_serve(api.url, server)

        def settled():
            complete(api.url, small_model, [7] * 8, "steps")  # vLLM publishes counts with its steps only
            return chunks_in_l1(server) == before + 2 * 4 or given_up(api) != lost_before

        until(settled, "storing, or giving up by a reason")
        if given_up(api) != lost_before:
            return  # the server was silent for 0.3 s, so the engine has computed without it, as it should
        second = bench_serve(api.url, server)
        for measured in (first, second):
            assert (measured["total"]["requests"], measured["total"]["failed"]) == (2, 0)
        assert first["total"]["sources"]["L1 chunks"] == 0
        assert second["total"]["sources"]["L1 chunks"] == 2 * 4
        hits = {name: count for name, count in second["total"]["sources"].items() if "chunks" not in name}
        assert sum(hits.values()) == 2 * 4 * 256, hits


def given_up(api):
    """The chunks whose store was given up because the server did not answer, by what vLLM's metrics name."""
    counted = dict(
        re.findall(r"^vllm:kvstrata_store_(\w+)_chunks_total{.*} (\S+)$", api.get("/metrics"), re.MULTILINE)
    )
    lost = {name: float(count) for name, count in counted.items() if name not in IN_L1 and float(count)}
    assert set(lost) <= {"unavailable", "failed"}, lost
    return lost


def bench_serve(url, server):
    """The report of `kvstrata bench serve`: a question about each of two documents of 1,100 tokens."""
    arguments = [
        "bench", "serve", "long-doc-qa", "--url", url, "--documents", "2",
        "--document-tokens", "1100", "--question-tokens", "8", "--output-tokens", "4", "--rounds", "1",
        "--extra-body", '{"detokenize": false}', "--cache-server", server.url,
        "--json",
    ]  # fmt: skip
    done = subprocess.run(
        [Path(sys.executable).with_name("kvstrata"), *arguments], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def complete(url, model, prompt, salt):
    """Id of a completion, and its token ids."""
    body = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "return_token_ids": True,
        "detokenize": False,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as reply:
        answer = json.loads(reply.read())
        return answer["id"], answer["choices"][0]["token_ids"]


def test_tensor_parallel_workers_store_and_load_their_own_heads(server, small_model, tmp_path):
    """Two workers, two slices: a prompt hits only where both have stored. One worker hits what the two have stored."""
    options = {"dtype": EXACT, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompt = make_prompt(503, 1_500)
    with VllmProcess(
        small_model,
        tmp_path / "two",
        extra=server.connector_config(),
        processes=True,
        options=options,
        environment={"OMP_NUM_THREADS": "1"},
    ) as vllm:
        cold = vllm.generate(prompt)
        assert cold["cached_tokens"] == 0

        def hit():
            until(lambda: vllm.ask("reset_prefix_cache"), "letting all blocks go")
            result = vllm.generate(prompt)
            return result if result["cached_tokens"] == 1_408 else None

        warm = until(hit, "hitting what both workers stored")
        assert warm["tokens"] == cold["tokens"]
        roles = sorted(peer["role"] for peer in server.get("/v1/status")["peers"])
        assert roles == ["scheduler", "worker", "worker"]
        vllm.quit()
    with VllmProcess(
        small_model, tmp_path / "one", extra=server.connector_config(), options={"dtype": EXACT}
    ) as one:
        until(lambda: server.get("/v1/status")["recuts"]["plans"] == 2, "planning how to recut")
        until(lambda: one.ask("connected"), "connecting")
        found = one.generate(prompt)
        assert (found["cached_tokens"], found["tokens"]) == (1_280, cold["tokens"])
        assert server.get("/v1/status")["recuts"]["chunks"] == 5


@pytest.mark.parametrize(
    ("extra", "options", "says"),
    [
        (
            {"kvstrata.chunk_size": 200},
            {},
            r"chunk_size: 200 tokens is not a multiple of vLLM's block_size of 128",
        ),
        (
            {"kvstrata.fidelity": "fp8", "kvstrata.gpu_fp8": True},
            {},
            r"gpu_fp8: KV of this engine lies on cpu, not on a GPU; set gpu_fp8 to false",
        ),
        ({"lmcache.mp.prot": 1}, {}, r"lmcache.mp.prot: unknown key \(did you mean 'lmcache.mp.port'\?\)"),
    ],
)
def test_wrong_settings_stop_the_start_with_advice(small_model, tmp_path, extra, options, says):
    with pytest.raises(VllmFailed, match=says):
        VllmProcess(small_model, tmp_path / "refused", extra=extra, options=options)
