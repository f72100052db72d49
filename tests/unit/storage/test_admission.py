"""Which entries a running server takes: fields of every medium that would reach more than the settings allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError, KvstrataError, NotPermitted
from kvstrata.storage import catalogue
from kvstrata.storage.admission import NAMES_A_SECRET, RuntimeRules, admitted, checked_rules
from kvstrata.storage.common import CommonFields
from kvstrata.storage.entry import configure_tier

ALL = ("disk", "fs", "resp", "object_store", "mooncake_store", "fault_inject")
HOSTS = ("redis.internal", "10.0.0.7:6379", "[::1]:6379", "s3://mine", "minio:9000")


@pytest.fixture
def rules(tmp_path: Path) -> RuntimeRules:
    return checked_rules(ALL, [str(tmp_path)], HOSTS)


def s3(**more: Any) -> dict[str, Any]:
    return {"type": "s3", "url": "s3://mine/kv", **more}


def mooncake(**more: Any) -> dict[str, Any]:
    places = {"metadata_server": "P2PHANDSHAKE", "master_server_addr": "redis.internal:50051"}
    return {"type": "mooncake_store", "local_hostname": "node01", **places, **more}


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "resp", "host": "redis.internal", "password": "of the one who asks"},
        {"type": "valkey", "url": "rediss://REDIS.internal:7000/2"},
        {"type": "resp", "host": "10.0.0.7"},
        {"type": "resp", "startup_nodes": "redis.internal:1,[::1]:6379", "cluster_mode": True},
        s3(region="eu-central-1", access_key_id="id", secret_access_key="key"),
        s3(url="s3://other/kv", endpoint="http://minio:9000", allow_http=True),
        mooncake(),
        mooncake(metadata_server="http://redis.internal:8080/metadata", tenant_id="t"),
        {"type": "fault_inject", "inner": {"type": "resp", "host": "redis.internal"}},
    ],
    ids=str,
)
def test_what_the_settings_allow_is_taken_unchanged(rules: RuntimeRules, entry: dict[str, Any]) -> None:
    assert admitted(entry, rules, "adapter") == entry


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"type": "resp", "host": "evil.example"}, "adapter.host"),
        ({"type": "resp", "host": "redis.internal.evil.example"}, "adapter.host"),
        ({"type": "resp", "url": "redis://redis.internal@evil.example/"}, "adapter.url"),
        ({"type": "resp", "host": "redis.internal", "tls_enable": True, "tls_ca_file": "/x"}, "adapter.tls_ca_file"),
        (s3(url="s3://other/kv"), "adapter.url"),
        (s3(url="az://mine/kv", account_name="evil"), "adapter.account_name"),
        (s3(url="file:///etc"), "adapter.url"),
        (s3(url="s3://mine@evil.example/"), "adapter.url"),
        (s3(endpoint="http://minio:9000@evil.example"), "adapter.endpoint"),
        (s3(endpoint="http://evil.example"), "adapter.endpoint"),
        (s3(region="x.evil.example/"), "adapter.region"),
        (s3(aws_endpoint="http://evil.example"), "adapter.aws_endpoint"),
        (s3(proxy_url="http://evil.example"), "adapter.proxy_url"),
        (s3(metadata_endpoint="http://evil.example"), "adapter.metadata_endpoint"),
        (s3(service_account="/secrets/key.json"), "adapter.service_account"),
        (s3(federated_token_file="/secrets/token"), "adapter.federated_token_file"),
        (s3(container_credentials_full_uri="http://evil.example"), "adapter.container_credentials_full_uri"),
        (s3(options={"endpoint": "http://evil.example"}), "adapter.options"),
        (mooncake(metadata_server="http://evil.example/metadata"), "adapter.metadata_server"),
        (mooncake(metadata_server="redis.internal,evil.example"), "adapter.metadata_server"),
        (mooncake(master_server_addr=None), "adapter.master_server_addr"),
        (mooncake(ipc_socket_path="/tmp/x"), "adapter.ipc_socket_path"),
        (mooncake(enable_client_http_server=True), "adapter.enable_client_http_server"),
        (mooncake(setup={"x": 1}), "adapter.setup"),
        ({"type": "fault_inject", "inner": {"type": "resp", "host": "evil.example"}}, "adapter.inner.host"),
        ({"type": "fault_inject", "inner": {"type": "plugin"}}, "adapter.inner.type"),
        ({"type": "plugin", "module_path": "os", "class_name": "system"}, "adapter.type"),
        ({"type": "x" * 200_000}, "adapter.type"),
        ({"type": "fs", "base_path": "~nobody-of-this-name/x"}, "adapter.base_path"),
        ({"type": "fs", "base_path": "/etc", "codec": [{"name": "aes-gcm", "key_file": "/x"}]},
         "adapter.codec[0].key_file"),
        ({"type": "fs", "base_path": "/etc", "codec": {"name": "aes-gcm", "KEY_FILE": 7}}, "adapter.codec.KEY_FILE"),
    ],
    ids=str,
)  # fmt: skip
def test_what_they_do_not_allow_names_the_field(
    rules: RuntimeRules, entry: dict[str, Any], field: str
) -> None:
    with pytest.raises(KvstrataError) as caught:
        admitted(entry, rules, "adapter")
    assert isinstance(caught.value, NotPermitted | ConfigError)
    assert caught.value.field == field and caught.value.message.startswith(f"{field}: ")
    assert len(caught.value.message) < 1_000


def test_deep_entries_are_refused(rules: RuntimeRules) -> None:
    entry: dict[str, Any] = {"type": "resp", "host": "redis.internal"}
    for _ in range(40):
        entry = {"type": "fault_inject", "inner": entry}
    with pytest.raises(ConfigError, match="nested"):
        admitted(entry, rules, "adapter")


def test_every_own_field_that_names_a_secret_s_place_is_caught_by_its_name() -> None:
    """A new field that names a file must end in `_file`, or its medium must say that it cannot be added at run time."""
    seen = set()
    for name, point in catalogue.own_points().items():
        medium = catalogue.load(point.value)
        if medium.reach is None:
            continue
        fields = {*medium.config.__struct_fields__, *medium.runtime_rest, *CommonFields.__struct_fields__}
        seen |= {field for field in fields if not NAMES_A_SECRET.search(field)}
        assert not any(word in field for field in seen for word in ("module", "class", "plugin")), name
    suspicious = {field for field in seen if any(word in field for word in ("path", "file", "dir", "env"))}
    assert suspicious == {"base_path", "relative_tmp_dir", "use_odirect"}


@pytest.mark.parametrize(
    ("types", "roots", "hosts", "says"),
    [
        (["plugin"], [], [], r"l2\.runtime\.types\[0\]: 'plugin' cannot be added while the server runs"),
        (["fs", "sf"], [], [], r"l2\.runtime\.types\[1\]: unknown adapter 'sf'"),
        ([], ["/a", "b"], [], r"l2\.runtime\.roots\[1\]: must be an absolute path without `\.\.`, found 'b'"),
        ([], ["/a/../b"], [], r"l2\.runtime\.roots\[0\]"),
        ([], ["/a\0"], [], r"l2\.runtime\.roots\[0\]"),
        ([], [], ["http://host"], r"l2\.runtime\.hosts\[0\]: must be HOST, HOST:PORT or s3://BUCKET"),
        ([], [], [""], r"l2\.runtime\.hosts\[0\]"),
        ([], [], ["*"], r"l2\.runtime\.hosts\[0\]"),
    ],
)
def test_wrong_rules_stop_the_start(types: list[str], roots: list[str], hosts: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checked_rules(types, roots, hosts)


@pytest.mark.parametrize(
    ("kind", "field", "path"),
    [("fs", "base_path", "/a\0/b"), ("disk", "base_path", "/a\0/b"), ("fs", "relative_tmp_dir", "a\0b")],
)
def test_a_null_byte_does_not_end_a_path_of_the_settings_either(kind: str, field: str, path: str) -> None:
    entry = {"type": kind, "base_path": "/a", "capacity_gb": 1, field: path}
    with pytest.raises(ConfigError, match=rf"l2_adapters\[0\]\.{field}: "):
        configure_tier(entry, 0)
