"""Every name that LMCache documents or reads, against what really happens to it.

lmcache_0_5_7.json has the names and defaults as they were read from LMCache itself; the tables are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.config import load as loading
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.command_line import server_settings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.flags import Flags, parse_controller_flags, parse_server_flags
from kvstrata.config.lmcache.fates import Fate, Name, find
from kvstrata.config.lmcache.flags import CONTROLLER_FLAGS, FLAG_PREFIXES, SERVER_FLAGS
from kvstrata.config.lmcache.interfaces import COMMANDS, CONTROLLER_PATHS, SERVER_PATHS, path_advice
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    CONNECTOR_EXTRA,
    CONNECTOR_EXTRA_PREFIXES,
    VARIABLE_PREFIXES,
    VARIABLES,
)
from kvstrata.config.lmcache.variables import server_notes
from kvstrata.config.model import ServerSettings
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from tests.harness.cases import case

THEIRS: dict[str, Any] = json.loads((Path(__file__).parent / "lmcache_0_5_7.json").read_text())
VALUES = {
    "--instance-id": "a", "--host": "h", "--http-host": "h", "--eviction-policy": "ARC",
    "--l2-adapter": '{"type": "fs"}', "--eviction-trigger-watermark": "0.5", "--eviction-ratio": "0.5",
    "--p2p-advertise-url": "h:1", "--p2p-listen-url": "h:1", "--p2p-transfer-engine": "nixl",
    "--monitor-ports": '{"pull": 1}',
}  # fmt: skip
"""A value that asks for something, for flags that do not take `7`."""


def loaded(flags: Flags, struct: type = ServerSettings) -> Any:
    return loading.load(struct, flags=flags.settings, flag_names=flags.names, wrong_flags=flags.wrong)


def at(settings: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        settings = getattr(settings, part)
    return settings


# -- flags


def rows(table: Mapping[str, Name], prefixes: Mapping[str, Name]) -> list[tuple[str, Name]]:
    """Every entry, those of prefixes under a name that begins so."""
    return [*table.items(), *((f"{prefix}something", entry) for prefix, entry in prefixes.items())]


COMMANDS_WITH_FLAGS: dict[str, tuple[Any, type, list[tuple[str, Name]]]] = {
    "server": (parse_server_flags, ServerSettings, rows(SERVER_FLAGS, FLAG_PREFIXES)),
    "controller": (parse_controller_flags, ControllerSettings, rows(CONTROLLER_FLAGS, {})),
}


@pytest.mark.parametrize("command", COMMANDS_WITH_FLAGS)
def test_every_flag_does_what_its_row_says(command):
    parse, struct, table = COMMANDS_WITH_FLAGS[command]
    for name, entry in table:
        with case(name):
            check_flag(parse, struct, name, entry)


def check_flag(parse, struct, name, entry):
    defaults = struct()
    is_switch = THEIRS["server_flags"].get(name) == "switch"
    value = VALUES.get(name, "7")
    for words in [[name]] if is_switch else [[name, value], [f"{name}={value}"]]:
        flags = parse([*words, "--log-level", "debug"])
        if entry.fate in (Fate.KEPT, Fate.TRANSLATED):
            settings = loaded(flags, struct)
            is_default = is_switch and name.startswith("--no-")
            assert (at(settings, entry.target) == at(defaults, entry.target)) == is_default
            assert flags.notes == (
                [] if entry.fate is Fate.KEPT else [f"{name} is taken as {entry.target}: {entry.say}"]
            )
        elif entry.fate is Fate.NOTED:
            assert loaded(flags, struct) == struct(log_level="debug")
            assert flags.notes == [f"{name} has no effect: {entry.say}"]
        else:
            with pytest.raises(ConfigError) as caught:
                loaded(flags, struct)
            assert caught.value.message.startswith(f"command line: {name}: {entry.say}")
            assert entry.target in caught.value.message and flags.notes == []
        assert at(flags, "settings")["log_level"] == "debug", "the flag took the next one as its value"


def test_no_flag_of_theirs_is_unknown_and_their_defaults_are_no_errors():
    for name, default in THEIRS["server_flags"].items():
        with case(name):
            assert find(name, SERVER_FLAGS, FLAG_PREFIXES)
            if default not in (None, "switch"):
                loaded(parse_server_flags([name, str(default)]))
                loaded(parse_server_flags([f"{name}={default}"]))
    for name in set(THEIRS["controller_flags"]) - {"--config", "--monitor-port"}:
        with case(name):
            assert name in CONTROLLER_FLAGS
            if (default := THEIRS["controller_flags"][name]) is not None:
                loaded(parse_controller_flags([name, str(default)]), ControllerSettings)


@pytest.mark.parametrize(
    ("words", "dotted", "value"),
    [
        (["--p2p-lookup-timeout", "2.5"], "p2p.lookup_timeout_ms", 2500),
        (["--p2p-load-timeout", "30"], "p2p.load_timeout_ms", 30_000),
        (["--p2p-advertise-url", "10.0.0.1:8500"], "p2p.advertise", "10.0.0.1:8500"),
        (["--p2p-advertise-url", "10.0.0.1:8500"], "p2p.listen", "10.0.0.1:8500"),
        (["--p2p-advertise-url", "a:1", "--p2p-listen-url", "b:2"], "p2p.listen", "b:2"),
        (["--p2p-listen-url", "b:2", "--p2p-advertise-url", "a:1"], "p2p.listen", "b:2"),
        (["--p2p-advertise-url", "a:1", "--p2p-listen", "c:3"], "p2p.listen", "c:3"),
        (["--p2p-transfer-engine", "nixl"], "p2p.engine", "nixl"),
        (["--l1-use-hugepages"], "l1.use_hugepages", True),
        (["--l1-use-hugepages", "--no-l1-use-hugepages"], "l1.use_hugepages", False),
        (["--eviction-policy", "lru"], "l1.eviction_policy", "LRU"),
    ],
)
def test_translated_values_mean_the_same(words, dotted, value):
    assert at(loaded(parse_server_flags(words)), dotted) == value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--p2p-lookup-timeout", "90"], "--p2p-lookup-timeout: must be a whole number from 1 to 60000, found 90000"),
        (["--p2p-lookup-timeout", "soon"], "--p2p-lookup-timeout: must be a whole number from 1 to 60000"),
        (["--p2p-transfer-engine", "mooncake"], "--p2p-transfer-engine: must be one of auto, ucx, nixl, off"),
        (["--p2p-advertise-url"], "--p2p-advertise-url: needs one value"),
        (["--hash-algorithm"], "--hash-algorithm: chunk keys are SHA-256"),
        (["--hash-algorithm", "builtin"], "--hash-algorithm: chunk keys are SHA-256"),
        (["--run-script-api-enabled"], "the server runs no scripts"),
        (["--transport", "grpc"], "ZMQ only"),
        (["--l2-store-policy", "other"], '"policy" in --l2-adapter'),
        (["--kv-load-policy", "pkg:Class"], "loads no classes"),
        (["--coordinator-url", "http://c:9300"], "--controller-url"),
    ],
)  # fmt: skip
def test_what_we_cannot_do_is_an_error_that_says_so(words, says):
    with pytest.raises(ConfigError) as caught:
        loaded(parse_server_flags(words))
    assert says in caught.value.message


LINE = ["--l1-size-gb", "3", "--eviction-policy"]
FS = {"type": "fs", "base_path": "/kv/kvstrata"}
NIXL = {"type": "nixl_store", "backend": "POSIX", "pool_size": 8, "backend_params": {"file_path": "/kv/"}}


@pytest.mark.parametrize(
    ("words", "policy", "adapters", "says"),
    [
        ([*LINE, "LRU"], "LRU", [], ["nothing is kept on disk, as there"]),
        (["--eviction-policy", "LRU"], "LRU", None, []),
        (["--l1-size-gb", "3"], "LRU", None, []),
        (
            [*LINE, "noop", "--l2-store-policy", "skip_l1", "--l2-adapter", json.dumps(FS)],
            "LRU",
            [FS],
            ["leaves L1 when its room is needed", "skip_l1 is taken as LRU"],
        ),
        (
            [*LINE, "NoOp", "--l2-store-policy=skip_l1", "--l2-adapter", json.dumps(FS)],
            "LRU",
            [FS],
            ["leaves L1", "taken as LRU"],
        ),
        (
            [*LINE, "LRU", "--l2-store-policy", "skip_l1", "--l2-adapter", "none"],
            "LRU",
            [],
            ["leaves L1 when its room is needed"],
        ),
        ([*LINE, "noop", "--l2-adapter", json.dumps(FS)], "noop", [FS], []),
        (
            [*LINE, "IsolatedLRU", "--l2-adapter", json.dumps(FS)],
            "LRU",
            [FS],
            ["quotas_gb say how much of L1 a tenant may have"],
        ),
        (
            [*LINE, "LRU", "--l2-adapter", json.dumps(NIXL)],
            "LRU",
            [FS],
            ["nixl_store with POSIX is taken as fs in /kv/kvstrata, without a cap"],
        ),
        (
            [
                *LINE,
                "LRU",
                "--l2-adapter",
                json.dumps(
                    {
                        "type": "nixl_store_dynamic",
                        "backend": "POSIX",
                        "persist_enabled": True,
                        "deadline_ms": 900,
                        "backend_params": {
                            "file_path": "/kv",
                            "use_direct_io": "false",
                            "max_capacity_gb": "10",
                        },
                    }
                ),
            ],
            "LRU",
            [{**FS, "deadline_ms": 900, "use_odirect": False, "capacity_gb": 10}],
            ["is taken as fs in /kv/kvstrata"],
        ),
        (
            ["--cpu-buffer-size", "60", "--max-workers", "4"],
            "LRU",
            None,
            ["--cpu-buffer-size is taken as l1.size_gb", "--max-workers has no effect"],
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
        ([*LINE, "LRU", "--config", str(file)], {}),
        ([*LINE, "LRU"], {"KVSTRATA_CONFIG_FILE": str(file)}),
        ([*LINE, "LRU"], {"KVSTRATA_L2_ADAPTERS": "[{type: fs, base_path: /x}]"}),
    ):
        flags, read = server_settings(words, environment)
        assert read().l2_adapters == [{"type": "fs", "base_path": "/x"}] and flags.notes == []


@pytest.mark.parametrize(
    "words",
    [
        ["--hash-algorithm", "blake3"],
        ["--hash-algorithm=blake3"],
        ["--engine-type", "default"],
        ["--l2-store-policy", "default"],
        ["--l2-store-policy", "skip_l1"],
        ["--kv-load-policy", "DEFAULT"],
        ["--l2-prefetch-policy", "default"],
        ["--l2-prefetch-policy", "retain"],
        ["--transport", "zmq"],
        ["--lookup-hash-log-dir", ""],
        ["--runtime-plugin-locations", "/a", "/b", "/c"],
        ["--health-check-interval", "-1"],
    ],
)
def test_what_asks_for_nothing_is_noted(words):
    parse = parse_controller_flags if words[0] in CONTROLLER_FLAGS else parse_server_flags
    flags = parse(words)
    assert not flags.wrong and flags.settings == {}
    assert len(flags.notes) == 1 and flags.notes[0].startswith(
        f"{words[0].partition('=')[0]} has no effect: "
    )


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("--l1-use-hugepage", "--l1-use-hugepages"),
        ("--no-l1-use-hugepage", "--no-l1-use-hugepages"),
        ("--max-worker", ""),  # it does nothing here
        ("--l1-siz-gb", "--l1-size-gb"),
        ("--l1-size", "--l1-size-gb"),
        ("--cache-size", ""),  # LMCache's chunk size is another thing
        ("--otlp-endpoin", ""),
        ("--engine-typ", ""),
        ("--coordinatr-url", ""),
        ("--server-modul", ""),
        ("--l1-use-laz", ""),
        ("--supervise", ""),
    ],
)
def test_an_error_suggests_nothing_that_is_refused_or_the_opposite(name, suggested):
    [error] = parse_server_flags([name, "1"]).wrong
    assert error.message.endswith(f"(did you mean '{suggested}'?)" if suggested else "unknown flag")


# -- keys of files, variables, connector settings

SAMPLES = {"save_decode_cache": True, "enable_kv_events": True, "mp_host": "127.0.0.1", "lmcache.mp.host": "127.0.0.1",
           "lmcache.mp.save_decode_cache": True, "save_unfull_chunk": False}  # fmt: skip
KEY_ROWS = dict(rows(CLIENT_KEYS, CLIENT_KEY_PREFIXES))
CONNECTOR_ROWS = dict(rows(CONNECTOR_EXTRA, CONNECTOR_EXTRA_PREFIXES))
SOURCES = ("file", "variable", "extra", "extra with lmcache.")


def given(source: str, key: str, value: Any, folder: Path) -> tuple[dict[str, Any], dict[str, str], str]:
    """Extra config and environment that give one key, and how messages name it."""
    if source == "file":
        file = folder / "lmcache.yaml"
        file.write_text(yaml.safe_dump({key: value}))
        return {}, {"LMCACHE_CONFIG_FILE": str(file)}, f"{file}: {key}"
    if source == "variable":
        name = f"LMCACHE_{key.upper()}"
        return {}, {name: value if isinstance(value, str) else json.dumps(value)}, f"environment: {name}"
    prefix = "lmcache." if source.endswith(".") else ""
    return {prefix + key: value}, {}, f"kv_connector_extra_config: {key}"


@pytest.mark.parametrize("source", SOURCES)
def test_every_key_does_what_its_row_says(source, tmp_path):
    for key, entry in KEY_ROWS.items():
        with case(key):
            check_key(key, entry, source, tmp_path)


def check_key(key, entry, source, tmp_path):
    value = SAMPLES.get(key, 7)
    extra, environment, name = given(source, key, value, tmp_path)
    settings, notes = load_settings(extra, environment)
    if entry.fate is Fate.KEPT:
        assert at(settings, entry.target) == value and notes == []
    else:
        assert settings == ClientSettings() and notes == [f"{name} has no effect: {entry.say}"]


def test_every_connector_setting_does_what_its_row_says():
    for key, entry in CONNECTOR_ROWS.items():
        with case(key):
            check_connector_setting(key, entry)


def check_connector_setting(key, entry):
    value = SAMPLES.get(key, 7)
    settings, notes = load_settings({key: value}, {})
    if entry.fate is Fate.KEPT:
        assert at(settings, entry.target) == value and notes == []
    else:
        assert notes == [f"kv_connector_extra_config: {key} has no effect: {entry.say}"]


def test_no_key_of_theirs_is_unknown():
    assert [key for key in THEIRS["file_keys"] if not find(key, CLIENT_KEYS, CLIENT_KEY_PREFIXES)] == []
    assert [
        key for key in THEIRS["connector_keys"] if not find(key, CONNECTOR_EXTRA, CONNECTOR_EXTRA_PREFIXES)
    ] == []


def test_a_file_with_all_their_defaults_is_accepted(tmp_path):
    file = tmp_path / "defaults.yaml"
    defaults = {key: value for key, value in THEIRS["file_keys"].items() if value is not None}
    assert len(defaults) > 50
    file.write_text(yaml.safe_dump(defaults))
    settings, notes = load_settings({}, {"LMCACHE_CONFIG_FILE": str(file)})
    assert settings == ClientSettings(save_unfull_chunk=False)  # their default
    assert len(notes) + sum(
        CLIENT_KEYS[key].fate is Fate.KEPT for key in defaults if key in CLIENT_KEYS
    ) == len(defaults)


def test_every_variable_is_noted_by_the_engine_and_by_the_server():
    script = "LMCACHE_RUN_SCRIPT_API_ENABLED"  # a key of the file, upper-cased
    for name in {*THEIRS["variables"], *VARIABLES, *(f"{one}X" for one in VARIABLE_PREFIXES)} - {script}:
        with case(name):
            entry = find(name, VARIABLES, VARIABLE_PREFIXES)
            assert entry
            says = [f"environment: {name} has no effect: {entry.say}"]
            assert load_settings({}, {name: "1"}) == (ClientSettings(), says)
            assert server_notes({name: "1"}, ClientSettings.__struct_fields__) == says


def test_an_unknown_variable_is_a_warning_and_stops_nobody():
    says = [
        "environment: LMCACHE_CHUNKSIZE has no effect: unknown variable (did you mean 'LMCACHE_CHUNK_SIZE'?)"
    ]
    assert load_settings({}, {"LMCACHE_CHUNKSIZE": "1"}) == (ClientSettings(), says)
    assert server_notes({"LMCACHE_CHUNKSIZE": "1"}, ClientSettings.__struct_fields__) == says
    for name in ("LMCACHE_WORKER_PORT", "LMCACHE_CACHE_SIZE"):  # a hint would lead to another meaning
        says = [f"environment: {name} has no effect: unknown variable"]
        assert load_settings({}, {name: "1"}) == (ClientSettings(), says)


def test_a_server_says_nothing_about_what_its_engines_read():
    environment = {"LMCACHE_CHUNK_SIZE": "1", "LMCACHE_LOAD_MODE": "sync", "LMCACHE_USE_LAYERWISE": "1"}
    environment["LMCACHE_SERVICE_HOST"] = "10.0.0.1"
    assert server_notes(environment, ClientSettings.__struct_fields__) == []
    environment = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "5", "LMCACHE_CONFIG_FILE": "/x.yaml"}
    size, file = server_notes(environment, ClientSettings.__struct_fields__)
    assert "--l1-size-gb" in size and "kvstrata migrate FILE" in file


# -- commands and paths


def test_every_command_and_path_of_theirs_is_in_a_table():
    assert set(THEIRS["commands"]) == set(COMMANDS)
    for path in set(THEIRS["server_paths"]) - {"/healthcheck", "/metrics"}:
        assert path_advice(SERVER_PATHS, path), path
    for path in THEIRS["controller_paths"]:
        assert path_advice(CONTROLLER_PATHS, path), path


def test_kept_and_replaced_names_point_to_existing_settings():
    for struct, table in ((ServerSettings, SERVER_FLAGS), (ControllerSettings, CONTROLLER_FLAGS)):
        known = dict(loading.leaves(struct)) | dict.fromkeys(field for field in struct.__struct_fields__)
        for name, entry in table.items():
            assert not entry.target or entry.target in known, name
    client = set(ClientSettings.__struct_fields__)
    for table in (CLIENT_KEYS, CONNECTOR_EXTRA):
        for name, entry in table.items():
            assert not entry.target or entry.target in client, name
