"""Files that hold secrets: read by their owner only, or refused with what to change."""

from __future__ import annotations

import os
import stat

from kvstrata.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 16, 256


def read_private_file(path: str, field: str) -> str:
    """The text of a regular file that nobody but its owner can read, up to 1 MiB.

    Raises ConfigError naming `field` and the path, never what the file holds.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not stop the caller
        with open(fd, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES) if stat.S_ISREG(mode) else None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"{field}: {path}: cannot be read: {error}", field=field) from None
    if content is None:
        raise ConfigError(f"{field}: {path} is no regular file; name a file", field=field)
    if mode & 0o077:
        raise ConfigError(
            f"{field}: {path} can be read by others (mode {stat.S_IMODE(mode):o}); chmod 600 it", field=field
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{field}: {path}: cannot be read: no UTF-8 at byte {error.start}", field=field
        ) from None


def read_token_file(path: str, field: str) -> str:
    """The one token in a file, white space around it left out. Raises ConfigError."""
    token = read_private_file(path, field).strip()
    if not token:
        raise ConfigError(f"{field}: {path} is empty; write the token into it", field=field)
    if len(token.split()) > 1:
        raise ConfigError(f"{field}: {path} holds several words; write the token alone", field=field)
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise ConfigError(
            f"{field}: {path} holds {len(token)} characters, a token has {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS}",
            field=field,
        )
    return token
