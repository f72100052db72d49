"""Each example with a remote tier starts it and gives a server a working adapter; tests/vllm has them with engines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import mooncake, redis_server
from tests.harness.cache_engine import eventually
from tests.harness.daemon import Unavailable, free_ports

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
SERVER = """#!/bin/sh
exec lmcache-server --l1-size-gb 0.02 --port 0 --http-port 0 --socket-dir "$STATE" --l2-adapter "$1"
"""


@pytest.mark.parametrize("name", ["mooncake", "redis", "s3"])
def test_a_server_starts_with_the_tier_that_the_script_starts(name: str, tmp_path: Path) -> None:
    try:
        programs = redis_server.ensure()[0] if name == "redis" else mooncake.ensure() / "mooncake" / "x"
        variables = redis_server.ensure()[1] if name == "redis" else mooncake.environment()
    except Unavailable as why:
        pytest.skip(str(why))
    # The script runs outside the clone, with one server in place of two servers with engines.
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "examples" / "shared" / "two_servers.sh").write_text(SERVER)
    port = free_ports(3)
    environment = {
        **variables,
        "PATH": f"{Path(sys.executable).parent}:{Path(programs).parent}:{os.environ['PATH']}",
        **dict.fromkeys(("REDIS_PORT", "S3_PORT", "MASTER_PORT"), str(port)),
        "SEGMENT_BYTES": str(16 << 20),
        "STATE": str(tmp_path / "s"),
        "KVSTRATA_L1_SEGMENT_DIR": str(tmp_path / "segment"),
    }
    log = tmp_path / "log"
    with open(log, "wb") as output:
        script = subprocess.Popen(
            [tmp_path / "examples" / name / "run.sh", "no-model"],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        eventually("the server is ready", lambda: b" ready " in log.read_bytes() or script.poll() is not None)
        assert script.poll() is None, log.read_text()
    finally:
        os.killpg(script.pid, signal.SIGTERM)
        script.wait()
