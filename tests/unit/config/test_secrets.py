"""Secrets come from private files and are shown nowhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.flags import parse
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.model import ServerSettings
from kvstrata.config.private_file import (
    MAX_TOKEN_CHARS,
    read_bearer_token,
    read_private_file,
    read_token_file,
)
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
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from kvstrata.rpc import wire
from kvstrata.tiers.config import TYPES, CommonFields, load
from kvstrata.types import Role
from tests.harness.cache_engine import layout_identity


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
    structs += [load(place).config for place in TYPES.values()]
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


TOKEN = "secret-of-blue-0123456"


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(text: str | bytes = TOKEN, mode: int = 0o600) -> str:
        path = tmp_path / "the token"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return str(path)

    return write


READERS = {"token_file": read_token_file, "http.token_file": read_bearer_token}


def test_the_token_is_the_text_of_the_file_and_a_bearer_token_may_be_long(file):
    for text in (TOKEN, f"{TOKEN}\n", f"  {TOKEN}\r\n\n"):
        for field, read in READERS.items():
            assert read(file(text), field) == TOKEN
    long = "x" * (MAX_TOKEN_CHARS + 1)
    assert read_bearer_token(file(long), "http.token_file") == long


@pytest.mark.parametrize(
    ("field", "text", "mode", "says"),
    [
        ("token_file", " \n\t\n", 0o600, "must hold the token alone"),
        ("token_file", f"{TOKEN} blue", 0o600, "one word of at most 256 characters"),
        ("token_file", "short", 0o600, "holds 5 characters, but a token needs at least 16"),
        ("token_file", "x" * (MAX_TOKEN_CHARS + 1), 0o600, "one word of at most 256 characters"),
        ("token_file", b"\xff" * 20, 0o600, "not UTF-8 at byte 0"),
        ("token_file", TOKEN, 0o640, r"mode 640\); chmod 600"),
        ("token_file", TOKEN, 0o604, r"mode 604\); chmod 600"),
        ("token_file", TOKEN, 0o620, r"mode 620\); chmod 600"),
        ("http.token_file", "", 0o600, "must hold the token alone"),
        ("http.token_file", f"{TOKEN}\n{TOKEN}", 0o600, "must hold the token alone"),
        ("http.token_file", f"{TOKEN}\u00e9", 0o600, "in one line of ASCII"),
        ("http.token_file", "short", 0o600, "holds 5 characters, but a token needs at least 16"),
    ],
)
def test_a_bad_token_file_is_named_and_its_secret_is_not_told(file, field, text, mode, says):
    path = file(text, mode)
    with pytest.raises(ConfigError, match=says) as caught:
        READERS[field](path, field)
    assert caught.value.message.startswith(f"{field}: {path}") and caught.value.field == field
    assert TOKEN not in caught.value.message


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of root")
def test_a_secret_that_is_mounted_for_our_group_is_read_and_one_for_all_is_not(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="chmod 600"):  # our own file
        read_bearer_token(str(path), "http.token_file")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert read_bearer_token(str(path), "http.token_file") == TOKEN
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token_file(str(path), "token_file")
    for mode in (0o444, 0o460, 0o450):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_bearer_token(str(path), "http.token_file")


def test_a_token_path_that_is_not_a_regular_file_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, says in [
        ("pipe", "not a regular file"),
        ("", "cannot be read|no regular"),
        ("none", "No such file"),
    ]:
        with pytest.raises(ConfigError, match=says):
            read_private_file(str(tmp_path / path), "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_private_file("a\0b", "x")


def test_a_token_in_the_settings_themselves_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="token_file") as caught:
        load_settings({"kvstrata.token": TOKEN}, {})
    assert TOKEN not in caught.value.message


def test_a_printed_attach_request_does_not_tell_the_token():
    request = wire.AttachRequest(
        protocol=1,
        session=bytes(16),
        group=bytes(16),
        role=Role.SCHEDULER,
        layout=layout_identity(16, "m"),
        engine_slices=1,
        token=TOKEN,
    )
    for text in (repr(request), str(request), f"{request}", f"{[request]}"):
        assert TOKEN not in text and "***" in text and "engine_slices=1" in text
