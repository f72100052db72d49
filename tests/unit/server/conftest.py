"""A server in this process, with one process attached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstrata.rpc import wire
from kvstrata.types import RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, said

SESSION, GROUP = b"s" * 16, b"g" * 16


@pytest.fixture
def server() -> Iterator[InstanceInProcess]:
    server = InstanceInProcess()
    server.attach(SESSION, GROUP)
    yield server
    server.close()


@pytest.fixture
def identity(server: InstanceInProcess) -> wire.IdentifyReply:
    """Of the attached process, which has used the number 1 for it."""
    [reply] = server.feed(said(SESSION, wire.Identify(1, RequestIdentity())))
    assert isinstance(reply, wire.IdentifyReply)
    return reply
