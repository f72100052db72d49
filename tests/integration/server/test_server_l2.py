"""A server with L2: what it stores and loads, and what explain says of a miss."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, MissReason, unpack_extents
from tests.harness.http_read import read
from tests.harness.l2_load import check_and_release, check_bytes, clear_l1, served, stored, until_stored
from tests.harness.rpc_client import (
    CHUNK_TOKENS,
    HANG_S,
    RECORD_BYTES,
    RpcClient,
    RpcError,
    chain_of,
    new_prompt,
    until,
)
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


def faulty(tmp_path: Path, *faults: str, **common: Any) -> dict[str, Any]:
    """The entry of an `fs` adapter whose operations all suffer these faults."""
    inner = {"type": "fs", "base_path": str(tmp_path / "faulty"), "capacity_gb": 1}
    return {"type": "fault_inject", "inner": inner, "rate": 1.0, "seed": 1, "faults": list(faults), **common}


def test_chunks_that_left_l1_come_back_from_l2_in_one_reply(start: Callable[..., ServerProcess]) -> None:
    server = start(l2="fs")
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 6)
        until_stored(client)
        assert clear_l1(client) == 6
        reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000, request_id="back")
        assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks, reply.reason) == (6, 0, 6, "")
        check_and_release(client, reply, chain)
        assert served(client, identity, chain) == (6, 0), "loaded chunks stay in L1"
        assert client.explain("back")["lookups"][0]["hits"] == {"l1": 0, "l2": 6, "served": 6}


def test_what_a_killed_server_had_not_put_is_put_by_the_next_also_while_leased(start, tmp_path):
    server = start(faulty(tmp_path, "error"))
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


def test_a_hung_l2_costs_a_lookup_its_deadline_and_delays_nobody_else(start, tmp_path):
    server = start(faulty(tmp_path, "hang"))
    with RpcClient(server.socket_dir) as waiting, RpcClient(server.socket_dir) as other:
        identity = waiting.identify()
        chain = chain_of(identity.root, 3)
        waiting.store(identity, chain[:KEY_BYTES])
        patient = waiting.send(waiting.lookup_request(identity.identity_id, chain, deadline_ms=60_000))
        for _ in range(20):
            other.ping()
        assert waiting.lookup(identity.identity_id, chain[:KEY_BYTES], deadline_ms=60_000).l1_chunks == 1
        reply = waiting.lookup(identity.identity_id, chain, deadline_ms=300, request_id="hung")
        assert (reply.n_chunks, reply.reason) == (1, "deadline")
        waiting.cancel(patient)
        with pytest.raises(RpcError, match="cancelled"):  # the lookup waited until it was cancelled
            waiting.expect(patient, wire.LookupReply)
        check_bytes(waiting, reply, chain)
        told = waiting.explain("hung")["lookups"][0]["first_miss"]
        assert (told["chunk"], told["reason"]) == (1, "deadline")
        waiting.resume([])
        assert waiting.status()["sessions"]["leases"] == 0


def test_cancel_and_pings_stop_a_lookup_that_waits(start, tmp_path):
    server = start(faulty(tmp_path, "hang"))
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        chain = chain_of(identity.root, 3)
        client.store(identity, chain[: 2 * KEY_BYTES])
        for stop in (client.cancel, lambda seq: client.resume([])):
            request = client.lookup_request(identity.identity_id, chain, deadline_ms=60_000)
            client.send(request)
            stop(request.seq)
            with pytest.raises(RpcError) as caught:
                client.expect(request.seq, wire.LookupReply)
            assert caught.value.code == "cancelled"
        until(client, lambda status: status["sessions"]["leases"] == status["pool"]["leases"] == 0)


def test_a_process_that_ends_while_its_lookup_waits_leaves_no_lease(start, tmp_path):
    server = start(faulty(tmp_path, "hang"))
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


def test_the_admin_port_prewarms_explains_clears_and_counts(start: Callable[..., ServerProcess]) -> None:
    server = start(l2="fs")
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
            "kept": {"pinned": 0},
        }
        job = ask("/v1/prefetch", {"tokens": tokens, "salt": "prewarmed"})["job"]
        end_s = time.monotonic() + HANG_S
        while (document := ask(f"/v1/prefetch/{job}"))["state"] == "running":
            assert time.monotonic() < end_s, document
        assert (document["chunks"], document["l2_chunks"], document["reason"]) == (5, 5, "")
        reply = client.lookup(identity.identity_id, chain, request_id="after prewarm")
        assert (reply.l1_chunks, reply.l2_chunks) == (5, 0)
        client.release([(client.session, reply.seq)])
        assert ask("/v1/explain/after%20prewarm")["lookups"][0]["hits"]["l1"] == 5
        assert ask("/v1/status")["instance"]["http_port"] == server.ready["http_port"]
        assert ask("/readyz") == {"ready": True, "why": ""}
        with urllib.request.urlopen(url + "/metrics", timeout=30) as metrics:
            text = metrics.read().decode()
        assert "kvstrata_committed_chunks_total 5.0" in text.splitlines()
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask("/v1/prefetch", {"tokens": tokens, "model": "no such model"})
        assert caught.value.code == 400


NO_L2: tuple[str, ...] = ("--l2-adapter", "none")
PATIENT_MS = 20_000
REMEMBERED_KEYS = 32_768
"""`MAX_KEYS` of policy/misses.py; more absent keys than these are not remembered one by one."""


class Asked(NamedTuple):
    """A lookup that is to miss."""

    identity: wire.IdentifyReply
    chain: bytes
    probe: bytes = b""
    deadline_ms: int = PATIENT_MS
    served: int = 0


def unknown_key(client: RpcClient) -> Asked:
    return Asked(*new_prompt(client))


def never_stored(client: RpcClient) -> Asked:
    identity, chain = new_prompt(client)
    client.lookup(identity.identity_id, chain)
    return Asked(identity, chain)


def in_flight(client: RpcClient) -> Asked:
    identity, chain = new_prompt(client)
    client.store(identity, chain[: 2 * KEY_BYTES])
    client.reserve(identity.identity_id, chain[2 * KEY_BYTES :], parent=chain[KEY_BYTES : 2 * KEY_BYTES])
    return Asked(identity, chain, served=2)


def evicted(client: RpcClient) -> Asked:
    identity, chain = new_prompt(client)
    client.store(identity, chain)
    fill_l1(client)
    return Asked(identity, chain)


def corrupt(client: RpcClient) -> Asked:
    identity, chain = new_prompt(client, 2)
    client.store(identity, chain)
    lease = client.lookup(identity.identity_id, chain)
    extent = unpack_extents(lease.extents)[1]
    assert client.extents is not None

    def report() -> int:
        told = wire.Corrupt(client.next_seq(), identity.identity_id, chain[KEY_BYTES:])
        return client.ask(told, wire.Ok).count

    assert report() == 0, "the chunk is sound"
    client.extents.view(extent.offset_bytes, extent.length_bytes)[RECORD_BYTES - 100] ^= 1
    assert report() == 1
    client.release([(client.session, lease.seq)])
    return Asked(identity, chain, served=1)


def refused(client: RpcClient) -> Asked:
    identity, chain = new_prompt(client, 4)
    seq, reply = client.reserve(identity.identity_id, chain, record=2 << 20)
    assert reply.outcomes[-1] != wire.ReserveOutcome.RESERVED
    first = next(i for i, outcome in enumerate(reply.outcomes) if outcome != wire.ReserveOutcome.RESERVED)
    client.abort(seq)
    return Asked(identity, chain[first * KEY_BYTES :])


def identity_differs(client: RpcClient) -> Asked:
    probe = secrets.token_bytes(8)
    other = client.identify(adapter=probe.hex())
    client.store(other, chain_of(other.root, 2), probe=probe)
    asked = client.identify()
    return Asked(asked, chain_of(asked.root, 2, first_token=int.from_bytes(probe[:3], "big")), probe)


def put_skipped(client: RpcClient) -> Asked:
    identity, chain = new_prompt(client)
    client.store(identity, chain)
    until(client, lambda status: status["counters"]["put_skipped"])
    fill_l1(client)
    return Asked(identity, chain)


def l2_failed(client: RpcClient) -> Asked:
    return Asked(*new_prompt(client))


def breaker_open(client: RpcClient) -> Asked:
    while client.status()["l2_adapters"]["fault_inject-0"]["breakers"]["exists"] == "closed":
        identity, chain = new_prompt(client, 1)
        client.lookup(identity.identity_id, chain)
    return Asked(*new_prompt(client))


def deadline(client: RpcClient) -> Asked:
    return Asked(*new_prompt(client), deadline_ms=200)


def forgotten(client: RpcClient) -> Asked:
    identity = client.identify()
    for _ in range(REMEMBERED_KEYS // 1024 + 1):
        sent = [
            client.send(client.lookup_request(identity.identity_id, secrets.token_bytes(KEY_BYTES)))
            for _ in range(1024)
        ]
        for seq in sent:
            client.expect(seq, wire.LookupReply)
    return Asked(*new_prompt(client))


def fill_l1(client: RpcClient) -> None:
    """Store so many chunks that all older ones leave a small L1."""
    identity = client.identify(salt=secrets.token_hex(8))
    for number in range(60):
        client.store(identity, chain_of(identity.root, 4, first_token=number * 1_000_000))


def too_small_fs(folder: Path) -> tuple[str, ...]:
    """A tier that no record fits into."""
    entry = {"type": "fs", "base_path": str(folder / "kv"), "capacity_gb": RECORD_BYTES / 2**31}
    return ("--l2-adapter", json.dumps(entry))


PROVOKED: dict[MissReason, tuple[str, Callable[[RpcClient], Asked], str]] = {
    MissReason.UNKNOWN_KEY: ("plain", unknown_key, "has not seen"),
    MissReason.NEVER_STORED: ("plain", never_stored, "asked for before"),
    MissReason.IN_FLIGHT: ("plain", in_flight, "being stored"),
    MissReason.EVICTED: ("plain", evicted, "by LRU at"),
    MissReason.CORRUPT: ("plain", corrupt, "checksum differs"),
    MissReason.REFUSED: ("plain", refused, "session_limit"),
    MissReason.IDENTITY_DIFFERS: ("plain", identity_differs, "adapter: stored with"),
    MissReason.FORGOTTEN: ("forgetful", forgotten, "has overflowed"),
    MissReason.PUT_SKIPPED: ("skips", put_skipped, "capacity"),
    MissReason.L2_FAILED: ("error", l2_failed, "injected"),
    MissReason.BREAKER_OPEN: ("error", breaker_open, "breaker_open"),
    MissReason.DEADLINE: ("hang", deadline, "deadline"),
}
"""By reason: the server, what is done there before the lookup, and a part of the detail that explain gives."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """Starts the named server once, or gives the one that runs."""
    running: dict[str, ServerProcess] = {}

    def server(name: str) -> ServerProcess:
        if name not in running:
            folder = tmp_path_factory.mktemp(name)
            flags = (
                NO_L2
                if name in ("plain", "forgetful")
                else ("--l2-adapter", json.dumps(faulty(folder, name)))
            )
            if name == "skips":
                flags = too_small_fs(folder)
            process = ServerProcess(folder, l1_mb=4, l2="embedded", flags=flags)
            running[name] = process
            process.start()
        return running[name]

    yield server
    for process in running.values():
        process.close()


def counted(server: ServerProcess, client: RpcClient, reason: str) -> tuple[int, int]:
    """How often the reason was counted, by the status document and by the metrics.

    The page of the metrics may be a quarter of a second old, so it is read until it agrees with the status.
    """
    of_status = client.status()["counters"]["first_miss_reasons"].get(reason, 0)
    name = re.compile(
        rf'^kvstrata_first_misses(?:_total)?{{[^}}]*reason="{reason}"[^}}]*}} (\d+)', re.MULTILINE
    )
    ends_s = time.monotonic() + HANG_S
    while True:
        found = name.search(read(f"{server.url}/metrics").decode())
        of_metrics = int(found[1]) if found else 0
        if of_metrics == of_status or time.monotonic() > ends_s:
            return of_status, of_metrics
        time.sleep(0.05)


@pytest.mark.parametrize("reason", PROVOKED)
def test_a_miss_is_counted_and_explained_by_its_reason_at_the_first_lookup(servers, reason):
    name, provoke, says = PROVOKED[reason]
    server = servers(name)
    request_id = secrets.token_hex(8)
    with RpcClient(server.socket_dir) as client:
        asked = provoke(client)
        before = counted(server, client, reason)
        reply = client.lookup(
            asked.identity.identity_id,
            asked.chain,
            probe=asked.probe,
            deadline_ms=asked.deadline_ms,
            request_id=request_id,
        )
        assert (reply.reason, reply.n_chunks) == (reason, asked.served)
        assert counted(server, client, reason) == (before[0] + 1, before[1] + 1)
        [lookup] = client.explain(request_id)["lookups"]
        told: dict[str, Any] = lookup["first_miss"]
        assert (told["reason"], told["chunk"]) == (reason, asked.served)
        assert says in told["detail"], told
