"""Entries of type `resp`: what they make, and what is said about wrong ones, without ever showing a password."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.resp.adapter import RespAdapter
from kvstrata.tiers.media.resp.servers import Address

SECRET = "hunter2"


def made(**fields: Any) -> RespAdapter:
    entry = {"type": "resp", **fields}
    adapter = configure_tier(entry, 0).make()
    assert isinstance(adapter, RespAdapter)
    return adapter


@pytest.mark.usefixtures("patience_of_production")
def test_every_field_that_users_know_is_read() -> None:
    adapter = made(
        host="10.0.0.1",
        port=7000,
        username="u",
        password=SECRET,
        key_prefix="team-a/kv:",
        num_workers=3,
        per_op_workers={"lookup": 1},
        database_id=4,
        request_timeout=0.5,
        connection_timeout=1.5,
        ttl_seconds=90,
        max_capacity_gb=0.5,
        tls_enable=True,
        tls_server_name="redis",
    )
    servers, config = adapter.servers, adapter.config
    assert (servers.username, servers.password, servers.database) == ("u", SECRET, 4)
    assert (servers.connection_timeout_s, servers.tls_server_name) == (1.5, "redis")
    assert isinstance(servers.tls, ssl.SSLContext) and servers.tls.verify_mode is ssl.CERT_REQUIRED
    assert (config.key_prefix, config.ttl_seconds, adapter.timeout_s) == ("team-a/kv:", 90, 0.5)
    assert (config.num_workers, config.per_op_workers) == (3, {Lane.LOOKUP: 1})
    assert config.max_capacity_gb == 0.5


def test_the_deadline_is_the_time_limit_where_no_other_is_given() -> None:
    assert made(host="h", deadline_ms=250).timeout_s == 0.25


@pytest.mark.parametrize("nodes", ["a:1,b:2 , [::1]:3", ["a:1", "b:2", "[::1]:3"]])
def test_nodes_of_a_cluster(nodes: Any) -> None:
    servers = made(startup_nodes=nodes, cluster_mode=True).servers
    assert servers.addresses == (Address("a", 1), Address("b", 2), Address("::1", 3)) and servers.cluster


def test_sentinels() -> None:
    servers = made(sentinels="a,b:7", sentinel_master="mymaster").servers
    assert servers.addresses == (Address("a", 26379), Address("b", 7)) and servers.master_name == "mymaster"


def test_a_password_comes_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    assert made(host="h", password_file=str(file)).servers.password == SECRET
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        made(host="h", password_file=str(file))


def test_an_entry_that_cannot_be_read_is_not_shown() -> None:
    for entry in (f'{{"type": "resp", "password": "{SECRET}"', f'[{{"password": "{SECRET}"}}]'):
        with pytest.raises(ConfigError) as raised:
            configure_tier(entry, 0)
        assert SECRET not in raised.value.message
