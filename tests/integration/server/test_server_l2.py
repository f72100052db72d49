"""A server with L2: what it stores and loads, and what it does when L2 fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvstrata.keys.batch import split
from kvstrata.native.core import storage_keys
from kvstrata.types import KEY_BYTES
from tests.harness.http_read import read
from tests.harness.l2_load import check_bytes, clear_l1, served, stored, until_stored
from tests.harness.rpc_client import (
    CHUNK_TOKENS,
    HANG_S,
    RECORD_BYTES,
    RpcClient,
    chain_of,
    part,
    until,
)
from tests.harness.shelf import Fault, entry

pytestmark = pytest.mark.integration


def test_what_a_killed_server_had_not_put_is_put_by_the_next_also_while_leased(start, tmp_path):
    server = start(entry("faulty", Fault.ERROR))
    good = {"type": "fs", "base_path": str(tmp_path / "good"), "capacity_gb": 1}
    with RpcClient(server.socket_dir) as leaseholder:
        identity, chain = stored(leaseholder, 5)
        reply = leaseholder.lookup(identity.identity_id, chain)
        assert reply.l1_chunks == 5
        server.kill()
        server._flags[server._flags.index("--l2-adapter") + 1] = json.dumps(good)
        assert server.start()["adopted"]
        with RpcClient(server.socket_dir) as client:

            def all_put(status: dict[str, Any]) -> bool:
                return status["l2_store"]["adapters"]["fs-0"]["outcomes"].get("stored") == 5

            until(client, all_put)
            clear_l1(client)
            assert served(client, client.identify(), chain) == (0, 5)
            assert client.status()["pool"]["blocked_bytes"] > 0, "the old leases still hold the chunks"
        check_bytes(leaseholder, reply, chain)


def test_a_clean_stop_puts_waiting_chunks_and_l2_survives_the_loss_of_l1(start):
    server = start(l2="fs")
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 8)
    assert server.stop() == 0, server.log_tail()
    server.wipe_segment()
    server.start()
    assert not server.ready["adopted"]
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        assert served(client, identity, chain) == (0, 8)


def test_a_process_that_ends_while_its_lookup_waits_leaves_no_lease(start, tmp_path):
    server = start(entry("faulty", Fault.HANG))
    with RpcClient(server.socket_dir) as leaving, RpcClient(server.socket_dir) as observer:
        identity = leaving.identify()
        chain = chain_of(identity.root, 3)
        leaving.store(identity, chain[: 2 * KEY_BYTES])
        leaving.send(leaving.lookup_request(identity.identity_id, chain, deadline_ms=60_000))
        leaving.ping()
        until(observer, lambda status: status["pool"]["leases"] == 1)
        leaving.goodbye()
        until(observer, lambda status: status["pool"]["leases"] == status["sessions"]["leases"] == 0)


def test_a_server_without_any_flag_runs(tmp_path: Path) -> None:
    """Default port, L1 and embedded L2, in namespaces of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (apt-get install util-linux)")
    script = (
        "ip link set lo up && mount -t tmpfs -o size=6g tmpfs /dev/shm && "
        'exec "$PYTHON" -m kvstrata.cli.server'
    )
    home = tmp_path / "home of a user"
    home.mkdir()
    runtime = tempfile.mkdtemp(prefix="kv", dir="/tmp")  # short: a unix socket lies below it
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHON": sys.executable,
        "XDG_RUNTIME_DIR": runtime,
    }
    process = subprocess.Popen(
        ["unshare", "-Urnmpf", "--kill-child", "sh", "-c", script],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = []
    try:
        for line in process.stderr:
            seen.append(line)
            if " ready " in line:
                break
        text = "".join(seen)
        if "unshare" in text and "ready" not in text:
            pytest.skip(f"namespaces are not allowed here: {text}")
        assert "port=5555" in text and "embedded_l2_off" not in text, text
        assert "http_port=8080" in text
        sockets = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
        assert {line.split()[1].rpartition(":")[2] for line in sockets} == {f"{8080:04X}"}
        assert (home / ".cache" / "kvstrata" / "5555").is_dir()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        shutil.rmtree(runtime)


def test_the_admin_port_prewarms_explains_clears_and_counts(start, tmp_path):
    server = start({"type": "disk", "base_path": str(tmp_path / "l2"), "capacity_gb": 1})
    url = f"http://127.0.0.1:{server.ready['http_port']}"

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(read(url + path, body=body) or b"null")

    with RpcClient(server.socket_dir) as client:
        identity = client.identify(salt="prewarmed")
        tokens = list(range(5 * CHUNK_TOKENS + 3))
        chain = chain_of(identity.root, 5)
        client.store(identity, chain)
        until_stored(client)
        assert ask("/v1/clear", {"tier": "l1", "wait": True}) == {
            "cleared": {"l1": 5},
            "pending": {"held": 0, "leased": 0},
            "kept": {"claimed": 0},
        }

        def prewarm(**body: Any) -> dict[str, Any]:
            report = ask("/v1/prewarm", {"salt": "prewarmed", **body})
            end_s = time.monotonic() + HANG_S
            while report["state"] == "running":
                report = ask(f"/v1/prewarm/{report['job']}")
                assert time.monotonic() < end_s, report
            return report

        report = prewarm(tokens=tokens)
        assert (report["l1_chunks"], report["l2_chunks"], report["bytes"]) == (0, 5, 5 * RECORD_BYTES), report
        phases = report["phases"]
        assert all(phases[phase] > 0 for phase in ("lookup", "wait", "medium", "verify", "promote")), phases
        assert sum(phases.values()) <= report["seconds"]
        reply = client.lookup(identity.identity_id, chain, request_id="after prewarm")
        assert (reply.l1_chunks, reply.l2_chunks) == (5, 0)
        client.release([(client.session, reply.seq)])
        assert ask("/v1/explain/after%20prewarm")["lookups"][0]["hits"]["l1"] == 5
        clear_l1(client)
        assert served(client, identity, chain) == (0, 5)
        keys = [key.hex() for key in split(storage_keys(identity.root, chain, part().digest()))]
        clear_l1(client)
        assert prewarm(keys=keys, budget_bytes=4 * RECORD_BYTES)["l2_chunks"] == 4
        assert ask("/v1/status")["instance"]["http_port"] == server.ready["http_port"]
        assert ask("/readyz") == {"ready": True, "why": ""}
        with urllib.request.urlopen(url + "/metrics", timeout=30) as metrics:
            text = metrics.read().decode()
        assert "kvstrata_committed_chunks_total 5.0" in text.splitlines()
        assert 'kvstrata_l2_prefetch_phase_seconds_count{phase="medium"} 1.0' in text.splitlines()
