"""Reads and writes files that hold secrets, which only their owner may read.

A file that others can read is refused with an error that says what to change.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from kvstrata.errors import ConfigError, MachineLacks
from kvstrata.text import remember_secret

MAX_FILE_BYTES = 1 << 20


def read_private_file(path: str, field: str, *, mounted: bool = False) -> str:
    """The text of a regular file that only its owner can read, up to 1 MiB.

    With `mounted`, a file of root that our group can read is accepted too, unless we are root: that is how Kubernetes
    mounts a secret into a pod with an `fsGroup`.

    Raises ConfigError that names `field` and the path, never the file's content; MachineLacks if no file is there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block the caller
        with open(fd, "rb") as file:
            status = os.fstat(file.fileno())
            mode = status.st_mode
            content = file.read(MAX_FILE_BYTES) if stat.S_ISREG(mode) else None
    except FileNotFoundError as error:
        raise MachineLacks(f"{field}: {path}: cannot be read: {error}", field=field) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"{field}: {path}: cannot be read: {error}", field=field) from None
    if content is None:
        raise ConfigError(f"{field}: {path} is not a regular file; name a file", field=field)
    as_mounted = mounted and status.st_uid == 0 != os.geteuid() and not mode & 0o037
    if mode & 0o077 and not as_mounted:
        raise ConfigError(
            f"{field}: {path} can be read by others (mode {stat.S_IMODE(mode):o}); chmod 600 it", field=field
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{field}: {path}: cannot be read: not UTF-8 at byte {error.start}", field=field
        ) from None


def write_private_file(path: Path, content: bytes, *, overwrite: bool) -> None:
    """Write a file of mode 0600 as a whole; a crash leaves the old file or the new one.

    Raises OSError, and FileExistsError if the file exists, unless `overwrite`.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(fresh, path)
        else:
            os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 256
"""Most characters of an engine's token, which travels in an attach request; a bearer token may be longer."""


def read_token_file(path: str, field: str) -> str:
    """The token of an engine in a private file, without white space around it: one word. Raises ConfigError."""
    token = bearer_token(read_private_file(path, field), path, field)
    if len(token.split()) > 1 or len(token) > MAX_TOKEN_CHARS:
        raise ConfigError(
            f"{field}: {path} must hold one word of at most {MAX_TOKEN_CHARS} characters", field=field
        )
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
