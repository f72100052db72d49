"""Outside tests of silence, a live server that does not run for a while is waited for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstrata.client.link import PING_PATIENCE_S
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

PAUSE_S = 2.0
"""Six times as long as production waits for a ping."""


def test_a_server_that_does_not_run_for_two_seconds_is_not_given_up(tmp_path: Path) -> None:
    assert PAUSE_S > 3 * PING_PATIENCE_S
    with ServerProcess(tmp_path / "server", l1_mb=64, chunk_tokens=CHUNK_TOKENS) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(4))
            trips = engine.client.stats()["breaker_trips"]
            server.freeze()
            call = engine.lookup(prompt(4))
            time.sleep(PAUSE_S)  # nothing happens in this time: that is the promise
            assert engine.client.connected and not call.done
            server.thaw()
            assert call.wait(60.0)
            assert call.result.n_chunks == 4
            call.cancel()
            assert engine.client.stats()["breaker_trips"] == trips
