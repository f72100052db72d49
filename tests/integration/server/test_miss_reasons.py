"""Each reason of the closed list, provoked in a real server: told to the engine, counted in status and metrics, and
named by explain.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, MissReason, unpack_extents
from tests.harness.http_read import read
from tests.harness.rpc_client import HANG_S, RECORD_BYTES, RpcClient, chain_of, new_prompt, until
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

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
    client.extents.view(extent.offset_bytes, extent.length_bytes)[RECORD_BYTES - 100] ^= 1
    told = wire.Corrupt(client.next_seq(), identity.identity_id, chain[KEY_BYTES:])
    assert client.ask(told, wire.Ok).count == 1
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


def faulty(folder: Path, fault: str) -> tuple[str, ...]:
    inner = {"type": "fs", "base_path": str(folder / fault), "capacity_gb": 1}
    entry = {"type": "fault_inject", "inner": inner, "rate": 1.0, "seed": 1, "faults": [fault]}
    return ("--l2-adapter", json.dumps(entry))


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
            environment = dict(os.environ)
            flags = NO_L2 if name in ("plain", "forgetful") else faulty(folder, name)
            if name == "skips":
                flags = too_small_fs(folder)
            process = ServerProcess(folder, l1_mb=4, l2="embedded", flags=flags, environment=environment)
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
