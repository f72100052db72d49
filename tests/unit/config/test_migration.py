"""Files of LMCache as files of kvstrata: what is translated, that it loads, and that nothing is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.cli.migrate import main
from kvstrata.config import load as loading
from kvstrata.config.lmcache.migration import Migration
from kvstrata.config.lmcache.remote_url import PASSWORD_ENV, NotTranslated, adapter_of
from kvstrata.config.model import ServerSettings
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from kvstrata.storage.entry import configure_tier
from tests.harness.cases import case

THEIRS: dict[str, Any] = json.loads((Path(__file__).parent / "lmcache_0_5_7.json").read_text())
FILE = """
chunk_size: 512
local_cpu: true
max_local_cpu_size: 20
local_disk: "file:///mnt/nvme/"
max_local_disk_size: 100.5
remote_url: "rediss://me:hunter22@cache.example.net:6380/2"
remote_serde: "naive"
save_decode_cache: true
cache_policy: LRU
numa_mode: auto
use_layerwise: true
enable_controller: true
controller_pull_url: "10.0.0.1:8300"
controller_reply_url: "10.0.0.1:8400"
enable_p2p: true
p2p_host: 10.0.0.2
p2p_init_ports: [8200, 8201]
p2p_lookup_ports: [8250, 8251]
transfer_channel: nixl
lmcache_instance_id: left
mp_port: 6000
"""
TRANSLATED = """
chunk_size: 512
port: 6000
instance_id: left
save_decode_cache: true
l1: {size_gb: 20, eviction_policy: LRU}
controller: {url: "tcp://10.0.0.1:8400"}
p2p: {listen: "10.0.0.2:8200"}
l2_adapters:
  - {type: disk, base_path: /mnt/nvme/kvstrata, capacity_gb: 100.5}
  - type: resp
    host: cache.example.net
    port: 6380
    database_id: 2
    tls_enable: true
    username: me
    password_env: KVSTRATA_REMOTE_PASSWORD
"""


def migrated(text: str) -> tuple[dict[str, Any], Migration]:
    migration = Migration(yaml.safe_load(text))
    values = yaml.safe_load(migration.text("x.yaml"))
    if not values["l2_adapters"]:
        del values["l2_adapters"]
    return values, migration


def test_a_whole_file_means_the_same_here():
    values, migration = migrated(FILE)
    assert values == yaml.safe_load(TRANSLATED)
    assert migration.failed == []


def test_every_line_has_a_comment_and_every_name_is_in_one():
    text = migrated(FILE)[1].text("x.yaml")
    for line in text.splitlines():
        is_section = line.rstrip().endswith(":")
        is_plain = line.startswith("    ") and line.split(":")[0].strip() in (
            "host", "port", "database_id", "tls_enable", "username",
        )  # fmt: skip
        assert "#" in line or is_section or is_plain, line
    for name in yaml.safe_load(FILE):
        assert name in text, name


def test_no_password_is_printed():
    text = migrated(FILE)[1].text("x.yaml")
    assert "hunter22" not in text
    text = migrated(
        "{remote_url: 'valkey://h:1', extra_config: {valkey_username: u, valkey_password: hunter22}}"
    )[1]
    assert "hunter22" not in text.text("x.yaml")


def test_the_result_serves_server_and_engine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(PASSWORD_ENV, "hunter22")
    theirs, ours = tmp_path / "lmcache.yaml", tmp_path / "kvstrata.yaml"
    theirs.write_text(FILE)
    assert main([str(theirs)]) == 0
    ours.write_text(capsys.readouterr().out)
    server = loading.load(ServerSettings, file=ours)
    assert (server.l1.size_gb, server.controller.url) == (20, "tcp://10.0.0.1:8400")
    engine, notes = load_settings({}, {"KVSTRATA_CONFIG_FILE": str(ours)})
    assert (engine.port, engine.chunk_size, engine.save_decode_cache, notes) == (6000, 512, True, [])
    for number, entry in enumerate(server.l2_adapters or []):
        configure_tier(entry, number)


@pytest.mark.parametrize(
    ("url", "extra", "entry"),
    [
        ("redis://h", {}, {"type": "resp", "host": "h", "port": 6379}),
        ("redis://:hunter22@h:1", {}, {"type": "resp", "host": "h", "port": 1, "password_env": PASSWORD_ENV}),
        ("resp://h:1", {}, {"type": "resp", "host": "h", "port": 1}),
        (
            "valkey://h:1",
            {"valkey_mode": "cluster", "tls_enable": "True"},
            {"type": "resp", "startup_nodes": ["h:1"], "cluster_mode": True, "tls_enable": True},
        ),
        ("valkey://h:1", {"valkey_database": 3}, {"type": "resp", "host": "h", "port": 1, "database_id": 3}),
        (
            "redis-sentinel://a:1,b:2",
            {},
            {"type": "resp", "sentinels": ["a:1", "b:2"], "sentinel_master": "mymaster"},
        ),
        (
            "redis-cluster://u:hunter22@a:1,b:2",
            {},
            {
                "type": "resp",
                "startup_nodes": ["a:1", "b:2"],
                "cluster_mode": True,
                "username": "u",
                "password_env": PASSWORD_ENV,
            },
        ),
        (
            "mooncakestore://m:50051/",
            {"local_hostname": "n1", "metadata_server": "http://m:8080/metadata", "protocol": "rdma"},
            {
                "type": "mooncake_store",
                "local_hostname": "n1",
                "metadata_server": "http://m:8080/metadata",
                "master_server_addr": "m:50051",
                "protocol": "rdma",
            },
        ),
        ("fs://h:1/mnt/kv/", {}, {"type": "fs", "base_path": "/mnt/kv/kvstrata", "shared": True}),
        (
            "s3://kv.s3.us-west-2.amazonaws.com",
            {},
            {"type": "object_store", "url": "s3://kv/kvstrata", "region": "us-west-2"},
        ),
        (
            "azure://kv",
            {"azure_account_url": "https://acme.blob.core.windows.net"},
            {"type": "object_store", "url": "az://kv/kvstrata", "account_name": "acme"},
        ),
    ],
)
def test_a_remote_url_becomes_an_adapter_that_can_be_configured(url, extra, entry, monkeypatch):
    monkeypatch.setenv(PASSWORD_ENV, "hunter22")
    fields = {one.name: one.value for one in adapter_of(url, extra)}
    assert fields == entry
    configure_tier(fields, 0)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("lm://h:65432", "docs/cluster.md"),
        ("infinistore://h:1", "InfiniStore"),
        ("blackhole://", "stores nothing"),
        ("eic://h:1", "no adapter for eic"),
        ("s3://minio.example.net", '"endpoint"'),
        ("azure://kv", "account_name"),
        ("redis://", "names no host"),
        ("redis://h:x", "65535"),
        ("host:1", "no URL"),
    ],
)
def test_a_remote_url_without_a_counterpart_says_what_to_do(url, says):
    with pytest.raises(NotTranslated, match=says.replace('"', ".")):
        adapter_of(url, {})


@pytest.mark.parametrize(
    ("text", "failed", "says"),
    [
        ("enable_pd: true", ["enable_pd"], "MultiConnector takes NixlConnector"),
        ("enable_pd: false", [], "enable_pd: no effect"),
        ("chunk_sise: 1", ["chunk_sise"], "unknown key (did you mean 'chunk_size'?)"),
        (
            "chunk_size: many",
            ["chunk_size"],
            "chunk_size must be a whole number from 1 to 65536, found 'many'",
        ),
        ("lookup_timeout_ms: 100000", ["lookup_timeout_ms"], "must be a whole number from 1 to 60000"),
        ("cache_policy: LFU", ["cache_policy"], "'LFU' is none of LRU, ARC"),
        ("remote_serde: cachegen", ["remote_serde"], "zstd (lossless)"),
        ("remote_serde: naive", [], "remote_serde: records are stored as they are"),
        ("numa_mode: manual", ["numa_mode"], "l1.numa"),
        ("enable_p2p: true", ["enable_p2p"], "controller.url"),
        ("enable_controller: true", ["enable_controller"], "tcp://HOST:8400"),
        ("local_cpu: false", [], "cannot be turned off"),
        ("local_disk: /x", [], "LMCache uses no disk unless"),
        ("max_local_disk_size: 5", [], "LMCache uses no disk unless"),
        ("{local_disk: /x, max_local_disk_size: -1}", ["max_local_disk_size"], "above 0"),
        ("remote_url: lm://h:1", ["remote_url"], "docs/cluster.md"),
        ("storage_plugins: [a]", ["storage_plugins"], "type plugin"),
        ("mp_host: tcp://10.0.0.1", [], "server of their own host"),
        ("extra_config: {a: 1}", [], "extra_config.a: no effect"),
        ("extra_config: [a]", ["extra_config"], "must be an object"),
        ("local_disk: true", ["local_disk"], "must be a path"),
        ("numa_mode: auto", [], "the kernel places L1"),
        (
            "remote_storage_plugins: [mine]",
            ["remote_storage_plugins"],
            "mine: classes for LMCache do not fit",
        ),
        ("pd_role: sender", [], "pd_role: no effect"),
    ],
)
def test_what_has_no_counterpart_is_a_comment(text, failed, says):
    values, migration = migrated(text)
    assert values == {} and migration.failed == failed
    assert any(says in remark for remark in migration.remarks), migration.remarks


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            "{enable_controller: true, controller_pull_url: 'h:8300', enable_p2p: false}",
            {"controller": {"url": "tcp://h:8400"}, "p2p": {"engine": "off"}},
        ),
        (
            "{numa_mode: manual, extra_config: {gpu_to_numa_mapping: {0: 1, 1: 0, 2: 1}}}",
            {"l1": {"numa": "0,1"}},
        ),
        ("local_cpu_use_hugepages: true", {"l1": {"use_hugepages": True}}),
        (
            "{local_disk: /x, max_local_disk_size: 0.1}",
            {"l2_adapters": [{"type": "fs", "base_path": "/x/kvstrata", "capacity_gb": 0.1}]},
        ),
    ],
)
def test_single_names_mean_the_same_here(text, values):
    found, migration = migrated(text)
    assert found == values and migration.failed == []


@pytest.mark.parametrize("value", [None, True, 1, "text", [1], {"a": 1}])
def test_no_name_is_lost_and_whatever_comes_out_loads(value, tmp_path):
    ours = tmp_path / "ours.yaml"
    for name in THEIRS["file_keys"]:
        with case(name):
            values, migration = migrated(json.dumps({name: value}))
            assert name in migration.text("x.yaml")
            assert name not in migration.failed or values == {}
            ours.write_text(migration.text("x.yaml"))
            loading.load(ServerSettings, file=ours)
            load_settings({}, {"KVSTRATA_CONFIG_FILE": str(ours)})


def test_a_file_that_cannot_be_read_does_not_hide_the_others(tmp_path, capsys):
    good = tmp_path / "a.yaml"
    good.write_text("chunk_size: 64\n")
    assert main([str(tmp_path / "none.yaml"), str(good)]) == 2
    out = capsys.readouterr()
    assert "none.yaml: cannot be read" in out.err and "chunk_size: 64" in out.out
    good.write_text("just words\n")
    assert main([str(good)]) == 2
    assert "must be a mapping of setting names" in capsys.readouterr().err


# -- files with the shapes of published ones

SHAPES = Path(__file__).parents[2] / "data" / "lmcache"


@pytest.mark.parametrize(
    "names",
    [
        *([file.name] for file in sorted(SHAPES.iterdir()) if file.is_file()),
        ["two_disks.yaml", "start.sh"],
    ],
    ids="+".join,
)
def test_what_becomes_of_users_own_files(names, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(SHAPES)
    monkeypatch.setenv(PASSWORD_ENV, "hunter22")
    status = main(names)
    printed = capsys.readouterr()
    golden = SHAPES / "golden" / f"{'+'.join(names)}.yaml"
    assert f"# exit status {status}\n{printed.out}" == golden.read_text()
    assert "hunter22" not in printed.out and (status == 1) == ("not translated" in printed.err)
    ours = tmp_path / "kvstrata.yaml"
    ours.write_text(printed.out)
    server = loading.load(ServerSettings, file=ours)
    for number, entry in enumerate(server.l2_adapters):
        configure_tier(entry, number)
    engine, notes = load_settings({}, {"KVSTRATA_CONFIG_FILE": str(ours)})
    assert notes == [] and engine.chunk_size == yaml.safe_load(printed.out).get("chunk_size", 256)


@pytest.mark.parametrize("file", sorted(SHAPES.glob("*.yaml")), ids=lambda file: file.name)
def test_no_file_of_theirs_stops_an_engine(file):
    values = list(yaml.safe_load_all(file.read_text()))
    if len(values) > 1 or "services" in values[0]:
        return  # no engine reads it
    settings, notes = load_settings({}, {"LMCACHE_CONFIG_FILE": str(file)})
    assert settings.chunk_size == int(values[0].get("chunk_size", 256))
    assert not any("unknown" in note for note in notes)


def test_variables_mean_what_lmcache_takes_them_for():
    environment = dict(
        line.split("=", 1) for line in (SHAPES / "quoted.env").read_text().splitlines() if "=" in line
    )
    settings, notes = load_settings({}, environment)
    assert (settings.chunk_size, settings.save_decode_cache) == (128, True)
    assert not any("REMOTE_URL" in note for note in notes), "an empty variable is not set"
    for text, meant in (("0", False), ("False", False), ("'true'", True), ("", False)):
        assert load_settings({}, {"LMCACHE_SAVE_DECODE_CACHE": text})[0].save_decode_cache is meant
    with pytest.raises(ConfigError, match="must be true or false, found 'yes'"):
        load_settings({}, {"LMCACHE_SAVE_DECODE_CACHE": "yes"})


def test_only_a_file_for_lmcache_may_have_names_that_nobody_knows(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("chunk_sice: 1\n")
    _, notes = load_settings({}, {"LMCACHE_CONFIG_FILE": str(file)})
    assert notes == [f"{file}: chunk_sice has no effect: unknown key (did you mean 'chunk_size'?)"]
    with pytest.raises(ConfigError, match="chunk_sice: unknown key"):
        load_settings({}, {"KVSTRATA_CONFIG_FILE": str(file)})
