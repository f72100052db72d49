"""Transfer engines: errors of wrong libraries or settings, which ports they open, and when a tier's is opened."""

from __future__ import annotations

import itertools
import sys

import pytest

from kvstrata.errors import TransferError
from kvstrata.p2p import peer_engine
from kvstrata.p2p.engines import nixl, ports, ucx
from kvstrata.p2p.engines.base import MAX_METADATA_BYTES, Region, pack_metadata, unpack_metadata
from kvstrata.p2p.peer_engine import PeerEngine
from tests.harness.waiting import until

REGION = Region(4096, 4096)


async def test_a_build_without_ucx_says_what_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstrata.native.ucx", None)
    with pytest.raises(TransferError, match="this build has no UCX engine; run `make setup`"):
        await ucx.UcxEngine().open(REGION)


async def test_a_python_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    engine = nixl.NixlEngine()
    with pytest.raises(TransferError, match=r"nixl: cannot be imported.*pip install --no-deps nixl=="):
        await engine.open(REGION)


async def test_memory_that_cannot_be_is_refused() -> None:
    wrong = [Region(0, 1), Region(1, 0), Region(1 << 62, 1 << 62)]
    for region, engine in itertools.product(wrong, (ucx.UcxEngine(), nixl.NixlEngine())):
        with pytest.raises(TransferError, match="are not a range of memory"):
            await engine.open(region)
        await engine.close()


def test_metadata_come_back_as_they_went_and_have_a_bound() -> None:
    packed = pack_metadata("ucx", REGION, b"part")
    assert unpack_metadata("ucx", "peer", packed) == (4096, b"part")
    with pytest.raises(TransferError, match="exceed"):
        pack_metadata("ucx", REGION, bytes(MAX_METADATA_BYTES))
    for name in ("", "x" * 300):
        with pytest.raises(TransferError, match="peer: must have"):
            unpack_metadata("ucx", name, packed)


def test_tcp_is_left_out_unless_a_setting_or_ucx_tls_asks_for_it() -> None:
    for environment, tcp, this_host_only, settings in (
        ({}, False, False, {"TLS": "^tcp"}),
        ({}, True, True, {"NET_DEVICES": "lo"}),
        ({}, True, False, {}),
        ({"UCX_TLS": "tcp"}, False, True, {"NET_DEVICES": "lo"}),
        ({"UCX_NET_DEVICES": "eth1"}, True, True, {}),
    ):
        found = ports.ucx_settings(environment, tcp=tcp, this_host_only=this_host_only)
        assert found == settings, (environment, tcp, this_host_only)


class StubEngine:
    """Cannot be opened while `errors` has an error."""

    errors: list[Exception]

    async def open(self, region: Region) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return b"metadata"

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    monkeypatch.setattr(peer_engine, "RETRY_S", 0.0)
    made = StubEngine()
    made.errors, made.closed = [], False
    return made


async def test_without_a_usable_device_the_engine_is_opened_as_soon_as_there_is_one(engine) -> None:
    engine.errors = [TransferError(f"stub: no device {at}", field="network") for at in range(3)]
    opened = PeerEngine("peer", lambda: engine)
    await opened.open(REGION)
    assert (opened.metadata, opened.remarks()) == (b"", {"engine": "stub: no device 0"})
    with pytest.raises(TransferError, match="no network device"):
        _ = opened.current
    await until(lambda: opened.metadata == b"metadata")
    assert opened.current is engine and opened.remarks() == {}
    await opened.close()
    assert engine.closed


async def test_another_error_stops_the_start(engine) -> None:
    engine.errors = [TransferError("stub: not installed", field="engine")]
    with pytest.raises(TransferError, match="not installed"):
        await PeerEngine("peer", lambda: engine).open(REGION)


async def test_a_tier_that_is_closed_tries_no_more(engine) -> None:
    engine.errors = [TransferError("stub: no device", field="network")] * 1_000_000
    opened = PeerEngine("peer", lambda: engine)
    await opened.open(REGION)
    await opened.close()
    left = len(engine.errors)
    await until(lambda: len(engine.errors) == left)
