"""The demo, the examples and the soak run, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import mooncake, network, redis_server
from tests.harness.cache_engine import eventually
from tests.harness.daemon import free_ports
from tests.tools.provision import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.mark.parametrize("what", ["--act=1", "--fleet"])
def test_the_demos_without_vllm_are_right_and_leave_nothing(what: str) -> None:
    command = [sys.executable, "-m", "tests.tools.demo", what]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = demo.communicate(timeout=300)[0]
    assert demo.returncode == 0 and "NOT all right" not in output, output
    assert not list((ROOT / "build").glob(f"demo-{demo.pid}-*"))
    assert not list(Path("/dev/shm").glob(f"kvstrata-run-{demo.pid}-*"))


SERVER = """#!/bin/sh
exec lmcache-server --l1-size-gb 0.02 --port $SERVER_PORT --http-port 0 --socket-dir "$STATE" --l2-adapter "$1"
"""


@pytest.mark.parametrize("name", ["mooncake", "redis", "s3"])
def test_a_server_starts_with_the_tier_that_the_script_starts(name: str, tmp_path: Path) -> None:
    programs = redis_server.ensure()[0] if name == "redis" else mooncake.ensure() / "mooncake" / "x"
    variables = redis_server.ensure()[1] if name == "redis" else mooncake.environment()
    # The script runs outside the clone, with one server in place of two servers with engines.
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "examples" / "shared" / "two_servers.sh").write_text(SERVER)
    port = free_ports(4)
    environment = {
        **variables,
        "PATH": f"{Path(sys.executable).parent}:{Path(programs).parent}:{os.environ['PATH']}",
        **dict.fromkeys(("REDIS_PORT", "S3_PORT", "MASTER_PORT"), str(port)),
        "SERVER_PORT": str(port + 3),
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


@pytest.mark.parametrize("tool", ["soak", "chaos"])
def test_a_short_run_passes_and_has_verified_bytes(tool: str, tmp_path: Path) -> None:
    if tool == "chaos" and network.why_not():
        pytest.skip(network.why_not())
    command = [sys.executable, "-m", f"tests.tools.{tool}", "--minutes", "0.25", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert done.returncode == 0 and verdict["passed"], done.stdout + done.stderr
    assert verdict["counts"]["chunks verified"] > 0
    assert f"{tool}: passed (seed {verdict['seed']})" in done.stdout
