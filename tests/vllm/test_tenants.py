"""Real vLLM and a server with a tenants file: a wrong token costs the cache, and requests name their tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.server_process import ServerProcess
from tests.vllm.conftest import Rig, chunks_in_l1, rig_of, until

pytestmark = pytest.mark.vllm

RIGHT, WRONG = "secret-of-blue-0123456", "not-a-token-of-anybody"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """The engine's token file; the token in it is wrong."""
    path = tmp_path / "blue.token"
    path.touch(mode=0o600)
    path.write_text(WRONG)
    return path


@pytest.fixture
def rig(small_model: Path, tmp_path: Path, token: Path) -> Iterator[Rig]:
    tenants, config = tmp_path / "tenants", tmp_path / "server.yaml"
    tenants.touch(mode=0o600)
    tenants.write_text(f"{RIGHT} blue green\n")
    config.write_text(f"security: {{tenants_file: {tenants}}}\n")
    # The server does not let this token name red.
    extra = {
        "kvstrata.tenant": "blue",
        "kvstrata.request_tenants": ["green", "red"],
        "kvstrata.token_file": str(token),
    }
    with ServerProcess(tmp_path / "server", l1_mb=64, flags=("--config", str(config))) as server:
        server.start()
        with rig_of(server, small_model, tmp_path / "vllm", extra, attached=False) as rig:
            yield rig


def test_a_wrong_token_costs_only_the_cache_and_with_the_right_one_two_tenants_share_nothing(rig, token):
    until(lambda: "not_permitted" in rig.vllm.ask("client")["scheduler"]["error"], "being refused")
    prompt = rig.fresh_prompt(1_000)
    cold = rig.vllm.generate(prompt)
    again = rig.again(prompt)
    assert (again["cached_tokens"], again["tokens"]) == (0, cold["tokens"])
    assert chunks_in_l1(rig.server) == 0
    token.write_text(RIGHT)
    until(rig.connected, "attaching with its token")
    rig.again(prompt)
    rig.until_stored(4)
    warm = rig.again(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (896, cold["tokens"])

    # vLLM's own cache and L1 have blue's KV of this prompt now; green shares neither.
    green, red = ({"kvstrata.tenant": tenant} for tenant in ("green", "red"))
    first = rig.vllm.generate(prompt, transfer=green)
    assert (first["cached_tokens"], first["tokens"]) == (0, cold["tokens"])
    rig.until_stored(8)
    assert rig.vllm.generate(prompt, transfer=green)["cached_tokens"] == 896, "vLLM's own blocks of green"
    warm = rig.again(prompt, transfer=green)
    assert (warm["cached_tokens"], warm["tokens"]) == (896, cold["tokens"])

    # The server refuses red, and the engine all others: nothing is shared and nothing stored.
    for refused in (red, {"kvstrata.tenant": "nobody"}, {"kvstrata.tenant": None}, {"kvstrata.tenant": 7}):
        for generate in (rig.vllm.generate, rig.again):
            answer = generate(prompt, transfer=refused)
            assert (answer["cached_tokens"], answer["tokens"]) == (0, cold["tokens"]), refused
    rig.vllm.ask("idle_steps", n=2)
    assert chunks_in_l1(rig.server) == 8
    log = rig.vllm.log_text()
    assert "this engine may not name its tenant 'nobody'" in log
    assert "this process may not use tenant 'red'" in log
