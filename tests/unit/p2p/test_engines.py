"""Errors of transfer engines whose libraries or settings are missing or wrong."""

from __future__ import annotations

import itertools
import sys

import pytest

from kvstrata.errors import TransferError
from kvstrata.p2p.engines import nixl, ucx
from kvstrata.p2p.engines.base import MAX_METADATA_BYTES, MAX_REGIONS, Region, pack_metadata, unpack_metadata
from tests.harness.transfer_peer import Memory

REGION = Region(4096, 4096)


async def test_a_build_without_ucx_says_what_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstrata.native.ucx", None)
    with pytest.raises(TransferError, match="this build has no UCX engine; run `make setup`"):
        await ucx.UcxEngine().open([REGION])


async def test_a_machine_without_libucp_says_what_to_install() -> None:
    try:
        ucx.native_module()
    except TransferError:
        return  # the build itself has no UCX; the test above covers that
    engine = ucx.UcxEngine(library="/nowhere/libucp.so.0")
    with pytest.raises(TransferError, match=r"/nowhere/libucp.so.0.*install UCX: pip install"):
        await engine.open([REGION])
    await engine.close()


async def test_a_setting_that_ucx_does_not_know_is_named() -> None:
    try:
        ucx.native_module()
    except TransferError:
        return
    memory = Memory(4096)
    with pytest.raises(TransferError, match="UCX does not take NO_SUCH_THING=1"):
        await ucx.UcxEngine({"UCX_NO_SUCH_THING": "1"}).open([memory.region])
    memory.close()


async def test_a_python_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    engine = nixl.NixlEngine()
    with pytest.raises(TransferError, match=r"nixl: cannot be imported.*pip install --no-deps nixl=="):
        await engine.open([REGION])


async def test_regions_that_cannot_be_are_refused() -> None:
    wrong = [[], [REGION] * (MAX_REGIONS + 1), [Region(0, 1)], [Region(1, 0)], [Region(1 << 62, 1 << 62)]]
    for regions, engine in itertools.product(wrong, (ucx.UcxEngine(), nixl.NixlEngine())):
        with pytest.raises(TransferError, match="regions"):
            await engine.open(regions)
        await engine.close()


def test_metadata_come_back_as_they_went_and_have_a_bound() -> None:
    packed = pack_metadata("ucx", [REGION, Region(8192, 5)], b"part")
    assert unpack_metadata("ucx", "peer", packed) == ((4096, 5), b"part")
    with pytest.raises(TransferError, match="exceed"):
        pack_metadata("ucx", [REGION], bytes(MAX_METADATA_BYTES))
    for name in ("", "x" * 300):
        with pytest.raises(TransferError, match="peer: must have"):
            unpack_metadata("ucx", name, packed)
