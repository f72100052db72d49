"""What a claim keeps, what it is refused for, and what a file of claims may be like."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.errors import BadRequest, Refused
from kvstrata.keys.batch import split
from kvstrata.memory.paths import CLAIMS
from kvstrata.native.core import RecordSpec, seal_record, storage_keys
from kvstrata.process.operations import Claiming
from kvstrata.rpc import wire
from kvstrata.server import claims as module
from kvstrata.server.claims import Claim, _File
from kvstrata.types import unpack_extents
from tests.harness.instance_in_process import InstanceInProcess
from tests.harness.l1 import IDENTITY, L1, RECORD, chain
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, SECTIONS, chain_of, part

SESSION = b"s" * 16


@pytest.fixture(autouse=True)
def folder(server: InstanceInProcess, tmp_path: Path) -> Iterator[Path]:
    server.parts.claims._path = tmp_path / CLAIMS
    yield tmp_path
    for row in server.parts.claims.listed()["claims"]:
        server.loop.run_until_complete(server.parts.claims.release(row["claim"]))


@pytest.fixture
def keys(server: InstanceInProcess, identity: wire.IdentifyReply) -> list[bytes]:
    """Storage keys of a stored prompt."""
    chain = chain_of(identity.root, 4)
    server.store(SESSION, 10, identity, chain)
    return split(storage_keys(identity.root, chain, part().digest()))


def claim(server: InstanceInProcess, **fields: Any) -> Claim:
    return server.loop.run_until_complete(server.parts.claims.claim_prompt(Claiming(**fields)))


def test_a_key_brings_the_records_that_it_continues(server, keys, folder):
    made = claim(server, keys=[keys[2].hex()])
    (folder / CLAIMS).unlink()
    server.loop.run_until_complete(server.parts.claims.expire())
    assert (folder / CLAIMS).exists(), "a file that somebody has removed is written again"
    assert made.keys == b"".join(keys[:3]) and made.chunks == 3
    assert server.pool.remove(b"".join(keys)) == 1
    assert claim(server, keys=[keys[1].hex(), keys[0].hex(), keys[1].hex()]).keys == b"".join(keys[:2])
    assert server.parts.claims.kept_bytes == made.n_bytes, "each record counts once"
    server.pool.clear()
    assert server.pool.peek(b"".join(keys)) == 3
    with pytest.raises(Refused, match=f"absent: {keys[3].hex()}"):
        claim(server, keys=[keys[3].hex()])


def test_a_claim_keeps_of_a_window_what_a_hit_needs(server, folder):
    l1 = L1.__new__(L1)
    l1.pool, l1.row = server.pool, server.parts.processes.get(SESSION).row
    keys = chain("windows", 6, 2)
    l1.store(keys, 2)
    asked = Claiming(ttl_s=60)
    made = server.loop.run_until_complete(
        server.parts.claims.claim(b"".join(keys), 2, (0, 2), IDENTITY, asked)
    )
    assert (made.chunks, made.n_bytes) == (6, 8 * RECORD)
    assert server.pool.remove(b"".join(keys)) == 4, "the window's first chunks, which a hit does not need"
    assert server.pool.peek_windows(b"".join(keys), (0, 2)) == 6


def test_wrong_claims_are_refused_and_keep_nothing(server, keys, monkeypatch):
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "either tokens or keys"),
        ({"tokens": [1], "keys": ["00"]}, "either tokens or keys"),
        ({"tokens": [1]}, "must fill at least one chunk"),
        ({"keys": ["00"]}, "64 hexadecimal digits"),
        ({"keys": [keys[0].hex()], "until_unix_s": 1.0}, "name a time within"),
        ({"keys": [keys[0].hex()], "until_unix_s": 1e12}, "name a time within"),
        ({"keys": [keys[0].hex()], "until_unix_s": 1e306}, "name a time within"),
    ]
    for fields, says in wrong:
        with pytest.raises(BadRequest, match=says):
            claim(server, **fields)
    monkeypatch.setattr(module, "MAX_CLAIMED_KEYS", 3)
    with pytest.raises(Refused, match="too_many: 1024 more claims with 3 records"):
        claim(server, keys=[keys[3].hex()])
    server.parts.claims._path = Path("/nowhere/claims")
    with pytest.raises(Refused, match="not_durable: /nowhere/claims"):
        claim(server, keys=[keys[0].hex()])
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 99)
    with pytest.raises(Refused, match="at most 99 are read again"):
        claim(server, keys=[keys[0].hex()])
    claims = server.parts.claims
    assert (claims.accepted, claims.refused) == (0, {"too_many": 1, "not_durable": 2})
    assert claims.listed()["claims"] == [] and server.pool.stats()["leased_bytes"] == 0


@pytest.mark.parametrize("damage", ["torn", "version", "foreign", "key", "slices", "folder"])
def test_a_file_that_is_damaged_is_reported_and_stops_no_start(server, keys, folder, damage, caplog):
    path = folder / CLAIMS
    kept = claim(server, keys=[keys[0].hex()])
    server.loop.run_until_complete(server.parts.claims.release(kept.claim))
    told = msgspec.structs.replace(kept, claim="told")
    versions = {"version": 2}.get(damage, 1)
    if damage == "key":
        told = msgspec.structs.replace(told, keys=kept.keys[:-1])
    elif damage == "slices":
        told = msgspec.structs.replace(told, n_slices=0, spans=[1])
    content = msgspec.msgpack.encode(_File(versions, [told]))
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes({"torn": content[:-9], "foreign": b"{}"}.get(damage, content))
    server.loop.run_until_complete(server.parts.claims.restore(adopted=True))
    rows = {row["claim"]: (row["state"], row["reason"]) for row in server.parts.claims.listed()["claims"]}
    if damage in ("key", "slices"):
        assert rows["told"] == ("broken", "damaged")
    else:
        assert "told" not in rows and "claims_ignored" in caplog.text


def test_a_corrupt_record_breaks_each_claim_that_has_it_though_it_is_stored_again(server, identity, keys):
    broken = [claim(server, keys=[key.hex()]).claim for key in keys[1:3]]
    other = claim(server, keys=[keys[0].hex()]).claim
    pool = server.pool
    with pool.hold(keys[1]) as hold:
        (ctypes.c_ubyte * 1).from_address(hold.address + hold.length - 1)[0] ^= 0xFF
    assert pool.mark_bad(keys[1])
    [process] = server.parts.processes
    ticket, _, packed = pool.reserve(keys[1], keys[0], RECORD_BYTES, process.row, identity.root)
    [extent] = unpack_extents(packed)
    spec = RecordSpec(keys[1], identity.root, part().digest(), keys[0], CHUNK_TOKENS)
    seal_record(pool.extents_address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)
    pool.commit(ticket, [0])
    server.feed()
    server.loop.run_until_complete(server.supervisor.idle())
    rows = {row["claim"]: (row["state"], row["reason"]) for row in server.parts.claims.listed()["claims"]}
    assert rows == {**dict.fromkeys(broken, ("broken", "corrupt")), other: ("kept", "")}
    assert (pool.stats()["leases"], server.parts.claims.kept_bytes) == (1, RECORD_BYTES)
    server.loop.run_until_complete(server.parts.claims.release(other))
