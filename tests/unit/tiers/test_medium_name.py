"""Instances recognise a medium that they share, and take no other for it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kvstrata.tiers.config import make_adapter
from kvstrata.tiers.media.shared import medium_name


@pytest.mark.parametrize(
    "host",
    ["localhost:1", "http://127.0.0.1:1", "[::1]:1", "0.0.0.0:1", ""],
)
def test_what_only_this_host_reaches_is_another_medium_on_another_host(host, monkeypatch):
    here, far = medium_name("a", hosts=[host]), medium_name("a", hosts=["10.0.0.1:1"])
    folder = medium_name("a", "/kv")
    monkeypatch.setattr(platform, "node", lambda: "other")
    assert medium_name("a", hosts=[host]) != here
    assert medium_name("a", "/kv") != folder
    assert medium_name("a", hosts=["10.0.0.1:1"]) == far
    assert medium_name("a", hosts=["example.org"]) == medium_name("a", hosts=["example.org"])


def word(entry: dict[str, object]) -> str:
    capabilities = make_adapter(entry, 0).capabilities
    assert capabilities.shared
    return capabilities.medium


REDIS: dict[str, object] = {"type": "resp", "host": "redis.internal"}
MOONCAKE: dict[str, object] = {
    "type": "mooncake_store",
    "local_hostname": "a",
    "metadata_server": "http://m:8080/metadata",
}
BUCKET: dict[str, object] = {"type": "object_store", "url": "s3://bucket/kv", "region": "eu-west-1"}


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (REDIS, {**REDIS, "port": 6379, "num_workers": 2}, {**REDIS, "key_prefix": "mine:"}),
        (REDIS, {**REDIS, "database_id": 0}, {**REDIS, "database_id": 1}),
        (REDIS, REDIS, {**REDIS, "port": 6380}),
        (
            {**MOONCAKE, "master_server_addr": "m:50051"},
            {**MOONCAKE, "master_server_addr": "m:50051", "local_hostname": "b"},
            {**MOONCAKE, "master_server_addr": "other:50051"},
        ),
        (BUCKET, {**BUCKET, "num_workers": 2}, {**BUCKET, "url": "s3://bucket/other"}),
        (BUCKET, BUCKET, {**BUCKET, "endpoint": "https://minio.internal:9000"}),
    ],
)
def test_adapters_of_one_medium_have_one_word(one, same, other):
    assert word(one) == word(same) != word(other)
    assert word(one)


def test_a_directory_has_a_word_only_where_servers_share_it(tmp_path: Path) -> None:
    entry = {"type": "fs", "base_path": str(tmp_path / "kv"), "shared": True}
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    assert word(entry) == word({**entry, "base_path": str(tmp_path / "link")})
    assert word(entry) != word({**entry, "base_path": str(tmp_path / "other")})
    assert not make_adapter({**entry, "shared": False}, 0).capabilities.medium
