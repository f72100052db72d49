"""Real vLLM and a server with a tenants file: a wrong token costs the cache, never the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess
from tests.vllm.conftest import EXACT, Rig, chunks_in_l1, until

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
def rig(
    vllm_python: Path, vllm_model_folder: Callable[[str], Path], tmp_path: Path, token: Path
) -> Iterator[Rig]:
    tenants, config = tmp_path / "tenants", tmp_path / "server.yaml"
    tenants.touch(mode=0o600)
    tenants.write_text(f"{RIGHT} blue\n")
    config.write_text(f"security: {{tenants_file: {tenants}}}\n")
    with ServerProcess(tmp_path / "server", l1_mb=64, flags=("--config", str(config))) as server:
        server.start()
        more = {"kvstrata.tenant": "blue", "kvstrata.token_file": str(token)}
        with VllmProcess(
            vllm_model_folder("19m"),
            tmp_path / "vllm",
            extra=server.connector_config(**more),
            options={"dtype": EXACT, "max_num_batched_tokens": 1024, "max_model_len": 4096},
        ) as vllm:
            yield Rig(server, vllm)


def test_a_wrong_token_costs_only_the_cache_until_it_is_put_right(rig, token):
    until(lambda: "not_permitted" in rig.vllm.ask("client")["scheduler"]["error"], "being refused")
    prompt = rig.fresh_prompt(1_000)
    cold = rig.vllm.generate(prompt)
    again = rig.again(prompt)
    assert (again["cached_tokens"], again["tokens"]) == (0, cold["tokens"])
    assert chunks_in_l1(rig.server) == 0
    token.write_text(RIGHT)
    until(
        lambda: all(side["connected"] for side in rig.vllm.ask("client").values()), "attaching with its token"
    )
    rig.again(prompt)
    until(lambda: chunks_in_l1(rig.server) == 4, "storing")
    warm = rig.again(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (896, cold["tokens"])
