"""A tenant names chunks, leases and engines of another tenant; the server tells and does nothing.

Blue lies by raw messages: it knows the chain keys of green's prompts, which follow from a guessed prompt, and it knows
every number and name of green that a status document of an admin shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstrata.errors import BadRequest, LayoutRefused, NotPermitted
from kvstrata.native.hashing import storage_keys
from kvstrata.native.record import RecordSpec, seal_record
from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, Role, unpack_extents
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, SECTIONS, RpcClient, chain_of, keys_of, until
from tests.harness.server_process import ServerProcess
from tests.harness.tenants import BLUE, GREEN, Tenant, tenant_settings

pytestmark = pytest.mark.integration

QUOTAS = "quotas_gb: {green: 0.01953125, blue: 0.015625}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two tenants and an L2, for all tests of this file."""
    folder = tmp_path_factory.mktemp("server")
    adapter = f'{{"type": "fs", "base_path": "{folder / "l2"}", "capacity_gb": 1}}'
    flags = (*tenant_settings(folder, QUOTAS), "--l2-adapter", adapter)
    with ServerProcess(folder, l1_mb=64, l2="embedded", flags=flags) as server:
        server.start()
        yield server


@pytest.fixture
def blue(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    with Tenant(server, "blue", BLUE, request.node.name) as blue:
        blue.begin()
        yield blue


@pytest.fixture
def green(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    with Tenant(server, "green", GREEN, request.node.name) as green:
        green.begin()
        yield green


def in_l2(server: ServerProcess, tenant: Tenant, chain: bytes) -> bool:
    """Whether L2 has all records that the tenant stored under these chain keys."""
    assert tenant.slice is not None
    keys = storage_keys(tenant.root, chain, tenant.slice.digest())
    return {f"{key.hex()}.kvc" for key in keys_of(keys)} <= {
        path.name for path in (server.folder / "l2").rglob("*.kvc")
    }


def test_blue_finds_nothing_by_green_s_keys_and_hears_what_any_unknown_key_gives(blue, green):
    chain, unknown = chain_of(green.root, 4), chain_of(bytes(32), 4)
    green.store(green.identity, chain)
    for keys in (chain, unknown):
        found = blue.looks_up(keys, "spies")
        assert (found.n_chunks, found.extents, found.reason) == (0, b"", "unknown_key")
        assert blue.retrieves(keys[:KEY_BYTES]) == wire.RetrieveReply(blue.seq, blue.epoch, False, 0, b"")
    assert green.retrieves(chain[:KEY_BYTES]).found
    green.reads_its_own(chain)


def test_green_s_chunks_and_absent_ones_are_reserved_alike(blue, green):
    chain = chain_of(green.root, 4)
    green.store(green.identity, chain)
    in_flight, _ = green.reserve(green.identity.identity_id, chain_of(green.root, 1, first_token=10**6))
    for keys in (chain, chain_of(green.root, 1, first_token=10**6), chain_of(bytes(32), 4)):
        seq, reply = blue.reserve(blue.identity.identity_id, keys)
        assert set(reply.outcomes) == {wire.ReserveOutcome.RESERVED}, (
            "PRESENT or IN_FLIGHT would tell of green"
        )
        assert blue.abort(seq) == len(keys) // KEY_BYTES
    green.abort(in_flight)
    green.reads_its_own(chain)


@pytest.mark.parametrize("first", ["green", pytest.param("blue", marks=pytest.mark.long)])
def test_what_blue_stores_under_green_s_keys_is_never_green_s(blue, green, first):
    chain = chain_of(green.root, 4)
    if first == "green":
        green.store(green.identity, chain)
    blue.store(blue.identity, chain)
    if first == "blue":
        assert green.looks_up(chain).n_chunks == 0
        assert set(green.store(green.identity, chain)) == {wire.ReserveOutcome.RESERVED}
    green.reads_its_own(chain)
    assert blue.cleared() >= 4
    green.reads_its_own(chain)


def test_a_record_in_green_s_name_is_not_committed(blue, green):
    key = chain_of(green.root, 1)
    assert blue.slice is not None and blue.extents is not None
    digest = blue.slice.digest()
    own, foreign = (storage_keys(root, key, digest) for root in (blue.root, green.root))
    for record_key, root in ((foreign, green.root), (own, green.root), (foreign, blue.root)):
        seq, reply = blue.reserve(blue.identity.identity_id, key)
        [extent] = unpack_extents(reply.extents)
        spec = RecordSpec(record_key, root, digest, bytes(KEY_BYTES), CHUNK_TOKENS)
        seal_record(blue.extents.address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)
        assert blue.commit(seq, [0]) == bytes([wire.CommitOutcome.BAD_RECORD])
    assert green.looks_up(key).n_chunks == blue.looks_up(key).n_chunks == 0


def test_blue_cannot_have_green_s_chunks_checked_or_dropped(blue, green):
    chain = chain_of(green.root, 2)
    green.store(green.identity, chain)
    assert green.extents is not None
    extent = green.extent_of(chain[:KEY_BYTES])
    view = green.extents.view(extent.offset_bytes, extent.length_bytes)
    view[RECORD_BYTES - 100] ^= 1
    assert blue.reports_corrupt(chain) == 0
    assert green.looks_up(chain).n_chunks == 2
    assert green.reports_corrupt(chain) == 1


def test_green_s_chunks_in_l2_are_neither_found_nor_loaded_nor_deleted_by_blue(server, blue, green):
    chain = chain_of(green.root, 4)
    green.store(green.identity, chain)
    until(green, lambda _: in_l2(server, green, chain))
    assert green.cleared() >= 4
    assert blue.looks_up(chain).n_chunks == blue.looks_up(chain_of(bytes(32), 4)).n_chunks == 0
    blue.store(blue.identity, chain)
    until(blue, lambda _: in_l2(server, blue, chain))
    assert blue.cleared() >= 4
    assert in_l2(server, green, chain)
    green.reads_its_own(chain)
    assert blue.looks_up(chain).n_chunks == 4, "blue's own records under these keys"


def test_green_s_leases_are_unknown_to_blue(blue, green):
    chain = chain_of(green.root, 3)
    green.store(green.identity, chain)
    lease = green.lookup(green.identity.identity_id, chain)
    for seq in (lease.seq, lease.seq + 1000):
        assert blue.release([(green.session, seq)], group=True) == 0
    assert green.release([(green.session, lease.seq)], group=True) == 1


@pytest.mark.parametrize("token", [BLUE, ""])
def test_blue_cannot_join_green_s_engine(server, green, token):
    """A member of a group would get its leases, end them, and decide which slices a chunk needs."""
    joining = RpcClient(server.socket_dir, token=token, group=green.group, role=Role.SCHEDULER)
    with pytest.raises(NotPermitted, match="group: its processes may use other tenants"):
        joining.attach()
    joining.close()
    taking = RpcClient(server.socket_dir, token=token)
    taking.session = green.session
    with pytest.raises((NotPermitted, BadRequest)):
        taking.attach()
    taking.close()
    second = RpcClient(server.socket_dir, token=GREEN, group=green.group, role=Role.SCHEDULER)
    second.attach()
    second.goodbye()


def test_facts_that_blue_declares_do_not_keep_green_out(server, blue):
    """Under one layout identity the facts of all engines of a tenant must agree; those of two tenants need not."""
    facts = {"payload_bytes": 100, "sections": [100]}
    with RpcClient(server.socket_dir, token=GREEN, facts=facts) as other:
        assert other.identify(tenant="green").complete
        with pytest.raises(LayoutRefused, match="facts"):
            RpcClient(server.socket_dir, token=GREEN).attach()
