"""What only a real etcd shows of an election: certificates, users, a closed connection.

tests/model/controller/test_election.py has the elections themselves, over an etcd in memory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstrata.clock import SystemClock
from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller.election import Candidate, Election, check
from kvstrata.controller.etcd import EtcdFailed
from kvstrata.controller.orders import Orders
from kvstrata.errors import ConfigError, NotLeading
from tests.harness import etcd_server
from tests.harness.etcd_server import EtcdServer
from tests.harness.redis_server import certificates

pytestmark = pytest.mark.integration

TTL_S = 2


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    etcd_server.ensure()
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


def test_a_write_whose_connection_is_closed_meanwhile_says_so_and_is_not_cancelled(etcd):
    async def play() -> None:
        settings = EtcdSettings(endpoints=[etcd.address], ttl_s=600)
        election = election_of(settings)
        await election.step(refresh=True)
        assert election.token
        with etcd.frozen():
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
        await election.close()

    asyncio.run(play())


class Contender(Election):
    """An election that has its orders with it."""

    def __init__(self, settings: EtcdSettings, name: str) -> None:
        super().__init__(settings, Candidate(name, ""), SystemClock())
        self.orders = Orders(self.write)

    async def step(self, *, refresh: bool) -> None:
        """Look who leads, once."""
        await self._step(self.orders, refresh=refresh)


def election_of(settings: EtcdSettings, name: str = "a") -> Contender:
    return Contender(settings, name)


@contextlib.contextmanager
def secured(folder: Path) -> Iterator[tuple[EtcdServer, EtcdSettings]]:
    """An etcd that wants certificates and a user, and settings that have both."""
    etcd_server.ensure()
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
        ({"ca_file": "FOLDER"}, r"etcd.ca_file: .*: cannot be read: .*directory"),
        ({"ca_file": "FOLDER/text"}, r"etcd.ca_file: .*/text: has no certificates in PEM format"),
        (
            {"cert_file": "FOLDER/server.crt", "key_file": "FOLDER/open.key"},
            r"open.key can be read by others",
        ),
        (
            {"cert_file": "FOLDER/ca.crt", "key_file": "FOLDER/server.key"},
            r"etcd.cert_file: .*ca.crt and .*its key",
        ),
        ({"cert_file": "FOLDER/text", "key_file": "FOLDER/server.key"}, r"etcd.cert_file: .*/text"),
        ({"user": "kv", "password_file": "FOLDER/empty"}, r"etcd.password_file: .*/empty is empty"),
        ({"user": "kv", "password_file": "FOLDER/open.key"}, r"etcd.password_file: .*can be read by others"),
    ):
        settings = EtcdSettings(
            **{"endpoints": ["https://127.0.0.1:1"], **{name: named(value) for name, value in change.items()}}
        )
        with pytest.raises(ConfigError, match=says):
            check(settings, insecure=False)
