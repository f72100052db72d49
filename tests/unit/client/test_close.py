"""A closed client leaves no descriptor open in its process."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from kvstrata.client import CacheClient
from kvstrata.config.client_model import ClientSettings
from kvstrata.types import RequestIdentity, Role
from tests.harness.open_files import open_files
from tests.harness.rpc_client import layout


def client_of(place: Path) -> CacheClient:
    settings = ClientSettings(socket_dir=str(place))
    return CacheClient(settings, layout=layout(), role=Role.SCHEDULER, group=os.urandom(16), engine_slices=1)


@pytest.mark.parametrize("started", [True, False])
def test_closed_clients_leave_no_descriptor_open(tmp_path: Path, started: bool) -> None:
    client_of(tmp_path).close()  # opens what a process opens once
    gc.collect()
    before = sorted(open_files())
    for _ in range(3):
        client = client_of(tmp_path)
        if started:
            client.start()
        client.close()
        client.close()
        client.identity(RequestIdentity())  # late calls find it closed
        del client
    gc.collect()
    assert sorted(open_files()) == before
