"""`--l2-adapter` entries: what they make, and what is said about wrong ones."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError
from kvstrata.p2p.medium import peer_tier
from kvstrata.p2p.settings import PeerSettings
from kvstrata.patience import patience
from kvstrata.tiers.codec import ChainSettings
from kvstrata.tiers.config import GROUP, StorePolicy, TierConfig, configure_tier, make_adapter
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.fs import FsAdapter
from kvstrata.tiers.tier import Tier, limits_of

FS = {"type": "fs", "base_path": "/data/kv"}


def arguments_of(config: TierConfig) -> dict[str, Any]:
    """The keyword arguments with which the adapter will be made."""
    assert isinstance(config.make, functools.partial)
    return config.make.keywords


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
    config = configure_tier(entry, 0)
    assert arguments_of(config) == {
        "relative_tmp_dir": "work/tmp",
        "shared": False,
        "use_odirect": False,
        "capacity_bytes": 3 << 29,
        "min_free_bytes": 1 << 28,
        "num_workers": 7,
        "per_op_workers": {Lane.LOOKUP: 1, Lane.LOAD: 2, Lane.PUT: 3, Lane.DELETE: 4},
        "name": "fs_native-0",
    }
    assert isinstance(config.make(), FsAdapter)
    assert config.common.policy is StorePolicy.SECOND_TOUCH
    assert (config.common.deadline_ms, config.common.max_stuck_mb) == (250, 64)


def test_fields_without_effect_are_accepted_with_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    entry = {**FS, "read_ahead_size": 1024, "eviction": {"eviction_policy": "LRU"}, "shared": False}
    entry |= {"num_read_workers": 8, "read_max_bytes_in_flight": 1 << 30}
    make_adapter(entry, 0)
    noted = [r.getMessage() for r in caplog.records if "has no effect here" in r.getMessage()]
    assert [line.split(":")[0] for line in noted] == [
        "l2_adapters[0].eviction",
        "l2_adapters[0].read_ahead_size",
        "l2_adapters[0].num_read_workers",
        "l2_adapters[0].read_max_bytes_in_flight",
    ]


def test_a_key_file_is_private_long_enough_and_never_quoted(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    entry = {**FS, "codec": ["zstd", {"name": "aes-gcm", "key_file": str(key_file)}]}
    key_file.write_text("a secret of 20 chars")
    with pytest.raises(ConfigError, match=r"codec\[1\]\.key_file: .*can be read by others"):
        configure_tier(entry, 0)
    key_file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"must hold one word"):
        configure_tier(entry, 0)
    key_file.write_text("a-secret-of-24-letters-x")
    with pytest.raises(
        ConfigError, match=r"a key must have at least 32; make one with openssl rand -hex 32"
    ) as raised:
        configure_tier(entry, 0)
    assert "secret" not in str(raised.value)
    key_file.write_text("0123456789abcdef" * 4 + "\n")
    config = configure_tier(entry, 0)
    assert config.chain.master_key == b"0123456789abcdef" * 4
    assert config.chain.zstd is not None


@pytest.mark.parametrize("name", ["aes-gcm", "mac"])
def test_the_first_of_several_key_files_writes(tmp_path: Path, name: str) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"key{number}")
        files[-1].touch(0o600)
        files[-1].write_text(f"{number}" * 32)

    def chain(**options: object) -> ChainSettings:
        return configure_tier({**FS, "codec": [{"name": name, **options}]}, 0).chain

    read = chain(key_files=[str(file) for file in files])
    assert read.keys == (b"0" * 32, b"1" * 32, b"2" * 32)
    assert (read.master_key, read.mac_key) == ((b"0" * 32, b"") if name == "aes-gcm" else (b"", b"0" * 32))
    files[2].write_text("0" * 32)
    path = r"\.codec\[0\]\."
    for options, wrong in (
        ({"key_files": [str(files[0])] * 9}, rf"{path}key_files: must be a list of 1 to 8 paths"),
        ({"key_files": ["/no/such"]}, rf"{path}key_files\[0\]: /no/such: cannot be read"),
        ({"key_files": [str(files[0]), str(files[2])]}, rf"{path}key_files: two files hold the same key"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            chain(**options)


@pytest.mark.parametrize(
    ("codec", "package"), [("zstd", "zstandard"), ("aes-gcm", "cryptography"), ("mac", "cryptography")]
)
def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch, codec, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    wanted = rf"codec\[0\]: '{codec}' needs the Python package '{package}'.*pip install '\.\[codecs\]'"
    with pytest.raises(ConfigError, match=wanted):
        configure_tier({**FS, "codec": [codec]}, 0)


@pytest.mark.parametrize(
    ("more", "kill_s"), [({}, patience(15.0)), ({"deadline_ms": 200}, 0.6), ({"host_kill_ms": 70}, 0.07)]
)
def test_an_isolated_adapter_is_not_made_here(more: dict[str, int], kill_s: float) -> None:
    entry = {"type": "plugin", "module_path": "no.such", "class_name": "X", "isolation": "process", **more}
    config = configure_tier(entry, 1)
    tier = Tier(config, limits_of(config, 1 << 30), SystemClock())
    assert isinstance(tier.host, HostedAdapter)
    assert tier.host.kill_s == kill_s
    assert tier.document()["host"] == {"pid": 0, "state": "closed", "restarts": 0, "requests": 0}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(3)", "cannot be made: SystemExit: 3"),
        ("import os; os.fork(); raise ValueError('no')", "cannot be made: ValueError: no"),
        ("import os; os.fork(); raise SystemExit(3)", "cannot be made: SystemExit: 3"),
        ("import os; os.fork(); print('hello')", "made a int"),
    ],
)
def test_a_plugin_that_exits_forks_or_prints_is_an_error_of_its_own(tmp_path, monkeypatch, capfd, code, says):
    name = f"plugin_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"{code}\nMade = int\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours = os.getpid()
    with pytest.raises(ConfigError, match=says):
        make_adapter({"type": "plugin", "module_path": name, "class_name": "Made"}, 0)
    if os.getpid() != ours:
        os._exit(7)  # a child of the plugin that runs on
    if "fork" in code:
        assert os.waitpid(-1, 0)[1] == 0
    assert capfd.readouterr().out == ""


def test_two_plugins_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [point("twice", "from_fields"), point("twice", "other"), point("once", "other")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match=r"'twice' names two plugins, .*from_fields and .*other; uninstall"):
        configure_tier({"type": "twice"}, 0)
    assert configure_tier({"type": "once"}, 0).name == "once-0"


def point(name: str, attribute: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, f"{__name__}:{attribute}", GROUP)


def test_a_reader_of_peers_is_made_by_the_server_alone() -> None:
    entry = {"type": "peer", "controller": "tcp://127.0.0.1:8400"}
    with pytest.raises(ConfigError, match=r"l2_adapters\[0\].type: 'peer' .*controller.url"):
        configure_tier(entry, 0)
    config = peer_tier(PeerSettings(("tcp://127.0.0.1:8400",), "tcp"), 3)
    assert (config.name, config.isolated, config.common.deadline_ms) == ("peer-3", False, 12_000)
    assert peer_tier(PeerSettings(("tcp://127.0.0.1:8400",), "nixl"), 3).isolated
