"""A real server in front of a real Redis to which somebody else writes."""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from kvstrata.cli.asking import Ask, ask
from kvstrata.errors import BadRequest
from kvstrata.native.core import storage_keys
from kvstrata.types import unpack_extents
from tests.harness.hostile_resp import Hostile, cursors
from tests.harness.l2_load import clear_l1, served, stored, until_stored
from tests.harness.records import forged_record, renamed, resealed
from tests.harness.redis_server import RedisServer
from tests.harness.rpc_client import KEY_BYTES, PAYLOAD_BYTES, RpcClient, chain_of, keys_of, new_prompt, until
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

START = 4096
"""Where the payload of the tests' records begins."""


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def key_file(folder: Path, name: str = "key") -> str:
    path = folder / name
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return str(path)


def names_of(client: RpcClient, root: bytes, chain: bytes) -> list[bytes]:
    assert client.slice is not None
    keys = storage_keys(root, chain, client.slice.digest())
    return [b"kvstrata:" + key.hex().encode() for key in keys_of(keys)]


def put_of(client: RpcClient, count: int) -> None:
    until(client, lambda status: status["l2_store"]["adapters"]["resp-0"]["outcomes"].get("stored") == count)


def read_back(client: RpcClient, root_id: int, chain: bytes) -> tuple[int, str, list[bytes]]:
    """Look a chain up: the chunks found, the reason of the first miss, and the payloads' first bytes."""
    reply = client.lookup(root_id, chain, deadline_ms=20_000)
    starts = [client.read(extent)[:8] for extent in unpack_extents(reply.extents)]
    client.release([(client.session, reply.seq)])
    return reply.n_chunks, reply.reason, starts


def struck(record: bytes) -> bytes:
    """A record without the key's codec in its chain."""
    return resealed(record[:80] + bytes([2, 3]).ljust(8, b"\0") + record[88:])


def altered(record: bytes) -> bytes:
    """A record with one other bit in its ciphertext."""
    return resealed(record[: START + 20] + bytes([record[START + 20] ^ 1]) + record[START + 21 :])


ATTACKS: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {
    "a plain record": lambda forged, first, second: forged,
    "the record of another chunk": lambda forged, first, second: second,
    "the record of another chunk, and longer": lambda forged, first, second: resealed(second + bytes(8)),
    "the record of another chunk, and shorter": lambda forged, first, second: resealed(second[:-8]),
    "the record of another chunk that names this one": lambda forged, first, second: renamed(
        second, first[16:48]
    ),
    "the key's codec struck off the chain": lambda forged, first, second: struck(first),
    "altered ciphertext": lambda forged, first, second: altered(first),
}
"""By what the attacker does: from a forged plain record and the records of two chunks, the value of the first chunk."""


@pytest.mark.parametrize("name", ["aes-gcm", pytest.param("mac", marks=pytest.mark.long)])
def test_with_a_key_nothing_that_somebody_else_wrote_is_served(start, medium, tmp_path, name):
    codec = ["zstd", {"name": name, "key_file": key_file(tmp_path)}]
    server = start(medium.entry(codec=codec))
    with RpcClient(server.socket_dir) as client, medium.client() as attacker:
        for number, (what, attack) in enumerate(ATTACKS.items(), start=1):
            identity, chain = new_prompt(client, 2)
            client.store(identity, chain)
            put_of(client, 3 * number - 1)
            first, second = names_of(client, identity.root, chain)
            genuine = attacker.get(first), attacker.get(second)
            assert all(one is not None and one[80:88].strip(b"\0")[-1] in (5, 6) for one in genuine)
            clear_l1(client)
            forged = forged_record(client, identity.root, chain[:KEY_BYTES], b"FORGED!!")
            attacker.set(first, attack(forged, *genuine))
            assert read_back(client, identity.identity_id, chain) == (0, "corrupt", []), what
            client.store(identity, chain[:KEY_BYTES])
            put_of(client, 3 * number)
            clear_l1(client)
            assert served(client, identity, chain) == (0, 2), f"{what}: the next put has replaced it"
        counts = client.status()["l2_adapters"]["resp-0"]["codec"]
        told = "4 attacks, each seen by the load, which removed it"
        assert (counts["unauthenticated"], counts.get("wrong_key")) == (4, None), f"{told}: {counts}"


def test_without_a_key_a_record_is_served_if_it_fits_and_no_other(start, medium):
    server = start(medium.entry())
    with RpcClient(server.socket_dir) as client, medium.client() as attacker:
        identity, chain = new_prompt(client, 2)
        client.store(identity, chain)
        put_of(client, 2)
        first, second = names_of(client, identity.root, chain)
        clear_l1(client)
        forged = forged_record(client, identity.root, chain[:KEY_BYTES], b"FORGED!!")
        attacker.set(second, forged)  # the key of another chunk
        attacker.set(first, forged)
        n_chunks, reason, starts = read_back(client, identity.identity_id, chain)
        assert (n_chunks, reason, starts) == (1, "corrupt", [b"FORGED!!"])
        other = client.identify(salt="another identity")
        clear_l1(client)
        attacker.set(first, forged_record(client, other.root, chain[:KEY_BYTES], b"FORGED!!"))
        assert read_back(client, identity.identity_id, chain[:KEY_BYTES])[:2] == (0, "corrupt")


def odd_values(client: RpcClient, root: bytes, chain: bytes) -> dict[str, bytes]:
    """Values for a chunk of whose records each has another length than the layout's, or decodes to one."""
    one_megabyte = forged_record(client, root, chain[:KEY_BYTES], b"x", [1 << 20])
    return {
        "150 MB of garbage": bytes(150_000_000),
        "a sound record of 150 MB": forged_record(
            client, root, chain[:KEY_BYTES], b"FORGED!!", [150_000_000]
        ),
        "a sound record of 1 MB": one_megabyte,
        "a record that is too short": one_megabyte[:30_000],
        "a byte": b"x",
        "a sound record, zstd that decodes to 512 MB": bomb(client, root, chain, 512 << 20),
    }


def bomb(client: RpcClient, root: bytes, chain: bytes, length: int) -> bytes:
    """A small record, sound by its headers, whose payload is `length` zeros before zstd."""
    slabs = length >> 20
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    body = struct.pack("<Q", length) + struct.pack("<I", len(frame)) * slabs + frame * slabs
    header = forged_record(client, root, chain[:KEY_BYTES], b"\0", [length])[:START]
    return resealed(header[:80] + bytes([3]).ljust(8, b"\0") + header[88:START] + body)


@pytest.mark.parametrize("codec", ["zstd", pytest.param(None, marks=pytest.mark.long)])
def test_a_value_of_another_length_than_the_layouts_takes_no_room_in_l1(start, medium, codec):
    server = start(medium.entry(**({"codec": codec} if codec else {})), l1_mb=256)
    with RpcClient(server.socket_dir) as client, medium.client() as attacker:
        others, chain = new_prompt(client, 200)
        client.store(others, chain)
        until_stored(client)
        asked = client.identify(salt="asked")
        wanted = chain_of(asked.root, 1)
        [name] = names_of(client, asked.root, wanted)
        for what, value in odd_values(client, asked.root, wanted).items():
            attacker.set(name, value)
            n_chunks, reason, _ = read_back(client, asked.identity_id, wanted)
            assert n_chunks == 0 and reason in ("corrupt", "l2_failed"), what
            status = client.status()
            assert status["pool"]["inserted_entries"] == 200, what
            assert (status["pool"]["reservations"], status["pool"]["entries"]["ready"]) == (0, 200), what
        client.store(asked, wanted)
        until_stored(client)
        clear_l1(client)
        assert served(client, asked, wanted) == (0, 1), "a put has replaced the odd value"


def zstd_bomb(length: int) -> bytes:
    """The zstd codec's bytes of `length` bytes, whose first slab decodes to 1 GB of zeros."""
    slabs = -(-length // (1 << 20))
    pack = zstandard.ZstdCompressor().compressobj()
    frame = b"".join(pack.compress(bytes(16 << 20)) for _ in range(64)) + pack.flush()
    return struct.pack("<Q", length) + struct.pack("<I", len(frame)) * slabs + frame * slabs


BOMBS: dict[str, tuple[bytes, Callable[[], bytes]]] = {
    "zstd": (bytes([3]), lambda: zstd_bomb(PAYLOAD_BYTES)),
    "planes and zstd": (bytes([2, 3]), lambda: zstd_bomb(PAYLOAD_BYTES)),
    "a longer zstd length": (bytes([3]), lambda: struct.pack("<Q", 1 << 40)),
}
"""By what it is: the codecs of a record of the right length, and its stored payload."""


@pytest.mark.parametrize(
    "bomb_name",
    [pytest.param(name, marks=() if name == "planes and zstd" else pytest.mark.long) for name in BOMBS],
)
def test_a_bomb_ends_at_the_length_of_the_layout(start, medium, bomb_name):
    server = start(medium.entry(codec=["zstd"]))
    codecs, body = BOMBS[bomb_name]
    with RpcClient(server.socket_dir) as client, medium.client() as attacker:
        identity, chain = new_prompt(client, 1)
        header = forged_record(client, identity.root, chain, b"x")[:START]
        [name] = names_of(client, identity.root, chain)
        attacker.set(name, resealed(header[:80] + codecs.ljust(8, b"\0") + header[88:] + body()))
        before_kb = peak_kb(server)
        n_chunks, reason, _ = read_back(client, identity.identity_id, chain)
        assert (n_chunks, reason) == (0, "corrupt")
        assert attacker.get(name) is None, "a record that decodes to other bytes is removed"
        assert peak_kb(server) - before_kb < 64 << 10


def peak_kb(server: ServerProcess) -> int:
    """The most memory that the server has used, in kB."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


async def test_a_scan_that_never_ends_does_not_block_a_clear(tmp_path: Path) -> None:
    """The clear says which tier is incomplete, and clears the other one."""
    async with Hostile() as hostile:
        hostile.answers[b"SCAN"] = cursors(1, 2)
        fs = {"type": "fs", "base_path": str(tmp_path / "kv"), "capacity_gb": 1}
        entries = [hostile.entry(), fs]
        flags = [*(word for entry in entries for word in ("--l2-adapter", json.dumps(entry)))]

        def work() -> None:
            with ServerProcess(tmp_path / "server", l1_mb=16, l2="embedded", flags=tuple(flags)) as server:
                server.start()
                with RpcClient(server.socket_dir) as client:
                    stored(client, 3)
                    until(
                        client,
                        lambda status: status["l2_store"]["adapters"]["fs-1"]["outcomes"].get("stored") == 3,
                    )
                    with pytest.raises(BadRequest, match=r"resp-0: not cleared: .* incomplete: SCAN of"):
                        ask(server.url, Ask("/v1/clear", {"tier": "all"}))
                    assert list((tmp_path / "kv").glob("??/??/*.kvc")) == []

        async with asyncio.timeout(300):
            await asyncio.to_thread(work)
