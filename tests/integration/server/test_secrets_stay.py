"""Secrets of a real server with a password, a token and a key: no process list, page, metric or log has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.rpc import cluster_wire as wire
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster_instance import LOAD, ClusterInstance
from tests.harness.controller_process import ControllerProcess
from tests.harness.redis_server import RedisServer
from tests.harness.server_process import ServerProcess
from tests.harness.signals import of_threads

pytestmark = pytest.mark.integration

PASSWORD = "Pa55word-of-redis"
TOKEN = "T0ken-of-the-admin-012345"
ENGINE_TOKEN = "T0ken-of-an-engine-987654"
KEY = "k3y-of-the-records-" + "0" * 32
ELSEWHERE = "S3cret-in-another-variable"
SECRETS = (PASSWORD, TOKEN, ENGINE_TOKEN, KEY, ELSEWHERE)


def private(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    flags = ("--heartbeat-s", "1", "--dead-after-s", "5")
    with ControllerProcess(tmp_path / "controller", flags=flags) as process:
        yield process


@pytest.fixture
def environment(tmp_path: Path, controller: ControllerProcess) -> Iterator[dict[str, str]]:
    """The environment of a server with an adapter whose password stands in the settings, in a process of its own."""
    with RedisServer(tmp_path / "redis", password=PASSWORD) as redis:
        key = private(tmp_path / "key", KEY)
        codec = [{"name": "aes-gcm", "key_file": key}]
        adapters = [
            redis.entry(isolation="process", key_prefix="kept:"),
            redis.entry(codec=codec, key_prefix="encrypted:"),
        ]
        yield {
            **os.environ,
            "KVSTRATA_L2_ADAPTERS": json.dumps(adapters),
            "KVSTRATA_CONTROLLER_URL": f"tcp://127.0.0.1:{controller.ports['reply']}",
            "KVSTRATA_INSTANCE_ID": "ours",
            "KVSTRATA_HTTP_TOKEN_FILE": private(tmp_path / "token", TOKEN),
            "KVSTRATA_SECURITY_TENANTS_FILE": private(tmp_path / "tenants", f"{ENGINE_TOKEN} blue\n"),
            "MY_SECRET": ELSEWHERE,
            "AWS_SECRET_ACCESS_KEY": ELSEWHERE,
            "VLLM_API_KEY": ELSEWHERE,
            "LMCACHE_REMOTE_URL": f"redis://me:{ELSEWHERE}@host",
        }


def asked(server: ServerProcess, path: str, body: Any = None, method: str = "") -> str:
    """Send a request with the admin's token; return the text of the answer, which may be an error."""
    url = f"http://127.0.0.1:{server.ready['http_port']}{path}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method or None)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


def family(pid: int) -> list[int]:
    """A process and all of its descendants."""
    found = [pid]
    for parent in found:
        for children in of_threads(parent, "children"):
            found += map(int, children.split())
    return found


def test_no_secret_is_in_a_command_line_page_answer_metric_or_log(tmp_path, environment, controller):
    with ServerProcess(
        tmp_path / "server",
        l1_mb=16,
        l2="embedded",
        chunk_tokens=CHUNK_TOKENS,
        environment=environment,
        supervised=True,
    ) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(2))
        pids = family(server.pid)
        command_lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        assert len(pids) >= 3, "keeper, server and adapter host"
        (host,) = (pid for pid, line in command_lines.items() if b"tiers.host.child" in line)
        seen = {"command lines": b"\n".join(command_lines.values()).decode()}
        seen["environment of the adapter host"] = Path(f"/proc/{host}/environ").read_bytes().decode()

        seen["status"] = asked(server, "/v1/status")
        seen["adapters"] = asked(server, "/v1/l2/adapters")
        seen["metrics"] = asked(server, "/metrics")
        seen["an unknown name"] = asked(server, f"/v1/l2/adapters/{PASSWORD}/pause", method="POST")

        eventually("the instance is a member", lambda: "ours" in json.dumps(controller.ask("/v1/instances")))
        seen["the document"] = json.dumps(controller.ask("/v1/instances/ours/status"))
        assert server.stop() == 0
        seen["logs"] = server.log.read_text() + controller.log.read_text()
    checked = subprocess.run(
        [sys.executable, "-m", "kvstrata.cli.server", "--check"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stderr
    seen["--check"] = checked.stdout + checked.stderr
    found = {(what, secret) for what, text in seen.items() for secret in SECRETS if secret in text}
    # SDKs read their credentials from the environment, so the adapter host has all variables but our settings.
    found -= {("environment of the adapter host", ELSEWHERE)}
    assert found == set()


BAD_LOADS = (
    {"used_bytes": {"l1\nkvstrata_fake 1": 1}},
    {"used_bytes": {'l1"} 1\nx{a="': 1}},
    {"capacity_bytes": {"\x00": 1}},
    {"capacity_bytes": {"x" * 200_000: 1}},
    {"used_bytes": {f"tier-{n}": n for n in range(10_000)}},
    {"hits_total": {"\x1b[2J": 1}},
    {"hits_total": {"l1": 1, "other": 1}},
)


@pytest.mark.long
@pytest.mark.silence
def test_texts_of_a_member_become_labels_only_in_a_small_alphabet_and_number(controller):
    def labels() -> list[str]:
        return [
            line for line in controller.text("/metrics").splitlines() if "forged" in line or "source=" in line
        ]

    with ClusterInstance(controller.ports["reply"], "forged") as forged:
        forged.join({})
        for bad in BAD_LOADS:
            load = wire.Load(**{**{name: getattr(LOAD, name) for name in LOAD.__struct_fields__}, **bad})
            told = wire.Changed(1, 1, 0, [], wire.Condition("ready", load, []))
            with pytest.raises(wire.BAD_FRAME):
                wire.ANSWERS.decode(wire.encode(told))
        forged.tell(load=wire.Load({"l1": 5}, {}, {"l1": 1}, 0, 0, 0, 0))
        text = controller.text("/metrics")
        assert all(line.isprintable() for line in text.splitlines()) and "kvstrata_fake" not in text
        sources = {line for line in labels() if line.startswith("kvstrata_controller_hit_chunks_total")}
        assert {line.partition("{")[2].partition("}")[0] for line in sources} <= {'source="l1"'}
        assert 'tier="l1"' in text
