"""Which network devices of a host count as usable, and that changes of devices are noticed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import network
from tests.harness.network import Host, Network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "-"),
]

WAIT_S = 120.0
LOOK = """
import json
from kvstrata.p2p.engines.links import find_devices
found = find_devices()
print(json.dumps([sorted(found.usable), sorted(found.idle)]))
"""
WATCH = """
import asyncio
from kvstrata.p2p.engines.links import LinkWatch

async def main():
    changed = asyncio.Event()
    watch = LinkWatch(changed.set)
    print("watching", flush=True)
    await changed.wait()
    watch.close()
    watch.close()
    print("changed", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with Network(tmp_path, 1) as made:
        yield made.hosts[0]


def devices(host: Host, **environment: str) -> tuple[list[str], list[str]]:
    """(Usable devices, idle devices) of the host."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    done = subprocess.run(
        [*host.under, "env", *variables, sys.executable, "-c", LOOK], capture_output=True, check=True
    )
    usable, idle = json.loads(done.stdout)
    return usable, idle


def test_a_device_can_be_used_while_it_is_up_has_its_link_and_an_address(host: Host) -> None:
    there = f"eth0 {host.address}"
    assert devices(host) == ([there], ["lo"])
    host.cut()
    assert devices(host) == ([], ["eth0", "lo"])
    host.mend()
    assert devices(host) == ([there], ["lo"])
    host.ip("link", "set", "eth0", "down")
    assert devices(host) == ([], ["eth0", "lo"])
    host.ip("link", "set", "eth0", "up")
    host.ip("address", "flush", "dev", "eth0")
    assert devices(host) == ([], ["eth0", "lo"])


def test_more_addresses_of_a_device_change_nothing(host: Host) -> None:
    before = devices(host)
    host.ip("address", "add", "10.73.0.200/24", "dev", "eth0")
    host.ip("address", "add", "fd00::7/64", "dev", "eth0", "nodad")
    assert devices(host) == before
    host.ip("address", "flush", "dev", "eth0", "scope", "global")
    host.ip("address", "add", "fd00::7/64", "dev", "eth0", "nodad")
    assert devices(host)[0] == ["eth0 fd00::7"]


def test_devices_that_ucx_may_not_use_are_left_out(host: Host) -> None:
    host.new_device("10.74.0.1")
    assert devices(host)[0] == [f"eth0 {host.address}", "more0 10.74.0.1"]
    assert devices(host, UCX_NET_DEVICES="more0") == (["more0 10.74.0.1"], [])
    assert devices(host, UCX_NET_DEVICES="^more0,more1,lo") == ([f"eth0 {host.address}"], [])


async def test_a_change_of_devices_is_noticed(host: Host) -> None:
    watching = await asyncio.create_subprocess_exec(
        *host.under, sys.executable, "-c", WATCH, stdout=asyncio.subprocess.PIPE
    )
    assert watching.stdout is not None
    async with asyncio.timeout(WAIT_S):
        assert await watching.stdout.readline() == b"watching\n"
        await asyncio.to_thread(host.cut)
        assert await watching.stdout.readline() == b"changed\n"
        assert await watching.wait() == 0
