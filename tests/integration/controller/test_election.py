"""One of several controllers leads: real etcd, real processes that are killed, stopped and go on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.clock import SystemClock
from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller.election import Candidate, Election, check
from kvstrata.controller.etcd import EtcdFailed, read_endpoint
from kvstrata.controller.orders import Orders, Pin
from kvstrata.errors import ConfigError, NotLeading
from tests.harness import etcd_server
from tests.harness.cache_engine import PATIENCE_S, eventually
from tests.harness.child import Child
from tests.harness.etcd_server import EtcdServer
from tests.harness.redis_server import certificates

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
                Child(
                    "tests.integration.controller.elector",
                    name,
                    etcd.address,
                    str(TTL_S),
                    log=tmp_path / f"{name}.log",
                )
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


@pytest.mark.silence
def test_when_the_leader_is_killed_another_leads_with_a_greater_token(start):
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


def test_a_controller_that_does_not_lead_writes_nothing(start):
    children = {name: start(name) for name in ("a", "b")}
    leader = one_leads(children)
    [other] = set(children) - {leader}
    assert not children[other].ask("write", key="state", value="of the other")
    # Not even when it believes it does: with no token of its own, or with that of the one that leads no more.
    assert not children[other].ask("write_believing", key="state", value="x", token=1)
    assert children[leader].ask("read", key="state") is None
    assert children[leader].ask("write", key="state", value="of the leader")
    assert children[leader].ask("read", key="state") == "of the leader"


@pytest.mark.silence
def test_a_leader_that_was_frozen_wakes_with_a_stale_token_that_writes_nothing(start):
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


def test_a_leader_that_leaves_is_replaced_at_once(start):
    children = {name: start(name) for name in ("a", "b")}
    old = one_leads(children)
    children.pop(old).ask("leave")
    [new] = children
    assert one_leads(children) == new


@pytest.mark.silence
@pytest.mark.long
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
        election = election_of(settings)
        await election.step(refresh=True)
        assert election.token
        etcd.freeze()
        writing = asyncio.create_task(election.write({"state": b"x"}))
        await asyncio.sleep(0)
        await election._disconnect()
        with pytest.raises(NotLeading, match="closed"):
            await writing
        again = asyncio.create_task(election.write({"state": b"x"}))
        await asyncio.sleep(0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        etcd.thaw()
        await election.close()

    asyncio.run(play())


@pytest.mark.silence
@pytest.mark.long
def test_while_etcd_is_stopped_nobody_leads_and_afterwards_one_does(start, etcd):
    children = {name: start(name) for name in ("a", "b")}
    one_leads(children)
    etcd.freeze()
    eventually("nobody leads", lambda: not any(leading(child) for child in children.values()))
    etcd.thaw()
    one_leads(children)


class Contender(Election):
    """An election that has its orders with it."""

    def __init__(self, settings: EtcdSettings, name: str) -> None:
        clock = SystemClock()
        super().__init__(settings, Candidate(name, ""), clock)
        self.orders = Orders(clock, self.write)

    async def step(self, *, refresh: bool) -> None:
        """Look who leads, once."""
        await self._step(self.orders, refresh=refresh)

    async def take_part(self) -> None:
        """Until cancelled."""
        await self.run(self.orders, lambda: None)


def election_of(settings: EtcdSettings, name: str = "a") -> Contender:
    return Contender(settings, name)


@contextlib.asynccontextmanager
async def running(*elections: Contender) -> AsyncIterator[None]:
    """These take part meanwhile."""
    tasks = [asyncio.create_task(election.take_part()) for election in elections]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for election in elections:
            await election.close()


async def until(what: str, holds: Callable[[], Any]) -> None:
    """Let them go on until it holds."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 (what is waited for is in another process)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never came to pass: {what}") from None


@pytest.mark.silence
@pytest.mark.long
async def test_a_leader_that_loses_its_rights_leads_no_more_and_another_one_does(etcd, tmp_path):
    elections = []
    for name in ("a", "b"):
        password = tmp_path / name
        password.touch(0o600)
        password.write_text(name)
        etcd.add_user(name, name)
        etcd.grant(name, "kvstrata/")
        settings = EtcdSettings(endpoints=[etcd.address], ttl_s=1, user=name, password_file=str(password))
        elections.append(election_of(settings, name))
    async with running(*elections):
        await until("one leads", lambda: any(one.token for one in elections))
        old, new = sorted(elections, key=lambda one: not one.token)
        token = old.token
        etcd.take_rights(old._me.name)
        await until("the other leads", lambda: new.token)
        assert new.token > token
        assert not old.token and "permission denied" in old.problem
        etcd.grant(old._me.name, "kvstrata/")
        await until("it takes part again", lambda: old.leader == new.leader and not old.problem)


@pytest.mark.silence
@pytest.mark.parametrize("leased", [pytest.param(False, marks=pytest.mark.long), True])
async def test_the_key_of_a_leader_that_no_longer_lives_is_taken_over(etcd, leased):
    lease = int(etcd.ask("lease/grant", TTL=600)["ID"]) if leased else 0
    etcd.put("kvstrata/leader", '{"name": "nobody", "http_url": ""}', lease)
    stale = int(etcd.get("kvstrata/leader")["mod_revision"])
    election = election_of(EtcdSettings(endpoints=[etcd.address], ttl_s=1))
    async with running(election):
        await until("it leads", lambda: election.token)
        assert election.token > stale
        await until("it is sure", lambda: not election.problem)


@pytest.mark.silence
@pytest.mark.long
async def test_a_controller_that_cannot_take_part_says_why_and_for_how_long(etcd, tmp_path, caplog):
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text("of a user that this etcd does not have")
    settings = EtcdSettings(endpoints=[etcd.address], ttl_s=1, user="kv", password_file=str(password))
    election = election_of(settings)
    logging.getLogger("kvstrata").propagate = True
    async with running(election):
        await until("it has waited for a leader", lambda: election.no_leader_s > 1 and election.failures > 1)
        assert election.leader is None and not election.token
        assert "authentication is not enabled" in election.problem
        await until("the log says so", lambda: "no_leader for_s=" in caplog.text)
        assert "authentication is not enabled" in caplog.text


@pytest.mark.silence
@pytest.mark.parametrize("restored", [pytest.param(False, marks=pytest.mark.long), True])
async def test_after_etcd_lost_its_data_or_was_restored_the_cluster_id_is_greater(etcd, tmp_path, restored):
    settings = EtcdSettings(endpoints=[etcd.address], ttl_s=1)
    election, other = election_of(settings), election_of(settings, "b")
    async with running(election):
        await until("it leads", lambda: election.token)
        backup = tmp_path / "backup"
        etcd.kill()
        shutil.copytree(etcd.folder / "data", backup)
        etcd.start()
        for number in range(20):
            etcd.put("somebody's", str(number))
        last = int(etcd.get("somebody's")["mod_revision"])
        await until(
            "it leads again, and has seen them", lambda: election.token and election._revision >= last
        )
        before = (election.cluster_id, election.token)
        etcd.kill()
        shutil.rmtree(etcd.folder / "data")
        if restored:
            backup.rename(etcd.folder / "data")
        etcd.start()
        await until("it leads with a greater id", lambda: election.token and election.cluster_id > before[0])
        async with running(other):
            await until("the other knows", lambda: other.cluster_id == election.cluster_id)


async def test_a_leader_outbids_what_an_instance_has_seen_and_only_a_leader_does(etcd):
    settings = EtcdSettings(endpoints=[etcd.address], ttl_s=600)
    leader, follower = election_of(settings), election_of(settings, "b")
    await leader.step(refresh=True)
    await follower.step(refresh=True)
    first, ahead = leader.cluster_id, SystemClock().unix_ms() + 10**9
    assert 0 < first == follower.cluster_id
    follower.outbid(ahead)
    await follower.step(refresh=False)
    await leader.step(refresh=False)
    assert leader.cluster_id == follower.cluster_id == first
    token = leader.token
    leader.outbid(ahead)
    await leader.step(refresh=False)
    await follower.step(refresh=False)
    assert leader.cluster_id == follower.cluster_id == ahead + 1
    assert leader.token == token
    await leader.close()
    await follower.close()


@pytest.mark.silence
@pytest.mark.long
async def test_orders_are_read_by_all_controllers_and_survive_their_leader_and_the_data_of_etcd(etcd):
    settings = EtcdSettings(endpoints=[etcd.address], ttl_s=1)
    leader, follower = election_of(settings, "leader"), election_of(settings, "follower")
    first, second = leader.orders, follower.orders
    pins = [Pin(f"{number:04}", "a", 1, 1 << 50) for number in range(250)]
    async with running(follower), running(leader):
        await until("both take part", lambda: len(leader.members) == len(follower.members) == 2)
        if not leader.token:
            leader, follower, first, second = follower, leader, second, first
        await first.drain("a", True)
        await first.remove("b", bar=True)
        for pin in pins[:3]:
            await first.put_pin(pin)
        await until("the other has read them", lambda: second.entries() == first.entries())
        with pytest.raises(NotLeading):
            await second.drain("c", True)
        assert "c" not in second.drained
        await first.end_pins("0001")
        await until("the end too", lambda: [pin.claim for pin in second.pins()] == ["0000", "0002"])
        await first.drain("a", False)
        await until("and the undrain", lambda: not second.drained)
        etcd.kill()
        shutil.rmtree(etcd.folder / "data")
        etcd.start()
        await until("etcd has them again", lambda: etcd.get("kvstrata/orders/removed/b"))
        await until("one leads", lambda: leader.token or follower.token)
    fresh = election_of(settings, "fresh")
    async with running(fresh):
        await until("the next one leads", lambda: fresh.token)
        assert fresh.orders.entries() == first.entries()
        # More than one transaction holds.
        await fresh.write({f"pins/{pin.claim}": msgspec.json.encode(pin) for pin in pins})
        await until("all are read", lambda: len(fresh.orders.pins()) == len(pins))
        etcd.put("kvstrata/orders/pins/bad", "no pin")
        await fresh.orders.put_pin(pins[0])
        await until("what cannot be read is left out", lambda: len(fresh.orders.pins()) == len(pins))


@contextlib.contextmanager
def secured(folder: Path) -> Iterator[tuple[EtcdServer, EtcdSettings]]:
    """An etcd that wants certificates and a user, and settings that have both."""
    try:
        etcd_server.ensure()
    except etcd_server.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    tls = certificates(folder / "tls")
    (tls / "server.key").chmod(0o600)
    password = folder / "password"
    password.touch(0o600)
    password.write_text("of the controllers\n")
    with EtcdServer(folder / "etcd", tls=tls) as etcd:
        etcd.add_user("kv", "of the controllers")
        etcd.grant("kv", "kvstrata/")
        yield (
            etcd,
            EtcdSettings(
                endpoints=[etcd.url],
                ttl_s=600,
                user="kv",
                password_file=str(password),
                ca_file=str(tls / "ca.crt"),
                cert_file=str(tls / "server.crt"),
                key_file=str(tls / "server.key"),
            ),
        )


async def refused(settings: EtcdSettings) -> str:
    """Why a controller with these settings cannot take part."""
    election = election_of(settings)
    with pytest.raises(EtcdFailed) as failed:
        await election.step(refresh=True)
    await election.close()
    return str(failed.value)


async def test_with_tls_a_controller_leads_only_with_its_certificate_and_its_user(tmp_path):
    with secured(tmp_path) as (etcd, settings):
        election = election_of(settings)
        await election.step(refresh=True)
        assert election.token
        await election.write({"state": b"written"})
        stored = etcd.get("kvstrata/orders/state")
        assert stored is not None and base64.b64decode(stored["value"]) == b"written"
        # Its token of etcd ends: as after a restart of etcd, or after a change of anybody's rights.
        election._connected()._login = (("token", "nobody's.1"),)
        await election.write({"state": b"after another login"})
        etcd.add_user("somebody", "else")
        await election.write({"state": b"after a change of rights"})
        await election.close()

        replace = msgspec.structs.replace
        wrong = tmp_path / "wrong"
        wrong.touch(0o600)
        wrong.write_text("another password")
        foreign = certificates(tmp_path / "foreign")
        assert "authentication failed" in await refused(replace(settings, password_file=str(wrong)))
        assert "user name is empty" in await refused(replace(settings, user="", password_file=""))
        assert "ertificate" in await refused(replace(settings, ca_file=str(foreign / "ca.crt")))
        assert await refused(replace(settings, cert_file="", key_file=""))
        plain = replace(settings, endpoints=[etcd.address], ca_file="", cert_file="", key_file="")
        assert await refused(plain)


def test_credentials_that_cannot_be_used_are_refused_by_name(tmp_path) -> None:
    folder = certificates(tmp_path)
    for name, mode in (("server.key", 0o600), ("open.key", 0o644), ("empty", 0o600), ("text", 0o600)):
        (folder / name).touch()
        (folder / name).chmod(mode)
    (folder / "text").write_text("no certificate")

    def named(value: object) -> object:
        return value.replace("FOLDER", str(folder)) if isinstance(value, str) else value

    for change, says in (
        ({"ca_file": "FOLDER/none"}, r"etcd.ca_file: .*/none: cannot be read: .*No such file"),
        ({"ca_file": "FOLDER"}, r"etcd.ca_file: .*: cannot be read: .*directory"),
        ({"ca_file": "FOLDER/text"}, r"etcd.ca_file: .*/text: holds no certificates in PEM"),
        ({"cert_file": "FOLDER/server.crt"}, r"etcd.key_file: is missing"),
        ({"key_file": "FOLDER/server.key"}, r"etcd.cert_file: is missing"),
        (
            {"cert_file": "FOLDER/server.crt", "key_file": "FOLDER/open.key"},
            r"open.key can be read by others",
        ),
        (
            {"cert_file": "FOLDER/ca.crt", "key_file": "FOLDER/server.key"},
            r"etcd.cert_file: .*ca.crt and .*its key",
        ),
        ({"cert_file": "FOLDER/text", "key_file": "FOLDER/server.key"}, r"etcd.cert_file: .*/text"),
        (
            {"endpoints": ["127.0.0.1:1"], "ca_file": "FOLDER/ca.crt"},
            r"etcd.endpoints: '127.0.0.1:1': .*https://",
        ),
        ({"user": "kv"}, r"etcd.password_file: is missing"),
        ({"password_file": "FOLDER/server.key"}, r"etcd.user: is missing"),
        ({"user": "kv", "password_file": "FOLDER/none"}, r"etcd.password_file: .*cannot be read"),
        ({"user": "kv", "password_file": "FOLDER/empty"}, r"etcd.password_file: .*/empty is empty"),
        ({"user": "kv", "password_file": "FOLDER/open.key"}, r"etcd.password_file: .*can be read by others"),
    ):
        settings = EtcdSettings(
            **{"endpoints": ["https://127.0.0.1:1"], **{name: named(value) for name, value in change.items()}}
        )
        with pytest.raises(ConfigError, match=says):
            check(settings, insecure=False)


def test_endpoints_that_cannot_be_used_are_refused_by_name() -> None:
    for endpoint, says in (
        ("a", "HOST:PORT"),
        (":2379", "HOST:PORT"),
        ("a:0", "HOST:PORT"),
        ("a:99999", "HOST:PORT"),
        ("a:x", "HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=f"etcd.endpoints.*{says}"):
            read_endpoint(endpoint)
