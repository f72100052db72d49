"""`--kv-transfer-config` of a simulated engine: what is read, and what each wrong value is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstrata.connectors.sim.connector import SimConnector
from kvstrata.connectors.sim.transfer import read_transfer
from kvstrata.errors import ConfigError
from kvstrata.testing.engine_sim.engine_model import EngineModel

RIGHT = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def config(**changes: Any) -> str:
    return json.dumps(RIGHT | changes)


def extra(**settings: Any) -> str:
    return config(kv_connector_extra_config=settings)


def test_what_vllm_takes_is_taken() -> None:
    text = config(
        kv_connector_module_path="kvstrata.connectors.vllm",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"lmcache.mp.port": 6000, "kvstrata.chunk_size": 64, "tenant": "blue"},
    )
    transfer, notes = read_transfer(text, {"KVSTRATA_LOOKUP_TIMEOUT_MS": "250"})
    found = transfer.settings
    assert (found.port, found.chunk_size, found.tenant, found.lookup_timeout_ms) == (6000, 64, "blue", 250)
    assert notes == []
    assert transfer[1:] == (True, True)
    assert read_transfer(config(kv_role="kv_producer"), {})[0][1:] == (False, True)
    assert read_transfer(config(kv_role="kv_consumer"), {})[0][1:] == (True, False)


def test_a_wrong_config_names_the_field() -> None:
    for text, field, told in (
        ("{", "kv-transfer-config", "is not JSON"),
        ("[]", "kv-transfer-config", "Expected `object`"),
        (config(kv_connector=7), "kv_connector", "Expected `str`"),
        (config(kv_connector="NixlConnector"), "kv_connector", "only LMCacheConnectorV1"),
        (config(kv_role="kv_all"), "kv_role", "kv_both, kv_producer, kv_consumer"),
        (config(kv_rol="kv_both"), "kv-transfer-config", "did you mean 'kv_role'"),
        (config(kv_buffer_size=1e9), "kv-transfer-config", "'kv_buffer_size' has no effect"),
        (config(kv_connector_module_path="os"), "kv_connector_module_path", "found 'os'"),
        (config(kv_load_failure_policy="fail"), "kv_load_failure_policy", "set it to 'recompute'"),
        (extra(chunk_sise=16), "chunk_sise", "chunk_size"),
        (extra(chunk_size=-1), "chunk_size", "-1"),
        (extra(load_mode="sync"), "load_mode", "'auto' or 'async'"),
        (extra(fidelity="fp8"), "fidelity", "set fidelity to 'lossless'"),
    ):
        with pytest.raises(ConfigError) as wrong:
            read_transfer(text, {})
        assert told in wrong.value.message
        assert wrong.value.field == field


def test_sizes_that_do_not_fit_are_told() -> None:
    transfer = read_transfer(extra(chunk_size=24), {})[0]
    with pytest.raises(ConfigError, match="chunk_size to 32"):
        SimConnector(transfer, EngineModel(), model="m", token_bytes=1024)
    transfer = read_transfer(config(), {})[0]
    with pytest.raises(ConfigError, match="must have 8 bytes at least"):
        SimConnector(transfer, EngineModel(block_tokens=4, kv_blocks=40_000), model="m", token_bytes=1)
    with pytest.raises(ConfigError, match=r"more than the .* MiB of this machine"):
        SimConnector(transfer, EngineModel(), model="m", token_bytes=1 << 30)
