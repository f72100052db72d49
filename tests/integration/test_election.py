"""One of several controllers leads: real etcd, real processes that are killed, stopped and go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.config.model import EtcdSettings
from kvstrata.controller.election import Election, Member, read_endpoint
from kvstrata.errors import ConfigError, NotLeading
from tests.harness import etcd_server
from tests.harness.cache_engine import eventually
from tests.harness.child import Child
from tests.harness.etcd_server import EtcdServer

pytestmark = pytest.mark.integration

TTL_S = 2


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    try:
        etcd_server.ensure()
    except etcd_server.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def start(etcd: EtcdServer, tmp_path: Path) -> Iterator[Callable[[str], Child]]:
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Child:
            return stack.enter_context(
                Child("tests.harness.elector", name, etcd.address, str(TTL_S), log=tmp_path / f"{name}.log")
            )

        yield start


def leading(child: Child) -> int:
    """Its token."""
    return int(child.ask("state")["token"])


def one_leads(children: dict[str, Child]) -> str:
    """Waits until exactly one leads and the others know it; its name."""

    def agreed() -> str:
        states = {name: child.ask("state") for name, child in children.items()}
        leaders = [name for name, state in states.items() if state["token"]]
        if len(leaders) > 1:  # they were not asked at the same time
            still = children[leaders[0]].ask("state")["token"]
            assert still != states[leaders[0]]["token"], f"two lead at a time: {states}"
            return ""
        return leaders[0] if leaders and {s["leader"] for s in states.values()} == set(leaders) else ""

    return str(eventually("one leads", agreed))


def test_one_leads_and_when_it_is_killed_another_does_with_a_greater_token(start):
    children = {name: start(name) for name in ("a", "b", "c")}
    first = one_leads(children)
    token = leading(children[first])
    assert children[first].ask("write", key="state", value="of the first")
    eventually("all are members", lambda: children[first].ask("state")["members"] == ["a", "b", "c"])
    children.pop(first).kill()
    second = one_leads(children)
    assert leading(children[second]) > token
    assert children[second].ask("read", key="state") == "of the first"
    eventually("the dead one is none", lambda: first not in children[second].ask("state")["members"])


def test_who_does_not_lead_writes_nothing(start):
    children = {name: start(name) for name in ("a", "b")}
    leader = one_leads(children)
    [other] = set(children) - {leader}
    assert not children[other].ask("write", key="state", value="of the other")
    # Not even when it believes it does: with no token of its own, or with that of the one that leads no more.
    assert not children[other].ask("write_believing", key="state", value="x", token=1)
    assert children[leader].ask("read", key="state") is None
    assert children[leader].ask("write", key="state", value="of the leader")
    assert children[leader].ask("read", key="state") == "of the leader"


def test_a_leader_that_was_only_stopped_wakes_with_a_stale_token_that_writes_nothing(start):
    children = {name: start(name) for name in ("a", "b")}
    old = one_leads(children)
    stale = leading(children[old])
    children[old].signal(signal.SIGSTOP)
    [new] = set(children) - {old}
    eventually("the other leads", lambda: leading(children[new]))
    assert children[new].ask("write", key="state", value="of the new one")
    children[old].signal(signal.SIGCONT)
    assert not children[old].ask("write_believing", key="state", value="of the old one", token=stale)
    assert not children[old].ask("write", key="state", value="of the old one")
    assert one_leads(children) == new
    assert children[new].ask("read", key="state") == "of the new one"


def test_a_leader_that_leaves_makes_room_at_once(start):
    children = {name: start(name) for name in ("a", "b")}
    old = one_leads(children)
    children.pop(old).ask("leave")
    [new] = children
    assert one_leads(children) == new


def test_while_etcd_is_away_nobody_leads_and_afterwards_one_does(start, etcd):
    children = {name: start(name) for name in ("a", "b")}
    token = leading(children[one_leads(children)])
    etcd.kill()
    eventually("nobody leads", lambda: not any(leading(child) for child in children.values()))
    assert not any(child.ask("write", key="state", value="x") for child in children.values())
    etcd.start()
    assert leading(children[one_leads(children)]) >= token
    assert next(iter(children.values())).ask("read", key="state") is None


def test_a_write_whose_connection_is_closed_meanwhile_says_so_and_is_not_cancelled(etcd):
    async def play() -> None:
        settings = EtcdSettings(endpoints=[etcd.address], ttl_s=600)
        election = Election(settings, Member("a", ""), SystemClock(), lambda: None)
        await election._step(refresh=True)
        assert election.token
        etcd.freeze()
        writing = asyncio.create_task(election.write("state", b"x"))
        await asyncio.sleep(0)
        await election._disconnect()
        with pytest.raises(NotLeading, match="closed"):
            await writing
        again = asyncio.create_task(election.write("state", b"x"))
        await asyncio.sleep(0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        etcd.thaw()
        await election.close()

    asyncio.run(play())


def test_while_etcd_is_stopped_nobody_leads_and_afterwards_one_does(start, etcd):
    children = {name: start(name) for name in ("a", "b")}
    one_leads(children)
    etcd.freeze()
    eventually("nobody leads", lambda: not any(leading(child) for child in children.values()))
    etcd.thaw()
    one_leads(children)


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("https://a:2379", "TLS"),
        ("a", "HOST:PORT"),
        (":2379", "HOST:PORT"),
        ("a:0", "HOST:PORT"),
        ("a:99999", "HOST:PORT"),
        ("a:x", "HOST:PORT"),
    ],
)
def test_endpoints_that_cannot_be_used_are_refused_by_name(endpoint, says):
    with pytest.raises(ConfigError, match=f"etcd.endpoints.*{says}"):
        read_endpoint(endpoint)


def test_a_user_needs_a_password():
    with pytest.raises(ConfigError, match=r"etcd: user and password_file"):
        Election(EtcdSettings(user="a", endpoints=["a:1"]), Member("a", ""), SystemClock(), lambda: None)
