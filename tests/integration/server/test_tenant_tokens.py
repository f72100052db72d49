"""Tokens of tenants from the engine's side: the right token opens its tenants, a wrong one stops only the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, PATIENCE_S, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

BLUE, GREEN = "secret-of-blue-0123456", "secret-of-green-012345"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    tenants = folder / "tenants"
    tenants.write_text(f"{BLUE} blue azure\n{GREEN} green\n")
    tenants.chmod(0o600)
    config = folder / "server.yaml"
    config.write_text(f"security: {{tenants_file: {tenants}}}\n")
    flags = ("--config", str(config))
    with ServerProcess(folder, l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=flags) as server:
        server.start()
        yield server


@pytest.fixture
def engine(server, request, tmp_path) -> Callable[[str, str], CacheEngine]:
    """Makes engines of a tenant with a token, not connected yet; they end with the test."""

    def make(tenant: str, token: str) -> CacheEngine:
        settings = {}
        if token:
            path = tmp_path / f"token of {tenant}"
            path.touch(mode=0o600)
            path.write_text(token + "\n")
            settings["token_file"] = str(path)
        group = f"engine of {tenant}".encode().ljust(16)[:16]
        made = CacheEngine(
            server.socket_dir, model=request.node.name, tenant=tenant, group=group, settings=settings
        )
        request.addfinalizer(made.__exit__)
        return made.__enter__()

    return make


@pytest.mark.parametrize("tenant", ["azure", pytest.param("blue", marks=pytest.mark.long)])
def test_the_right_token_opens_its_tenants(engine, tenant):
    with_token = engine(tenant, BLUE).connect()
    assert with_token.stored(prompt(4)) == ["stored"] * 4
    assert with_token.hit(prompt(4)) == 4


def computes_without_the_cache(engine: CacheEngine) -> None:
    """Assert that a lookup is a miss and that a store ends without a chunk in the pool."""
    assert engine.looked_up(prompt(4)).n_chunks == 0
    job = engine.store(prompt(4))
    assert job.done.wait(PATIENCE_S)
    assert set(job.outcomes) <= {"unavailable", "refused", "failed"}


def test_a_wrong_token_is_refused_and_the_engine_goes_on_without_the_cache(engine, caplog):
    caplog.set_level(logging.ERROR)
    wrong = engine("blue", "not-a-token-of-anybody")
    eventually("it is refused", lambda: "not_permitted" in wrong.client.error)
    assert "token: not in this server's tenants file" in wrong.client.error
    computes_without_the_cache(wrong)
    assert not wrong.client.connected
    assert "token: not in this server's tenants file" in caplog.text
    assert "not-a-token-of-anybody" not in caplog.text + wrong.client.error


@pytest.mark.parametrize("token", [GREEN, pytest.param("", marks=pytest.mark.long)])
def test_a_tenant_without_its_token_is_refused_and_the_engine_goes_on_without_the_cache(
    engine, token, caplog
):
    caplog.set_level(logging.ERROR)
    without = engine("blue", token)
    eventually("it attaches", lambda: without.client.connected)
    identity = without.identity()
    eventually("the identity is refused", lambda: identity.error)
    assert "may not use tenant 'blue'" in identity.error and "may not use tenant 'blue'" in caplog.text
    computes_without_the_cache(without)


def test_a_corrected_token_file_takes_effect_without_a_restart_of_the_engine(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("kvstrata.client.link.ATTACH_REFUSED_RETRY_S", 0.02)
    mended = engine("blue", "not-a-token-of-anybody")
    eventually("it is refused", lambda: "not_permitted" in mended.client.error)
    path = tmp_path / "token of blue"
    path.chmod(0o644)
    eventually("the file is named", lambda: "bad_config" in mended.client.error)
    assert "token_file" in mended.client.error and "chmod 600" in mended.client.error
    path.chmod(0o600)
    path.write_text(BLUE)
    mended.connect()
    assert mended.stored(prompt(4)) == ["stored"] * 4
