"""Secrets in files (config/private_file.py): who may read the files, what is a token, what errors show."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.config.private_file import (
    MAX_TOKEN_CHARS,
    read_bearer_token,
    read_private_file,
    read_token_file,
)
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from kvstrata.rpc import wire
from kvstrata.types import Role
from tests.harness.cache_engine import layout_identity

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
        ("token_file", " \n\t\n", 0o600, "is empty"),
        ("token_file", f"{TOKEN} blue", 0o600, "several words"),
        ("token_file", "short", 0o600, "holds 5 characters, but a token must have 16 to 256"),
        ("token_file", "x" * (MAX_TOKEN_CHARS + 1), 0o600, "holds 257 characters"),
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
