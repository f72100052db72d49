"""Claims on a real server: pressure, kills and lost pools; and that nothing but the identity decides what is reused.

The controls (wrong keys, claims, tenants, salts and models, changed prompts) are repeated with and without a claim: a
claim keeps chunks, and never lets a request find more or other ones.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.error
from typing import Any

import msgspec
import pytest

from kvstrata.memory.paths import CLAIMS
from kvstrata.native.core import chain_keys, storage_keys
from kvstrata.rpc import wire
from kvstrata.server.claims import _File
from kvstrata.types import KEY_BYTES, unpack_extents
from tests.harness.cache_engine import eventually
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient, keys_of, part, payload
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

CHUNKS = 20
TOKENS = list(range(CHUNKS * CHUNK_TOKENS))


@pytest.fixture
def server(start: Any) -> ServerProcess:
    made: ServerProcess = start(l1_mb=16, chunk_tokens=CHUNK_TOKENS, flags=("--eviction-policy", "LRU"))
    return made


def claim(server: ServerProcess, **asked: Any) -> dict[str, Any]:
    """What the server answers to a claim, an error's body too."""
    try:
        answer: dict[str, Any] = server.post("/v1/claims", asked)
    except urllib.error.HTTPError as refused:
        answer = json.load(refused)
    return answer


def states(server: ServerProcess) -> dict[str, tuple[str, str]]:
    return {row["claim"]: (row["state"], row["reason"]) for row in server.get("/v1/claims")["claims"]}


def hits(client: RpcClient, tokens: list[int], **identity: str) -> int:
    """Chunks that a lookup finds, after a look at their bytes."""
    known = client.identify(**identity)
    chain = chain_keys(known.root, tokens, CHUNK_TOKENS)
    found = client.lookup(known.identity_id, chain)
    for key, extent in zip(keys_of(chain), unpack_extents(found.extents), strict=False):
        assert client.read(extent) == payload(key)
    if found.n_chunks:
        client.release([(client.session, found.seq)])
    return found.n_chunks


def store(client: RpcClient, tokens: list[int], **identity: str) -> bytes:
    known = client.identify(**identity)
    chain = chain_keys(known.root, tokens, CHUNK_TOKENS)
    client.store(known, chain)
    return chain


def fill(client: RpcClient, round_: int) -> None:
    """Store three times as much as L1 holds."""
    for number in range(40):
        store(client, [round_, number, *TOKENS[2:]])


def test_claimed_chunks_outlive_pressure_and_kills_and_others_do_not(server):
    with RpcClient(server.socket_dir) as client:
        store(client, TOKENS, salt="claimed")
        store(client, TOKENS, salt="other")
        kept = claim(server, tokens=TOKENS, salt="claimed", ttl_s=3_600)
        short = claim(server, tokens=TOKENS[: 2 * CHUNK_TOKENS], salt="claimed", ttl_s=0.001)
        assert (kept["state"], kept["chunks"], short["chunks"]) == ("kept", CHUNKS, 2)
        eventually("the short claim is over", lambda: states(server)[short["claim"]][0] == "expired")
        for round_ in range(3):
            fill(client, round_)
            assert hits(client, TOKENS, salt="claimed") == CHUNKS
            assert hits(client, TOKENS, salt="other") == 0
            client.reserve(client.identify().identity_id, fresh_chain(client, round_))
            server.kill()
            server.start()
            assert server.ready["adopted"]
            client.attach()
            client.ask(wire.Quiesced(client.next_seq()), wire.Ok)
            assert states(server)[kept["claim"]] == ("kept", "")
        metrics = server.get("/v1/status")["claims"]
        assert (metrics["kept"], metrics["kept_bytes"]) == (1, kept["bytes"])
        too_large = claim(server, keys=[key.hex() for key in many(client)])
        assert too_large["message"].startswith("no_room"), too_large
        server.post(f"/v1/claims/{kept['claim']}/release", {})
        fill(client, 9)
        assert hits(client, TOKENS, salt="claimed") == 0
    assert states(server) == {kept["claim"]: ("released", ""), short["claim"]: ("expired", "")}


def fresh_chain(client: RpcClient, round_: int) -> bytes:
    """The chain keys of a chunk that nobody has stored."""
    return chain_keys(client.identify().root, [99, round_, *TOKENS[2:CHUNK_TOKENS]], CHUNK_TOKENS)


def many(client: RpcClient) -> list[bytes]:
    """Storage keys of more chunks than a quarter of L1 has room for."""
    keys = []
    for number in range(4):
        tokens = [77, number, *TOKENS[2:]]
        chain = store(client, tokens)
        keys += keys_of(storage_keys(client.identify().root, chain, part().digest()))
    return keys


def test_a_claim_ends_with_its_pool_or_its_time_while_no_server_runs(server):
    with RpcClient(server.socket_dir) as client:
        store(client, TOKENS)
        lost = claim(server, tokens=TOKENS)["claim"]
        over = claim(server, tokens=TOKENS, until_unix_s=time.time() + 3_600)["claim"]
    server.kill()
    path = server.socket_dir / CLAIMS
    file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    path.write_bytes(msgspec.msgpack.encode(_File(file.version, [
        msgspec.structs.replace(one, until_unix_ms=1) if one.claim == over else one for one in file.claims
    ])))  # fmt: skip
    server.start()
    assert states(server) == {lost: ("kept", ""), over: ("expired", "")}
    server.kill()
    server.wipe_segment()
    server.start()
    assert not server.ready["adopted"]
    assert states(server) == {lost: ("broken", "pool_lost"), over: ("expired", "")}
    assert "claim_broken" in server.log_tail()
    path.write_bytes(b"?")
    server.kill()
    server.start()
    assert states(server) == {} and "claims_ignored" in server.log_tail()


def test_a_claim_that_was_answered_before_a_kill_is_kept_after_it(server):
    answered: list[str] = []

    def go_on() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while True:
                answered.append(claim(server, tokens=TOKENS)["claim"])

    with RpcClient(server.socket_dir) as client:
        store(client, TOKENS)
        threads = [threading.Thread(target=go_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually("some claims are answered", lambda: len(answered) >= 20)
        server.kill()
        for thread in threads:
            thread.join()
        server.start()
    found = states(server)
    assert set(found.values()) == {("kept", "")} and found.keys() >= set(answered)
    assert len(found) <= len(answered) + len(threads)


def test_controls_only_what_the_identity_says_is_found_with_a_claim_and_without(server):
    mine = {"tenant": "t", "salt": "s"}
    changed = [*TOKENS[: 7 * CHUNK_TOKENS], 1 << 20, *TOKENS[7 * CHUNK_TOKENS + 1 :]]
    with RpcClient(server.socket_dir) as client:
        chain = store(client, TOKENS, **mine)
        keys = [
            key.hex() for key in keys_of(storage_keys(client.identify(**mine).root, chain, part().digest()))
        ]

        def found() -> list[int]:
            others = (
                {"tenant": "t"},
                {"salt": "s"},
                {**mine, "salt": "S"},
                {**mine, "tenant": "T"},
                {**mine, "adapter": "a"},
            )
            return [
                *(hits(client, tokens, **mine) for tokens in (TOKENS, changed, TOKENS[1:], [0, *TOKENS])),
                *(hits(client, TOKENS, **other) for other in others),
            ]

        expected = [CHUNKS, 7, 0, 0, *[0] * 5]
        assert found() == expected
        kept = claim(server, tokens=TOKENS, **mine)
        assert kept["state"] == "kept" and found() == expected
        by_key = claim(server, keys=[keys[4]], tenant="t")
        assert (by_key["chunks"], by_key["state"]) == (5, "kept")
        wrong = [
            ({"tokens": TOKENS, **mine, "salt": "S"}, f"absent: the first 0 of its {CHUNKS} chunks"),
            ({"tokens": TOKENS, **mine, "tenant": "T"}, f"absent: the first 0 of its {CHUNKS} chunks"),
            ({"tokens": TOKENS, **mine, "adapter": "a"}, f"absent: the first 0 of its {CHUNKS} chunks"),
            ({"tokens": changed, **mine}, f"absent: the first 7 of its {CHUNKS} chunks"),
            ({"keys": [keys[0]]}, f"absent: {keys[0]}"),
            ({"keys": ["00" * (KEY_BYTES - 1) + "01"], "tenant": "t"}, "absent: "),
            ({"keys": [chain[:KEY_BYTES].hex()], "tenant": "t"}, "absent: "),
            ({"tokens": TOKENS, **mine, "model": "other"}, "model: 'other'"),
            ({"tokens": TOKENS, **mine, "bytes": 1}, f"over_bytes: its chunks have {kept['bytes']} bytes"),
        ]
        for asked, says in wrong:
            assert claim(server, **asked)["message"].startswith(says), asked
        for unknown in ("nothing", kept["claim"][:-1], keys[0]):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post(f"/v1/claims/{unknown}/release", {})
            assert refused.value.code == 404
        assert states(server) == {kept["claim"]: ("kept", ""), by_key["claim"]: ("kept", "")}
        for name in states(server):
            server.post(f"/v1/claims/{name}/release", {})
        assert found() == expected
