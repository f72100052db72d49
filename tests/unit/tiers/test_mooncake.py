"""The Mooncake adapter's fields, and servers and packages that are not there or not what they should be."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.strategies import (
    Settled,
    key_of,
    lent_context,
    load_item,
    put_item,
    region,
    settled,
    watched,
)
from kvstrata.tiers.base import Outcome
from kvstrata.tiers.config import TierConfig, configure_tier
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.mooncake import sdk
from kvstrata.tiers.media.mooncake.adapter import MooncakeAdapter
from tests.harness.mooncake import PUBLISHED

SETUP = {"local_hostname": "node01", "metadata_server": "P2PHANDSHAKE"}

# The SDK's boundary: writes down what it is called with.
RECORDER = """
import json, pathlib
CALLS = pathlib.Path(__file__).with_name("calls.json")
class ReplicateConfig:
    replica_num = 1
    preferred_segment = ""
class MooncakeDistributedStore:
    def __init__(self):
        self.calls = []
    def note(self, name, *arguments):
        self.calls.append([name, *arguments])
        CALLS.write_text(json.dumps(self.calls))
        return 0
    def setup(self, config):
        return self.note("setup", config)
    def register_buffer(self, address, length):
        return self.note("register_buffer", address, length)
    def close(self):
        return self.note("close")
    def batch_is_exist(self, names):
        return [0] * len(names)
    def batch_put_from(self, names, addresses, lengths, config):
        return [-800] * len(names)
    def batch_get_into(self, names, addresses, lengths):
        return [-800] * len(names)
"""


def configure(**fields: Any) -> TierConfig:
    return configure_tier({"type": "mooncake_store", **SETUP, **fields}, 0)


def adapter_of(config: TierConfig) -> MooncakeAdapter:
    adapter = config.make()
    assert isinstance(adapter, MooncakeAdapter)
    return adapter


def published_entry() -> dict[str, Any]:
    return json.loads(shlex.split(PUBLISHED)[-1])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a package `mooncake` whose module `store` has that source the one that is imported."""

    def make(source: str) -> Path:
        folder = tmp_path / "mooncake"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "store.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return folder

    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield make
    for name in ("mooncake", "mooncake.store"):
        sys.modules.pop(name, None)


@pytest.fixture
def master() -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def opened_and_closed(adapter: MooncakeAdapter) -> None:
    await adapter.open(lent_context(lambda key: None))
    await adapter.close()


# --- fields ------------------------------------------------------------------------------------------------


def test_the_published_adapter_entry_is_accepted_unchanged() -> None:
    config = configure_tier(published_entry(), 0)
    settings = adapter_of(config).config
    assert settings.num_workers == 4
    assert settings.per_op_workers == {Lane.LOOKUP: 1, Lane.LOAD: 1, Lane.PUT: 2}
    assert settings.preregister_l1_memory
    assert settings.setup == {
        "local_hostname": "node01",
        "metadata_server": "http://localhost:8080/metadata",
        "master_server_addr": "localhost:50051",
        "protocol": "rdma",
        "rdma_devices": "mlx5_0",
        "global_segment_size": "3221225472",
    }
    assert config.isolated, "it runs in a process of its own"


async def test_mooncake_is_set_up_with_exactly_its_options_and_the_pool_is_registered_once(
    package: Callable[[str], Path], master: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = package(RECORDER) / "calls.json"
    common = {"deadline_ms": 100, "policy": "through", "isolation": "in_process", "max_stuck_mb": 64}
    options = {
        **SETUP,
        "master_server_addr": master,
        "enable_ssd_offload": True,
        "of_next_year": 3,
        "tenant_id": "a",
    }
    await opened_and_closed(adapter_of(configure(**common, **options, num_workers=2)))
    pool = ["register_buffer", region().address, region().LENGTH]
    assert json.loads(calls.read_text()) == [["setup", options], pool, ["close"]]
    assert "l2_adapters[0].of_next_year: unknown field, passed on to Mooncake" in caplog.text


@pytest.mark.parametrize(
    ("answer", "kind", "what"),
    [("setup", StorageError, "setup answered -1"), ("register_buffer", ConfigError, "ulimit -l")],
)
async def test_a_call_that_mooncake_refuses_is_an_error_with_its_name(package, master, answer, kind, what):
    package(RECORDER.replace(f'return self.note("{answer}"', f'return -1 + self.note("{answer}"'))
    adapter = adapter_of(configure(master_server_addr=master))
    with pytest.raises(kind, match=what):
        await adapter.open(lent_context(lambda key: None))
    await adapter.close()


def test_the_numbers_of_replicas_are_no_options_of_setup_as_in_entries_for_lmcache() -> None:
    settings = adapter_of(configure(replica_num="2", nof_replica_num=0)).config
    assert settings.replicate == {"replica_num": 2, "nof_replica_num": 0}
    assert not {"replica_num", "nof_replica_num"} & settings.setup.keys()
    with pytest.raises(ConfigError, match=r"replica_num: must be a whole number from 0, found 'two'"):
        configure(replica_num="two")


# --- what is not there, or not what it should be -----------------------------------------------------------


async def test_rdma_without_a_network_card_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sdk, "_NICS", tmp_path / "missing")
    with pytest.raises(ConfigError, match="protocol: 'rdma' needs an RDMA network card"):
        await adapter_of(configure(protocol="rdma")).open(lent_context(lambda key: None))


def test_names_of_mooncakes_own_configuration_file_are_those_of_setup() -> None:
    adapter = adapter_of(configure(master_server_address="m:50051", device_name="mlx5_0"))
    assert adapter.config.setup == {**SETUP, "master_server_addr": "m:50051", "rdma_devices": "mlx5_0"}
    assert (
        adapter.capabilities.medium == adapter_of(configure(master_server_addr="m:50051")).capabilities.medium
    )
    with pytest.raises(ConfigError, match="rdma_devices: is given as device_name too; give one of them"):
        configure(device_name="mlx5_0", rdma_devices="mlx5_1")


@pytest.mark.parametrize("field", ["master_server_addr", "metadata_server"])
async def test_an_unreachable_server_is_named(package, master, field):
    package(RECORDER)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen, and nobody else can
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        fields = {"master_server_addr": master if field == "metadata_server" else address}
        if field == "metadata_server":
            fields["metadata_server"] = f"http://{address}/metadata"
        with pytest.raises(StorageError, match=f"{field}: nothing answers at {address}"):
            await adapter_of(configure(**fields)).open(lent_context(lambda key: None))


# --- a client that raises ---


async def test_one_exception_of_mooncakes_client_leaves_its_keys_to_later_puts(package, master):
    raises_once = """
    def batch_is_exist(self, names):
        if not self.calls or self.calls[-1][0] != "raised":
            self.note("raised")
            raise RuntimeError("the client's mistake")
        return [0] * len(names)
    def batch_put_from(self, names, addresses, lengths, config):
        return [0] * len(names)
"""
    package(RECORDER + raises_once)
    adapter = adapter_of(configure(master_server_addr=master))
    await adapter.open(lent_context(lambda key: None))
    gate = threading.Event()
    first, same, later = (put_item(key_of(1), 1_000) for _ in range(3))
    adapter._lanes.submit(Lane.PUT, gate.wait)  # so that both puts are there before the client raises
    together = asyncio.gather(
        *(settled(adapter.put, [item]) for item in (first, same)), return_exceptions=True
    )
    await asyncio.sleep(0)
    gate.set()
    raised, waited = await together
    assert isinstance(raised, RuntimeError)
    assert waited == [Settled(Outcome.THROTTLED, "throttled")]
    assert await settled(adapter.put, [later]) == [Settled(Outcome.STORED)]
    assert all(watched(item).dropped.is_set() for item in (first, same, later))
    await adapter.close()


# --- bytes in flight ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_up", [False, True])
async def test_bytes_of_a_transfer_that_mooncake_gave_up_stay_held(package, master, monkeypatch, given_up):
    package(RECORDER)
    if given_up:
        monkeypatch.setattr("kvstrata.tiers.media.mooncake.adapter.GIVEN_UP_S", 0.0)
    adapter = adapter_of(configure(master_server_addr=master))
    await adapter.open(lent_context(lambda key: None))
    put, load = put_item(key_of(1), 1_000), load_item(key_of(2), 1_000)
    assert await settled(adapter.put, [put]) == [Settled(Outcome.FAILED, "transfer")]
    assert await settled(adapter.load, [load]) == [Settled(Outcome.FAILED, "transfer")]
    await adapter.close()
    assert [watched(item).dropped.is_set() for item in (put, load)] == [not given_up] * 2
