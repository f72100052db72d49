"""LMCache's names on our command lines, in files and variables, and its files as ours.

lmcache_0_5_7.json has the names and defaults as they were read from LMCache itself; the tables are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.config import load as loading
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.flags import Flags, parse, server_settings
from kvstrata.config.lmcache.fates import find
from kvstrata.config.lmcache.flags import CONTROLLER_FLAGS, FLAG_PREFIXES, SERVER_FLAGS
from kvstrata.config.lmcache.keys import CLIENT_KEY_PREFIXES, CLIENT_KEYS, VARIABLE_PREFIXES, VARIABLES
from kvstrata.config.model import ServerSettings
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from tests.harness.cases import case

THEIRS: dict[str, Any] = json.loads((Path(__file__).parent / "lmcache_0_5_7.json").read_text())
SHAPES = Path(__file__).parents[2] / "data" / "lmcache"
"""Files with the shapes of published ones."""


def loaded(flags: Flags, struct: type = ServerSettings) -> Any:
    return loading.load(struct, flags=flags.settings, flag_names=flags.names, wrong_flags=flags.wrong)


def at(settings: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        settings = getattr(settings, part)
    return settings


# -- flags


def test_no_flag_of_theirs_is_unknown_and_their_defaults_are_no_errors():
    for name, default in THEIRS["server_flags"].items():
        with case(name):
            assert find(name, SERVER_FLAGS, FLAG_PREFIXES)
            if default not in (None, "switch"):
                loaded(parse("lmcache-server", [name, str(default)]))
                loaded(parse("lmcache-server", [f"{name}={default}"]))
    for name in set(THEIRS["controller_flags"]) - {"--config", "--monitor-port"}:
        with case(name):
            assert name in CONTROLLER_FLAGS
            if (default := THEIRS["controller_flags"][name]) is not None:
                loaded(parse("lmcache-controller", [name, str(default)]), ControllerSettings)


@pytest.mark.parametrize(
    ("words", "dotted", "value"),
    [
        (["--p2p-lookup-timeout", "2.5"], "p2p.lookup_timeout_ms", 2500),
        (["--p2p-advertise-url", "10.0.0.1:8500"], "p2p.listen", "10.0.0.1:8500"),
        (["--p2p-advertise-url", "a:1", "--p2p-listen-url", "b:2"], "p2p.listen", "b:2"),
        (["--p2p-transfer-engine", "nixl"], "p2p.engine", "nixl"),
        (["--cpu-buffer-size", "60"], "l1.size_gb", 60),
        (["--l1-use-hugepages", "--no-l1-use-hugepages"], "l1.use_hugepages", False),
        (["--eviction-policy", "lru"], "l1.eviction_policy", "VALUE"),
    ],
)
def test_translated_values_mean_the_same(words, dotted, value):
    assert at(loaded(parse("lmcache-server", [*words, "--log-level", "debug"])), dotted) == value


LINE = ["--l1-size-gb", "3", "--eviction-policy"]
FS = {"type": "fs", "base_path": "/kv/kvstrata"}
NIXL = {"type": "nixl_store", "backend": "POSIX", "pool_size": 8, "backend_params": {"file_path": "/kv/"}}


@pytest.mark.parametrize(
    ("words", "policy", "adapters", "says"),
    [
        ([*LINE, "LRU"], "VALUE", [], ["nothing is kept on disk", "lru is taken as VALUE"]),
        (["--eviction-policy", "ARC"], "VALUE", None, ["arc is taken as VALUE"]),
        (
            [*LINE, "NoOp", "--l2-store-policy=skip_l1", "--l2-adapter", json.dumps(FS)],
            "VALUE",
            [FS],
            ["--l2-store-policy has no effect", "taken as VALUE"],
        ),
        ([*LINE, "noop", "--l2-adapter", json.dumps(FS)], "noop", [FS], []),
        ([*LINE, "IsolatedLRU", "--l2-adapter", json.dumps(FS)], "VALUE", [FS], ["quotas_gb set"]),
        (
            [*LINE, "value", "--l2-adapter", json.dumps(NIXL)],
            "VALUE",
            [FS],
            ["nixl_store with POSIX is taken as fs in /kv/kvstrata, without a cap"],
        ),
    ],
)
def test_a_command_line_means_what_it_meant(words, policy, adapters, says):
    flags, read = server_settings(words, {})
    settings = read()
    assert (settings.l1.eviction_policy, settings.l2_adapters) == (policy, adapters)
    assert len(flags.notes) == len(says) and all(
        any(text in note for note in flags.notes) for text in says
    ), flags.notes


def test_adapters_of_a_file_or_variable_are_kept_beside_the_flags_of_lmcache(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("l2_adapters: [{type: fs, base_path: /x}]\n")
    for words, environment in (
        ([*LINE, "VALUE", "--config", str(file)], {}),
        ([*LINE, "VALUE"], {"KVSTRATA_CONFIG_FILE": str(file)}),
        ([*LINE, "VALUE"], {"KVSTRATA_L2_ADAPTERS": "[{type: fs, base_path: /x}]"}),
    ):
        flags, read = server_settings(words, environment)
        assert read().l2_adapters == [{"type": "fs", "base_path": "/x"}] and flags.notes == []


# -- keys of files, variables, connector settings


def test_a_file_with_all_their_defaults_is_accepted(tmp_path):
    file = tmp_path / "defaults.yaml"
    file.write_text(
        yaml.safe_dump({key: value for key, value in THEIRS["file_keys"].items() if value is not None})
    )
    settings, notes = load_settings({}, {"LMCACHE_CONFIG_FILE": str(file)})
    assert settings == ClientSettings(save_unfull_chunk=False)  # their default
    assert not any("unknown" in note for note in notes)
    assert all(find(key, CLIENT_KEYS, CLIENT_KEY_PREFIXES) for key in THEIRS["file_keys"])


@pytest.mark.parametrize(
    ("extra", "environment", "field", "value"),
    [
        ({"lmcache.mp.port": 7}, {}, "port", 7),
        ({"lmcache.chunk_size": 64}, {}, "chunk_size", 64),
        ({"mp_port": "7"}, {}, "port", 7),
        ({}, {"LMCACHE_CHUNK_SIZE": "'64'"}, "chunk_size", 64),
        ({}, {"LMCACHE_SAVE_DECODE_CACHE": "1"}, "save_decode_cache", True),
        ({}, {"LMCACHE_SAVE_DECODE_CACHE": ""}, "save_decode_cache", False),
    ],
)
def test_a_kept_name_sets_our_setting_from_each_source(extra, environment, field, value):
    settings, notes = load_settings(extra, environment)
    assert getattr(settings, field) == value and notes == []


def test_a_name_without_effect_is_noted_and_changes_nothing():
    for extra, environment in (
        ({"lmcache.mp.heartbeat_interval": 3}, {}),
        ({"enable_blending": True}, {}),
        ({}, {"LMCACHE_MAX_LOCAL_CPU_SIZE": "5"}),
        *(({}, {name: "1"}) for name in THEIRS["variables"] if find(name, VARIABLES, VARIABLE_PREFIXES)),
    ):
        settings, [note] = load_settings(extra, environment)
        assert settings == ClientSettings() and " has no effect: " in note
    with pytest.raises(ConfigError, match="must be true or false, found 'yes'"):
        load_settings({}, {"LMCACHE_SAVE_DECODE_CACHE": "yes"})


def test_only_a_file_for_lmcache_may_have_names_that_nobody_knows_and_words_of_yaml_1_1(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("chunk_sice: 1\nsave_decode_cache: Yes\n")
    settings, notes = load_settings({}, {"LMCACHE_CONFIG_FILE": str(file)})
    assert settings.save_decode_cache is True
    assert notes == [f"{file}: chunk_sice has no effect: unknown key (did you mean 'chunk_size'?)"]
    with pytest.raises(ConfigError, match="chunk_sice: unknown key"):
        load_settings({}, {"KVSTRATA_CONFIG_FILE": str(file)})
    file.write_text("save_decode_cache: Yes\n")
    with pytest.raises(ConfigError, match="must be true or false, found 'Yes'"):
        load_settings({}, {"KVSTRATA_CONFIG_FILE": str(file)})


@pytest.mark.parametrize("file", sorted(SHAPES.glob("*.yaml")), ids=lambda file: file.name)
def test_no_file_of_theirs_stops_an_engine(file):
    values = yaml.safe_load(file.read_text())
    settings, notes = load_settings({}, {"LMCACHE_CONFIG_FILE": str(file)})
    assert settings.chunk_size == int(values.get("chunk_size", 256))
    assert not any("unknown" in note for note in notes)
