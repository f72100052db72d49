"""The rule by which secrets are left out: closed, complete for every field of ours, and the same for variables."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.flags import parse
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.load import shown_environment
from kvstrata.config.model import ServerSettings
from kvstrata.config.secrets import (
    OBJECTS,
    REFERENCE,
    SECRET,
    SECRET_LEFT_OUT,
    SHOWN,
    quoted,
    scrubbed,
    shown,
)
from kvstrata.tiers.config import CommonFields, load, own_points


def has_text(kind: Any) -> bool:
    if isinstance(kind, inspect.StrType | inspect.AnyType | inspect.LiteralType | inspect.EnumType):
        return True
    parts = [getattr(kind, name, ()) for name in ("type", "types", "item_type", "value_type")]
    return any(
        has_text(one) for part in parts for one in (part if isinstance(part, tuple | list) else [part])
    )


def fields_with_text(struct: type[msgspec.Struct]) -> set[str]:
    found: set[str] = set()
    for field in inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        kind = field.type
        while isinstance(kind, inspect.Metadata):
            kind = kind.type
        if isinstance(kind, inspect.StructType):
            found |= fields_with_text(kind.cls)
        elif has_text(kind):
            found.add(field.name)
    return found


def test_every_field_of_ours_is_shown_or_secret_or_names_a_place_on_purpose() -> None:
    structs: list[Any] = [ServerSettings, ControllerSettings, GatewaySettings, ClientSettings, CommonFields]
    structs += [load(point.value).config for point in own_points().values()]
    fields = set().union(*map(fields_with_text, structs)) - OBJECTS
    known = {name for name in fields if name in SHOWN or SECRET.search(name) or REFERENCE.search(name)}
    assert fields - known == set(), "decide whether pages may show these fields: config/secrets.py"
    assert not {name for name in SHOWN if SECRET.search(name)}, "a name cannot be in both rules"


@pytest.mark.parametrize(
    "entry",
    [
        {"password": "hunter2"},
        {"password": 12345},
        {"client_secret": ["a", {"b": "hunter2"}]},
        {"headers": {"X-Auth": "hunter2"}},
        {"adapter_params": {"anything": "hunter2"}},
        {"url": "redis://me:hunter2@host"},
        {"endpoints": ["https://me:hunter2@host"]},
        {"codec": {"name": "mine", "passphrase": "hunter2"}},
        {"an_option_of_tomorrow": "hunter2"},
        {"note": {"deep": [[{"er": "hunter2"}]]}},
    ],
    ids=str,
)
def test_what_may_be_a_secret_is_left_out(entry: dict[str, Any]) -> None:
    public, left_out = shown(entry)
    text = json.dumps(public)
    assert "hunter2" not in text and "12345" not in text and SECRET_LEFT_OUT in text and left_out


def test_variables_are_shown_from_a_closed_list_field_by_field() -> None:
    adapters = [
        {"type": "resp", "host": "h", "password": "hunter2", "port": 1, "note": "hunter2"},
        {"type": "s3", "url": "s3://b/k", "secret_access_key": "hunter2", "session_token": "hunter2"},
        {"type": "resp", "url": "redis://me:hunter2@host"},
    ]
    given = {
        "KVSTRATA_L2_ADAPTERS": json.dumps(adapters),
        "KVSTRATA_LOG_LEVEL": "info",
        "KVSTRATA_L1_SIZE_GB": "0.5",
        "KVSTRATA_HTTP_TOKEN_FILE": "/run/token",
        "KVSTRATA_INSTANCE_ID": "mine\x1b[2J",
        "KVSTRATA_ADMIN_PASSWORD": "hunter2",
        "KVSTRATA_TOKEN": "hunter2",
        "LMCACHE_REMOTE_URL": "lm://hunter2",
        "VLLM_API_KEY": "hunter2",
        "UCX_TLS": "tcp",
        "UCX_MY_KEY": "hunter2",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "REDIS_PASSWORD": "hunter2",
        "HOME": "/home/somebody",
    }
    found = shown_environment(given)
    assert set(found) == {
        "KVSTRATA_L2_ADAPTERS", "KVSTRATA_LOG_LEVEL", "KVSTRATA_L1_SIZE_GB", "KVSTRATA_HTTP_TOKEN_FILE",
        "KVSTRATA_INSTANCE_ID", "UCX_TLS",
    }  # fmt: skip
    assert "hunter2" not in json.dumps(found)
    first, second, third = json.loads(found["KVSTRATA_L2_ADAPTERS"])
    assert first == {**adapters[0], "password": SECRET_LEFT_OUT, "note": SECRET_LEFT_OUT}
    assert second["url"] == "s3://b/k" and third["url"] == f"redis://{SECRET_LEFT_OUT}@host"
    assert found["KVSTRATA_L1_SIZE_GB"] == "0.5" and found["KVSTRATA_HTTP_TOKEN_FILE"] == "/run/token"
    assert found["KVSTRATA_INSTANCE_ID"] == r"mine\x1b[2J"


@pytest.mark.parametrize(
    "unreadable", ["[{password: hunter2", "hunter2", "{", "- ]", "[" * 1_000, "2020-99-99", '"hunter2"']
)
def test_a_variable_that_cannot_be_read_is_not_shown_at_all(unreadable: str) -> None:
    assert shown_environment({"KVSTRATA_L2_ADAPTERS": unreadable}) == {}


@pytest.mark.parametrize(
    "foreign",
    [
        "Redis(host='h', password='hunter2', port=1) failed",
        '{"secret_access_key": "hunter2"}',
        "AUTH me hunter2: WRONGPASS",
        "auth: hunter2",
        "x-api-key: hunter2",
        "Authorization: Basic hunter2",
        "connect redis://me:hunter2@host:6379",
        "GET https://h/k?X-Amz-Security-Token=hunter2 403",
        "AccountKey=hunter2;EndpointSuffix=core",
        "access_key_id=AKIA,secret_access_key=hunter2",
        "password = \"hunter2 and more\"",
        "password=hunter2" + "x" * 100_000,
    ],
)  # fmt: skip
def test_an_exception_of_a_library_is_repeated_without_its_credentials(foreign: str) -> None:
    text = scrubbed(ValueError(foreign))
    assert "hunter2" not in text and len(text) <= 300 and text.isprintable()


def test_plain_words_of_a_library_stay() -> None:
    for plain in (
        "Connection refused (os error 111)",
        "NOAUTH Authentication required.",
        "no key 7",
        "keys: 3",
    ):
        assert scrubbed(OSError(plain)) == plain


def test_a_wrong_value_is_quoted_without_secrets() -> None:
    assert quoted("password", 7) == SECRET_LEFT_OUT
    assert quoted("password_file", "/x") == "'/x'"
    assert "hunter2" not in quoted("l2_adapters", {"type": "resp", "password": "hunter2"})
    assert len(quoted("type", "x" * 200_000)) == 80


def test_a_password_on_the_command_line_is_noted_without_its_text() -> None:
    flags = parse(
        "lmcache-server", ["--l2-adapter", '{"type": "resp", "host": "h", "password": "hunter2", "x": "y"}']
    )
    assert flags.exposed == ["l2_adapters[0].password"] and flags.notes == []


def test_an_entry_is_shown_without_its_secrets() -> None:
    given = {
        "type": "any",
        "password": "hunter2",
        "token_file": "/run/token",
        "codec": [{"name": "aes-gcm", "key_file": "/run/key"}],
        "adapter_params": {"Secret_Access_Key": "x", "bucket": "b", "password": ""},
        "chunk_tokens": 256,
        "auth": [{"apikey": "x"}, "y"],
    }
    public, left_out = shown(given)
    assert left_out == ["password", "adapter_params.Secret_Access_Key", "auth[0].apikey", "auth[1]"]
    assert public == {
        **given,
        "password": SECRET_LEFT_OUT,
        "adapter_params": {"Secret_Access_Key": SECRET_LEFT_OUT, "bucket": "b", "password": ""},
        "auth": [{"apikey": SECRET_LEFT_OUT}, SECRET_LEFT_OUT],
    }
    assert given["password"] == "hunter2"
