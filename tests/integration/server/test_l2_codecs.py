"""A real server whose L2 encodes records: they come back byte for byte, or rounded for engines that accepted fp8."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.native.hashing import storage_keys
from kvstrata.native.record import RecordSpec, seal_record
from kvstrata.types import KEY_BYTES, Extent, unpack_extents
from tests.harness.codec_records import soft_payload
from tests.harness.l2_load import check_and_release, clear_l1, stored, until_stored
from tests.harness.rpc_client import CHUNK_TOKENS, PAYLOAD_BYTES, RECORD_BYTES, RpcClient, keys_of, layout
from tests.harness.server_process import ServerProcess
from tests.integration.server.l2_servers import l2_servers
from tests.oracles import codec as oracle

pytestmark = pytest.mark.integration


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with an `fs` adapter, or with the entry `adapter`."""
    with l2_servers(tmp_path) as starter:
        yield starter


@pytest.mark.parametrize(
    ("killed", "isolation"),
    [(True, "in_process"), pytest.param(False, "process", marks=pytest.mark.long)],
)
def test_encoded_records_come_back_byte_for_byte(
    start: Callable[..., ServerProcess], tmp_path: Path, killed: bool, isolation: str
) -> None:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text(secrets.token_hex(32))
    base = tmp_path / "encoded"
    codec = ["zstd", {"name": "aes-gcm", "key_file": str(key_file)}]
    server = start({"type": "fs", "base_path": str(base), "codec": codec, "isolation": isolation})
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 6)
        until_stored(client)
        if isolation == "in_process":
            assert client.status()["l2_adapters"]["fs-0"]["codec"]["encoded"] == 6
        if killed:
            server.kill()
            server.wipe_segment()
            server.start()
    files = list(base.glob("??/??/*.kvc"))
    assert len(files) == 6
    assert all(any(file.read_bytes()[80:88]) for file in files)
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        assert clear_l1(client) == (0 if killed else 6)
        reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
        assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks, reply.reason) == (6, 0, 6, "")
        check_and_release(client, reply, chain)


def test_a_wrong_key_file_is_a_miss_with_its_reason(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    base, key_file = tmp_path / "encoded", tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text(secrets.token_hex(32))
    adapter = {
        "type": "fs",
        "base_path": str(base),
        "codec": [{"name": "aes-gcm", "key_file": str(key_file)}],
    }
    server = start(adapter)
    with RpcClient(server.socket_dir) as client:
        _, chain = stored(client, 3)
        until_stored(client)
        clear_l1(client)
        server.kill()
        server.wipe_segment()
    key_file.write_text(secrets.token_hex(32))
    server.start()
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        for _ in range(2):
            reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l2_chunks) == (0, 0)
        assert client.status()["l2_adapters"]["fs-0"]["codec"]["wrong_key"] >= 1
    assert len(list(base.glob("??/??/*.kvc"))) == 3


class FloatClient(RpcClient):
    """Stores records whose payloads are bf16 numbers in two sections of a shape that it declares."""

    SECTIONS = (30_000, 30_000)

    def write(self, extent: Extent, root: bytes, chain_key: bytes, parent: bytes, fill: bytes) -> None:
        """A sealed record."""
        assert self.extents is not None and self.slice is not None
        digest = self.slice.digest()
        view = self.extents.view(extent.offset_bytes, extent.length_bytes)
        view[RECORD_BYTES - PAYLOAD_BYTES : RECORD_BYTES] = soft_payload(chain_key, PAYLOAD_BYTES)
        parent_key = storage_keys(root, parent, digest) if parent else bytes(KEY_BYTES)
        spec = RecordSpec(storage_keys(root, chain_key, digest), root, digest, parent_key, CHUNK_TOKENS)
        address = self.extents.address + extent.offset_bytes
        seal_record(address, extent.length_bytes, spec, list(self.SECTIONS))


@pytest.mark.parametrize("isolation", ["in_process", pytest.param("process", marks=pytest.mark.long)])
def test_only_engines_that_accepted_fp8_get_rounded_records(
    start: Callable[..., ServerProcess], tmp_path: Path, isolation: str
) -> None:
    base = tmp_path / "rounded"
    codec = ["fp8", "zstd"]
    server = start({"type": "fs", "base_path": str(base), "codec": codec, "isolation": isolation})
    facts = {"payload_bytes": PAYLOAD_BYTES, "element_bytes": 2, "fp8": [1, 5, 2, 10, 3, 50]}
    roots = {}
    for fidelity in ("fp8", "lossless"):
        identity = layout(fidelity=fidelity)
        with FloatClient(server.socket_dir, identity=identity, facts=facts) as client:
            mine, chain = stored(client, 4)
            roots[fidelity] = mine.root
            until_stored(client)
            clear_l1(client)
            reply = client.lookup(mine.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l2_chunks) == (4, 4)
            for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=True):
                found = struct.unpack(f"<{PAYLOAD_BYTES // 2}H", client.read(extent))
                exact = struct.unpack(f"<{PAYLOAD_BYTES // 2}H", soft_payload(key, PAYLOAD_BYTES))
                assert (found == exact) == (fidelity == "lossless")
                for a, b in zip(found, exact, strict=True):
                    a, b = oracle.float_of(a, 1), oracle.float_of(b, 1)
                    assert abs(a - b) <= max(abs(b) / 16, 2 / 448 / 1024) * 1.001 + abs(a) / 256
            client.release([(client.session, reply.seq)])
    assert roots["fp8"] != roots["lossless"]
    rounded = [path.read_bytes()[80] == 1 for path in base.glob("??/??/*.kvc")]
    assert sorted(rounded) == [False] * 4 + [True] * 4
