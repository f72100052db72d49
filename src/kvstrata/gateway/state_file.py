"""The file in which a gateway keeps what it has learned: format, reading and writing.

    magic `kvgw`, version (1 byte), BLAKE2b of the rest (16 bytes), then one msgpack array: see State

1. The file is replaced as a whole; a crash leaves the old one or the new one.
2. It holds the secret of the pieces' keys, so it has mode 0600: with it, guesses of a prompt could be tested.  It
   holds no prompt, no token and no tenant.
3. It is a cache: a file that is not of this version, or is damaged, is refused with the reason and then replaced.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.config.private_file import write_private_file
from kvstrata.gateway.prefixes import KEY_BYTES
from kvstrata.policy.routing.model import Tier

NAME = "gateway.state"
MAGIC, VERSION = b"kvgw", 3
DIGEST_BYTES = 16
HEAD_BYTES = len(MAGIC) + 1 + DIGEST_BYTES
MAX_FILE_BYTES = 64 << 20

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """A piece that an engine has computed."""

    key: Key
    engines: list[tuple[str, Seconds]]
    """Names, and the age of each."""


class State(msgspec.Struct, array_like=True, frozen=True):
    """Everything that is kept. Ages are in seconds before `saved_s`."""

    saved_s: Seconds
    """Of the clock on the wall, in seconds since 1970."""
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Of the pieces' keys."""
    pieces: list[Piece]
    """The longest unused first."""
    responses: list[tuple[str, str]]
    """Stored responses and their engines, the oldest first."""
    rates: list[tuple[str, Count, Seconds, Count, bool]]
    """Samples as `Rates.kept` gives them."""
    load_rates: list[tuple[str, Tier, Count, Seconds]]
    """Samples: engine, tier, tokens, seconds."""
    paces: list[tuple[str, Seconds, Seconds]]
    """Engine, measured life of a block in its cache, measured lag of its events; 0: not measured."""


_DECODER = msgspec.msgpack.Decoder(State)
_encode = msgspec.msgpack.Encoder().encode
FIXARRAY, ARRAY32 = 0x90, b"\xdd"
"""Of msgpack: an array of at most 15 items, and one whose length follows in 4 bytes."""


class StateRefused(Exception):
    """The file cannot be used; the text says why."""


def read_state(folder: Path) -> State | None:
    """What is kept in a folder; None without a file. Raises StateRefused."""
    path = folder / NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise StateRefused("not a file that only this user can read and write")
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateRefused(f"cannot be read: {error.strerror}") from None
    return decoded(content)


def decoded(content: bytes) -> State:
    """The state in a file's content. Raises StateRefused."""
    if len(content) > MAX_FILE_BYTES:
        raise StateRefused(f"longer than {MAX_FILE_BYTES} bytes")
    if content[: len(MAGIC)] != MAGIC or len(content) < HEAD_BYTES:
        raise StateRefused("not a gateway's state file")
    if content[len(MAGIC)] != VERSION:
        raise StateRefused(f"version {content[len(MAGIC)]}; this gateway reads version {VERSION}")
    body = content[HEAD_BYTES:]
    if digest_of(body) != content[len(MAGIC) + 1 : HEAD_BYTES]:
        raise StateRefused("damaged: its checksum is wrong")
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise StateRefused(f"wrong content: {error}") from None


def encoded(state: State, **more: Iterable[object]) -> bytes:
    """The content of a file. `more`: further items of a list of the state by its name, behind those that it has.

    They are taken one by one, so an iterator that pauses lets other threads run.
    """
    parts = [bytes([FIXARRAY | len(state.__struct_fields__)])]
    for name in state.__struct_fields__:
        value = getattr(state, name)
        if isinstance(value, list):
            items = [_encode(one) for one in itertools.chain(value, more.get(name, ()))]
            parts += (ARRAY32 + len(items).to_bytes(4, "big"), *items)
        else:
            parts.append(_encode(value))
    body = b"".join(parts)
    return MAGIC + bytes([VERSION]) + digest_of(body) + body


def digest_of(body: bytes) -> bytes:
    """The checksum."""
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def remove_unfinished(folder: Path) -> None:
    """Delete what a process that was killed while it wrote has left. Only for who holds the folder's lock."""
    for path in folder.glob(f".{NAME}.*"):
        path.unlink(missing_ok=True)


def write_state(folder: Path, state: State, **more: Iterable[object]) -> None:
    """Replace the file; see `encoded`. Raises OSError."""
    write_private_file(folder / NAME, encoded(state, **more), overwrite=True)
