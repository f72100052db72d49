"""Settings: where they come from, what is refused, and the names users already know."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config import load as loading
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.flags import parse
from kvstrata.config.lmcache.fates import translate
from kvstrata.config.lmcache.keys import CLIENT_KEY_PREFIXES, CLIENT_KEYS
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError
from tests.harness.amount import amount


def test_later_sources_win_key_by_key(tmp_path):
    file = tmp_path / "k v.yaml"
    file.write_text("port: 1111\nl1: {size_gb: 1.5, eviction_policy: LRU}\n")
    settings = loading.load(
        ServerSettings,
        file=file,
        environment={"KVSTRATA_L1_SIZE_GB": "2.5", "KVSTRATA_HTTP_PORT": "0", "HOME": "/x"},
        flags=parse("lmcache-server", ["--http-port", "77"]).settings,
    )
    assert (settings.port, settings.l1.size_gb, settings.l1.eviction_policy, settings.http.port) == (
        1111,
        2.5,
        "LRU",
        77,
    )


def test_variables_of_the_build_and_of_engines_are_ignored_by_the_server():
    environment = {"KVSTRATA_WERROR": "1", "KVSTRATA_CUDA": "require", "KVSTRATA_LOAD_MODE": "sync"}
    assert loading.load(ServerSettings, environment=environment) == ServerSettings()
    assert loading.load(ClientSettings, environment=environment).load_mode == "sync"


def test_a_file_may_have_the_settings_of_engines_too(tmp_path):
    file = tmp_path / "both.yaml"
    file.write_text("port: 1\nload_mode: sync\nsave_decode_cache: true\n")
    assert loading.load(ServerSettings, file=file) == ServerSettings(port=1)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@hypothesis.settings(max_examples=amount(8, 100))
@given(ANY)
def test_any_value_anywhere_is_settings_or_a_named_error(value):
    for key, _ in loading.leaves(ServerSettings):
        nested: dict = {}
        loading.put(nested, key, value)
        try:
            loading.convert(ServerSettings, nested, "file")
        except ConfigError as error:
            assert error.field


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("server-*.yaml")), ids=lambda file: file.name)
def test_server_examples_load(file):
    assert loading.load(ServerSettings, file=file).named_port


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("connector*.yaml")), ids=lambda file: file.name
)
def test_connector_examples_load(file):
    own = dict(loading.leaves(ClientSettings))
    settings, _ = translate(
        loading.read_yaml(file),
        source=str(file),
        table=CLIENT_KEYS,
        prefixes=CLIENT_KEY_PREFIXES,
        kinds=own,
        own=own,
    )
    loading.convert(ClientSettings, settings, str(file))


def test_yaml_means_what_is_written(tmp_path):
    for text, value in {
        "0700": 700, "22:30": "22:30", "no": "no", "off": "off", "yes": "yes", "0o17": 15, "0x1F": 31, "1e3": 1000.0,
        "1_000": "1_000", "2024-01-02": "2024-01-02", "~": None, "true": True, "TRUE": True, ".5": 0.5, "-3": -3,
        "'1'": "1", "[a, no, 08]": ["a", "no", 8], "": None,
    }.items():  # fmt: skip
        found = loading.parse_yaml(text)
        assert (found, type(found)) == (value, type(value)), text
    assert loading.parse_yaml("{no: 1, 0700: 2, 22:30: 3, ~: 4, 1.5: 5}") == {
        "no": 1, "0700": 2, "22:30": 3, "~": 4, "1.5": 5,
    }  # fmt: skip
    assert loading.parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2, y: 3}") == {
        "a": {"x": 1},
        "b": {"x": 2, "y": 3},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"chunk_size: {'9' * 5000}\n", "int"),
        ("[" * 1500, "nested too deep"),
        ("server: &a [{host: *a}]\n", "recursive"),
    ],
)
def test_yaml_without_measure_is_refused(tmp_path, text, says):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="not YAML: ") as error:
        loading.load(ServerSettings, file=file)
    assert says in error.value.message


def test_quotes_of_an_env_file_are_taken_away_and_an_empty_variable_is_not_set():
    found = loading.load(
        ServerSettings,
        environment={
            "KVSTRATA_HTTP_HOST": "'127.0.0.1'",
            "KVSTRATA_HTTP_PORT": '"8081"',
            "KVSTRATA_L2_ADAPTERS": "'[]'",
            "KVSTRATA_SECURITY_INSECURE": "'true'",
            "KVSTRATA_L1_SIZE_GB": "",
            "KVSTRATA_LOG_LEVEL": '""',
        },
    )
    assert (found.http.host, found.http.port, found.l2_adapters) == ("127.0.0.1", 8081, [])
    assert found.security.insecure and found.l1.size_gb is None and found.log_level == "info"


STRUCTS = (ServerSettings, ControllerSettings, ClientSettings)


@pytest.mark.parametrize(
    ("text", "struct", "found"),
    [
        ("l1: {eviction_policy: lru}", ServerSettings, lambda one: one.l1.eviction_policy == "LRU"),
        ("l1: {eviction_policy: NOOP}", ServerSettings, lambda one: one.l1.eviction_policy == "noop"),
        ("log_level: INFO", ControllerSettings, lambda one: one.log_level == "info"),
        ("load_mode: Sync", ClientSettings, lambda one: one.load_mode == "sync"),
        ("p2p: {engine: off}", ServerSettings, lambda one: one.p2p.engine == "off"),
    ],
)
def test_words_of_a_list_are_understood_in_any_case(text, struct, found):
    assert found(loading.convert(struct, loading.parse_yaml(text), "file"))


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_setting_of_every_kind_has_a_demand_of_its_own(struct):
    for key, kind in loading.leaves(struct):
        with pytest.raises(ConfigError) as caught:
            nested: dict = {}
            loading.put(nested, key, object())
            loading.convert(struct, nested, "file")
        assert caught.value.message.startswith(f"file: {key}: must be "), key
        assert caught.value.field == key
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(object(), kind)
