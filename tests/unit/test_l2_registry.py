"""`--l2-adapter` entries: what they make, and what is said about wrong ones."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError
from kvstrata.policy.store import StorePolicy
from kvstrata.storage import registry
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.lanes import Lane
from kvstrata.storage.media.fs.adapter import FsAdapter
from kvstrata.storage.wrap.codec_chain import ChainSettings, ZstdOptions
from kvstrata.testing.faulty_adapter import FaultyAdapter

FS = {"type": "fs", "base_path": "/data/kv"}
DISK = {"type": "disk", "base_path": "/nowhere/log", "capacity_gb": 1}


def test_the_least_entry_makes_an_fs_adapter_with_defaults() -> None:
    adapter = registry.make_adapter(json.dumps(FS), 0)
    assert isinstance(adapter, FsAdapter)
    assert adapter.settings.base_path == "/data/kv"
    assert adapter.settings.num_workers == 4
    assert adapter.settings.capacity_bytes == 0
    config = registry.configure_adapter(FS, 3)
    assert (config.name, config.policy, config.deadline_ms) == ("fs-3", StorePolicy.THROUGH, None)


def test_every_field_of_fs_and_its_older_name_is_read() -> None:
    entry = {
        "type": "fs_native",
        "base_path": "/data/kv",
        "relative_tmp_dir": "work/tmp",
        "use_odirect": False,
        "max_capacity_gb": 1.5,
        "min_free_gb": 0.25,
        "num_workers": 7,
        "per_op_workers": {"lookup": 1, "retrieve": 2, "store": 3, "delete": 4},
        "policy": "second_touch",
        "deadline_ms": 250,
        "max_stuck_mb": 64,
    }
    config = registry.configure_adapter(entry, 0)
    adapter = config.make()
    assert isinstance(adapter, FsAdapter)
    settings = adapter.settings
    assert settings.relative_tmp_dir == "work/tmp"
    assert not settings.use_odirect
    assert settings.capacity_bytes == 3 << 29
    assert settings.min_free_bytes == 1 << 28
    assert settings.num_workers == 7
    assert settings.per_op_workers == {Lane.LOOKUP: 1, Lane.LOAD: 2, Lane.PUT: 3, Lane.DELETE: 4}
    assert config.policy is StorePolicy.SECOND_TOUCH
    assert (config.deadline_ms, config.max_stuck_bytes) == (250, 64 << 20)


def test_fields_without_effect_are_accepted_with_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    entry = {**FS, "read_ahead_size": 1024, "eviction": {"eviction_policy": "LRU"}, "shared": False}
    registry.make_adapter(entry, 0)
    noted = [r.getMessage() for r in caplog.records if "noted" in r.getMessage()]
    assert [line.split(":")[0] for line in noted] == [
        "l2_adapters[0].eviction",
        "l2_adapters[0].read_ahead_size",
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{oops", r"l2_adapters\[2\]: not JSON"),
        ("[1]", r"l2_adapters\[2\]: must be an object"),
        ({}, r"l2_adapters\[2\]\.type: must be a non-empty string, found None"),
        ({"type": 5}, r"l2_adapters\[2\]\.type: must be a non-empty string, found 5"),
        (
            {"type": "moncake"},
            r"l2_adapters\[2\]\.type: unknown adapter 'moncake' \(did you mean 'mooncake_store'\?\)",
        ),
        ({"type": "fss"}, r"unknown adapter 'fss' \(did you mean 'fs'\?\)"),
        ({"type": "zzzzzzzz"}, r"unknown adapter 'zzzzzzzz'; there are disk, fault_inject, fs, fs_native, mooncake_"),
        ({"type": "hf3fs"}, r"'hf3fs' is not part of this version; a plugin can provide it"),
        ({"type": "fs"}, r"l2_adapters\[2\]\.base_path: must be a non-empty string, found None"),
        ({**FS, "base_path": "~nobody-of-that-name/kv"}, r"\.base_path: must be an absolute path"),
        ({**FS, "base_pth": "/x"}, r"l2_adapters\[2\]\.base_pth: unknown field \(did you mean 'base_path'\?\)"),
        ({**FS, "num_workers": "four"}, r"\.num_workers: must be a whole number from 1 to 256, found 'four'"),
        ({**FS, "num_workers": 0}, r"\.num_workers: must be a whole number from 1 to 256, found 0"),
        ({**FS, "num_workers": True}, r"\.num_workers: must be a whole number from 1 to 256, found True"),
        ({**FS, "num_workers": 2.5}, r"\.num_workers: must be a whole number from 1 to 256, found 2\.5"),
        ({**FS, "capacity_gb": -1}, r"\.capacity_gb: must be a number from 0"),
        ({**FS, "capacity_gb": 1, "max_capacity_gb": 2}, r"\.max_capacity_gb: is another name of capacity_gb"),
        ({**FS, "use_odirect": "yes"}, r"\.use_odirect: must be true or false, found 'yes'"),
        ({**FS, "policy": "thrugh"}, r"\.policy: must be one of .*did you mean 'through'"),
        ({**FS, "policy": 3}, r"\.policy: must be one of through, on_evict, second_touch, found 3"),
        ({**FS, "per_op_workers": [1]}, r"\.per_op_workers: must be an object with some of"),
        (
            {**FS, "per_op_workers": {"retreive": 1}},
            r"\.per_op_workers\.retreive: unknown field \(did you mean 'retrieve'",
        ),
        ({**FS, "per_op_workers": {"store": 0}}, r"\.per_op_workers\.store: must be a whole number"),
        ({**FS, "relative_tmp_dir": "/tmp"}, r"\.relative_tmp_dir: must be a plain path below base_path"),
        ({**FS, "relative_tmp_dir": "../x"}, r"\.relative_tmp_dir: must be a plain path below base_path"),
        ({**FS, "relative_tmp_dir": "ab"}, r"\.relative_tmp_dir: must not be two hex digits"),
        ({**FS, "deadline_ms": 0}, r"\.deadline_ms: must be a whole number from 1"),
        ({**FS, "isolation": "thread"}, r"\.isolation: must be one of in_process, process"),
        ({**FS, "host_kill_ms": 500}, r"\.host_kill_ms: 500 is not supported: only an adapter with"),
        ({**FS, "isolation": "process", "host_kill_ms": 5}, r"\.host_kill_ms: must be a whole number from 10"),
        ({**FS, "isolation": "process", "base_pth": "/x"}, r"l2_adapters\[2\]\.base_pth: unknown field"),
        (
            {"type": "fault_inject", "inner": {**FS, "isolation": "process"}},
            r"\.inner\.isolation: 'process' is not supported: give it beside the type fault_inject",
        ),
        ({**FS, "shared": 1}, r"\.shared: must be true or false"),
        (
            {"type": "disk", "base_path": "/x", "capacity_gb": 1, "shared": True},
            r"\.shared: True is not supported: only a directory of type fs can be shared",
        ),
        ({**FS, "serde": {"type": "fp8"}}, r"\.serde: .* is not supported: it was replaced by codec; write"),
        ({**FS, "codec": 5}, r"\[2\]\.codec: must be the name of a codec or an object with a \"name\", found 5"),
        ({**FS, "codec": [["zstd"]]}, r"\.codec\[0\]: must be the name of a codec or an object"),
        ({**FS, "codec": ["zst"]}, r"\.codec\[0\]: unknown codec 'zst' \(did you mean 'zstd'\?\)"),
        ({**FS, "codec": ["zstd", "zstd"]}, r"\.codec\[1\]: 'zstd' cannot come after 'zstd'; the order is"),
        ({**FS, "codec": [{"name": "zstd", "level": "high"}]}, r"\.codec\[0\]\.level: must be a whole number from"),
        ({**FS, "codec": [{"name": "zstd", "planes": 3}]}, r"\.codec\[0\]\.planes: must be a whole number from 1"),
        (
            {**FS, "codec": {"name": "zstd", "lvel": 3}},
            r"\[2\]\.codec\.lvel: unknown field \(did you mean 'level'\?\)",
        ),
        ({**FS, "codec": ["aes-gcm"]}, r"\.codec\[0\]\.key_file: must be the path of a file with the key, found None"),
        (
            {**FS, "codec": [{"name": "aes-gcm", "key_file": "/no/such/file"}]},
            r"\.codec\[0\]\.key_file: /no/such/file: cannot be read",
        ),
        ({**FS, "codec": ["zstd", "fp8"]}, r"\.codec\[1\]: 'fp8' cannot come after 'zstd'; the order is fp8, zstd"),
        ({**FS, "codec_staging_mb": 0}, r"\.codec_staging_mb: must be a number from 1"),
        ({**FS, "codec_workers": 0}, r"\.codec_workers: must be a whole number from 1 to 64"),
        ({"type": "disk", "capacity_gb": 1}, r"\.base_path: must be a non-empty string"),
        ({"type": "disk", "base_path": "/x"}, r"\.capacity_gb: must be a number of GB, .*, found None"),
        ({**DISK, "capacity_gb": 0}, r"\.capacity_gb: must be a number from 0\.0"),
        ({**DISK, "segment_mb": 100}, r"\.segment_mb: must be at most a sixteenth of capacity_gb, 64 MB, found 100"),
        ({**DISK, "reinsert_percent": 60}, r"\.reinsert_percent: must be a whole number from 0 to 50"),
        ({**DISK, "scrub_mb_s": "fast"}, r"\.scrub_mb_s: must be a number from 0"),
        ({**DISK, "relative_tmp_dir": "tmp"}, r"\.relative_tmp_dir: unknown field"),
        ({**DISK, "use_odirct": True}, r"\.use_odirct: unknown field \(did you mean 'use_odirect'\?\)"),
        ({"type": "fault_inject"}, r"\.inner: must be the object of the adapter"),
        ({"type": "fault_inject", "inner": {"type": "fss"}}, r"\.inner\.type: unknown adapter 'fss'"),
        ({"type": "fault_inject", "inner": FS, "faults": ["bang"]}, r"\.faults: must be a list with some of"),
        ({"type": "plugin", "module_path": "m"}, r"\.class_name: must be a non-empty string"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named_with_its_field_value_and_remedy(entry: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.configure_adapter(entry, 2)


def test_base_path_may_be_relative_or_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    adapter = registry.make_adapter({**FS, "base_path": "~/kv"}, 0)
    assert isinstance(adapter, FsAdapter)
    assert adapter.settings.base_path == "/home/someone/kv"


def test_a_built_adapter_is_measured_and_guarded() -> None:
    config = registry.configure_adapter({**FS, "policy": "on_evict"}, 1)
    built = registry.build_adapter(config, clock=SystemClock(), l1_bytes=1 << 30, report=lambda report: None)
    assert built.name == built.adapter.name == "fs-1"
    assert built.policy is StorePolicy.ON_EVICT
    assert built.guard.limits.max_stuck_bytes == 1 << 26
    assert built.guard.limits.deadline_ms == 5_000
    assert built.codec is built.guard.inner
    assert not built.codec.chain.encodes


def test_a_codec_goes_between_the_adapter_and_its_deadline() -> None:
    config = registry.configure_adapter({**FS, "codec": [{"name": "zstd", "level": 3, "planes": 1}]}, 0)
    built = registry.build_adapter(config, clock=SystemClock(), l1_bytes=1 << 30, report=lambda report: None)
    assert built.codec is not None
    assert built.codec.chain.settings == ChainSettings(zstd=ZstdOptions(level=3, planes=1))
    assert isinstance(built.codec.inner, FsAdapter)
    assert registry.configure_adapter({**FS, "codec": "zstd"}, 0).codec.chain.zstd == ZstdOptions()


def test_a_key_file_is_private_long_enough_and_never_quoted(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    entry = {**FS, "codec": ["zstd", {"name": "aes-gcm", "key_file": str(key_file)}]}
    key_file.write_text("a secret of 20 chars")
    with pytest.raises(ConfigError, match=r"codec\[1\]\.key_file: .*can be read by others"):
        registry.configure_adapter(entry, 0)
    key_file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"holds several words"):
        registry.configure_adapter(entry, 0)
    key_file.write_text("a-secret-of-24-letters-x")
    with pytest.raises(
        ConfigError, match=r"a key has at least 32; make one with openssl rand -hex 32"
    ) as raised:
        registry.configure_adapter(entry, 0)
    assert "secret" not in str(raised.value)
    key_file.write_text("0123456789abcdef" * 4 + "\n")
    config = registry.configure_adapter(entry, 0)
    assert config.codec.chain.master_key == b"0123456789abcdef" * 4
    assert config.codec.chain.zstd is not None


@pytest.mark.parametrize(("codec", "package"), [("zstd", "zstandard"), ("aes-gcm", "cryptography")])
def test_a_missing_library_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, codec: str, package: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    wanted = rf"codec\[0\]: '{codec}' needs the Python package '{package}'.*pip install 'kvstrata\[codecs\]'"
    with pytest.raises(ConfigError, match=wanted):
        registry.configure_adapter({**FS, "codec": [codec]}, 0)


@pytest.mark.parametrize(
    ("more", "kill_s"), [({}, 15.0), ({"deadline_ms": 200}, 0.6), ({"host_kill_ms": 70}, 0.07)]
)
def test_an_isolated_adapter_is_not_made_here(more: dict[str, int], kill_s: float) -> None:
    entry = {"type": "plugin", "module_path": "no.such", "class_name": "X", "isolation": "process", **more}
    config = registry.configure_adapter(entry, 1)
    built = registry.build_adapter(config, clock=SystemClock(), l1_bytes=1 << 30, report=lambda report: None)
    assert isinstance(built.host, HostedAdapter)
    assert built.host._kill_s == kill_s
    assert built.status()["host"] == {"pid": 0, "state": "closed", "restarts": 0, "requests": 0}


def test_faults_can_be_injected_into_any_adapter() -> None:
    adapter = registry.make_adapter({"type": "fault_inject", "inner": FS, "rate": 0.5, "seed": 7}, 0)
    assert isinstance(adapter, FaultyAdapter)
    assert (adapter.plan.seed, adapter.plan.rate) == (7, 0.5)
    assert isinstance(adapter.inner, FsAdapter)


def test_faults_are_refused_without_the_test_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[test\]'"):
        registry.make_adapter({"type": "fault_inject", "inner": FS}, 0)


def test_a_class_of_another_package_is_an_adapter() -> None:
    entry = {
        "type": "plugin",
        "module_path": "tests.unit.test_l2_deadline",
        "class_name": "Scripted",
        "adapter_params": {},
    }
    assert registry.make_adapter(entry, 0).name == "scripted-0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module_path": "no.such.module"}, "No module named"),
        ({"class_name": "NoSuchClass"}, "AttributeError"),
        ({"adapter_params": {"x": 1}}, "TypeError"),
        ({"class_name": "HandClock"}, "no StorageAdapter"),
    ],
)
def test_a_plugin_that_cannot_be_made_stops_the_start(change: dict[str, object], message: str) -> None:
    entry = {
        "type": "plugin",
        "module_path": "tests.unit.test_l2_deadline",
        "class_name": "Scripted",
        **change,
    }
    with pytest.raises(ConfigError, match=rf"l2_adapters\[0\]: .*{message}"):
        registry.make_adapter(entry, 0)


def test_an_installed_package_adds_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def factory(fields: dict[str, object], path: str) -> FsAdapter:
        seen.append((fields, path))
        return registry._fs(registry.Fields({"type": "fs", **fields}, path), "x")()

    class Point:
        name, value = "hf3fs", "package:factory"

        def load(self):
            return factory

    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [Point()])
    adapter = registry.make_adapter({"type": "hf3fs", "base_path": "/data/kv", "deadline_ms": 9}, 4)
    assert isinstance(adapter, FsAdapter)
    assert seen == [({"base_path": "/data/kv"}, "l2_adapters[4]")]


def test_a_reader_of_peers_is_made_by_the_server_alone() -> None:
    entry = {"type": "peer", "controller": "tcp://127.0.0.1:8400"}
    with pytest.raises(ConfigError, match=r"l2_adapters\[0\].type: 'peer' .*controller.url"):
        registry.configure_adapter(entry, 0)
    assert registry.configure_adapter(entry, 0, by_server=True).name == "peer-0"
    with pytest.raises(ConfigError, match="controller"):
        registry.configure_adapter({"type": "peer"}, 0, by_server=True)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"capacity_gb": float("inf")}, "capacity_gb"),
        ({"base_path": "\ud800"}, "base_path"),
        ({"codec": [{"name": "zstd", "level": float("nan")}]}, r"codec\[0\].level"),
    ],
)
def test_numbers_and_text_that_no_setting_means_are_refused_by_name(
    fields: dict[str, object], where: str
) -> None:
    with pytest.raises(ConfigError, match=rf"l2_adapters\[0\].{where}: must be") as caught:
        registry.configure_adapter({"type": "disk", "base_path": "/nowhere", **fields}, 0)
    caught.value.message.encode()


def test_faults_that_are_no_words_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="faults: must be a list"):
        registry.configure_adapter(
            {"type": "fault_inject", "inner": {"type": "fs", "base_path": "/x"}, "faults": [[1]]}, 0
        )
