"""Reads files that hold one token: an engine's token or a codec's key (`read_token_file`), the bearer token of an HTTP
port (`read_bearer_token`).

A file that others can read is refused.  Errors never contain a file's content.
"""

from __future__ import annotations

import re

from kvstrata.config.private_file import read_private_file
from kvstrata.errors import ConfigError
from kvstrata.text import remember_secret

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 256
"""Most characters of an engine's token, which travels in an attach request; a bearer token may be longer."""


def read_token_file(path: str, field: str) -> str:
    """The one token in a private file, without white space around it. Raises ConfigError."""
    token = read_private_file(path, field).strip()
    if not token:
        raise ConfigError(f"{field}: {path} is empty; write the token into it", field=field)
    if len(token.split()) > 1:
        raise ConfigError(f"{field}: {path} holds several words; write the token alone", field=field)
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise ConfigError(
            f"{field}: {path} holds {len(token)} characters, but a token must have {MIN_TOKEN_CHARS} to "
            f"{MAX_TOKEN_CHARS}",
            field=field,
        )
    remember_secret(token)
    return token


def read_bearer_token(path: str, field: str) -> str:
    """The bearer token in a private file, or in a secret that Kubernetes mounts. Raises ConfigError."""
    return bearer_token(read_private_file(path, field, mounted=True), path, field)


def bearer_token(text: str, source: str, field: str) -> str:
    """The bearer token in a text that was read from `source`, without white space around it. Raises ConfigError."""
    token = text.strip()
    if not re.fullmatch("[ -~]+", token):
        raise ConfigError(f"{field}: {source} must hold the token alone, in one line of ASCII", field=field)
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{field}: {source} holds {len(token)} characters, but a token needs at least {MIN_TOKEN_CHARS}",
            field=field,
        )
    remember_secret(token)
    return token
