"""The field `codec` of an entry: which codecs, in which order, with which options and key."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.config.demands import nearest
from kvstrata.config.private_file import read_token_file
from kvstrata.errors import AllWrong, ConfigError, install
from kvstrata.storage import structs
from kvstrata.storage.structs import Place

MIN_KEY_CHARS = 32
NAMES = ("zstd", "aes-gcm", "mac")
MOST_KEYS = 8


class ZstdOptions(NamedTuple):
    level: int = 1
    planes: int | None = None
    """Bytes of a number (1 or 2); None: as the identity's dtype says, 2 where that is not known."""


class ChainSettings(NamedTuple):
    """A checked `codec` field. The empty one stores records as they are."""

    zstd: ZstdOptions | None = None
    master_key: bytes = b""
    """For aes-gcm; empty: not encrypted."""
    mac_key: bytes = b""
    """For mac; empty: no mac. Never together with `master_key`, since aes-gcm authenticates as well."""
    old_keys: tuple[bytes, ...] = ()
    """Keys with which records are still read."""

    @property
    def encodes(self) -> bool:
        """Whether any codec is configured."""
        return self.zstd is not None or bool(self.keys)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All keys; the first one is for writing."""
        first = self.master_key or self.mac_key
        return (first, *self.old_keys) if first else ()


class _Zstd(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    level: Annotated[int, Meta(ge=-50, le=19)] = 1
    planes: Annotated[int, Meta(ge=1, le=2)] | None = None


class _Keyed(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    key_file: str | None = None
    key_files: list[str] | None = None


def read_chain(value: object, path: str) -> ChainSettings:
    """The chain that the field `path` asks for. Raises ConfigError naming the parts that are wrong."""
    if value is None:
        return ChainSettings()
    entries = value if isinstance(value, list) else [value]
    settings, wrong = ChainSettings(), AllWrong()
    names: list[str] = []
    for i, entry in enumerate(entries):
        place = Place(f"{path}[{i}]" if isinstance(value, list) else path)
        with wrong:
            options = {"name": entry} if isinstance(entry, str) else entry
            names.append(_name(options, place, names))
            settings = _with(settings, options, place)
    wrong.tell()
    return settings


def _name(options: Any, place: Place, before: list[str]) -> str:
    """The name of the next codec of a chain. Raises ConfigError."""
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
        must = 'must be the name of a codec or an object with a "name"'
        raise ConfigError(f"{place.path}: {must}, found {options!r:.80}", field=place.path)
    name: str = options["name"]
    wrong = ""
    if name == "fp8":
        advice = "KV is rounded where it is stored: give the engine fidelity: fp8; remove it here"
        wrong = f"'fp8' is no codec of L2 any more: {advice}"
    elif name not in NAMES:
        wrong = f"unknown codec {name!r:.80}{nearest(name, NAMES)}; known codecs: {', '.join(NAMES)}"
    elif before and NAMES.index(name) <= NAMES.index(before[-1]):
        wrong = f"{name!r} cannot come after {before[-1]!r}; the order is {', '.join(NAMES)}, each once"
    elif name == "mac" and "aes-gcm" in before:
        wrong = "'mac' cannot come after 'aes-gcm', which authenticates records itself; remove one"
    if wrong:
        raise ConfigError(f"{place.path}: {wrong}", field=place.path)
    return name


def _with(settings: ChainSettings, options: Mapping[str, Any], place: Place) -> ChainSettings:
    """The chain with one more codec. Raises ConfigError."""
    name = options["name"]
    module = "zstandard" if name == "zstd" else "cryptography"
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{place.path}: {name!r} needs the Python package {module!r}, which is not installed: {install('codecs')}",
            field=place.path,
        )
    if name == "zstd":
        zstd = structs.read(_Zstd, options, place)
        return settings._replace(zstd=ZstdOptions(zstd.level, zstd.planes))
    first, *old = _read_keys(structs.read(_Keyed, options, place), place)
    settings = settings._replace(old_keys=tuple(old))
    return settings._replace(master_key=first) if name == "aes-gcm" else settings._replace(mac_key=first)


def _read_keys(options: _Keyed, place: Place) -> list[bytes]:
    """The keys of `key_file`, or of `key_files`: the first one writes, all of them read."""
    file, files = options.key_file, options.key_files
    if files is None:
        if not file:
            raise place.wrong("key_file", file, "must be the path of a file with the key")
        return [_read_key(os.path.expanduser(file), place.at("key_file"))]
    if file is not None:
        raise place.hidden("key_file", "key_files is given too; give one of them")
    if not 0 < len(files) <= MOST_KEYS or not all(isinstance(file, str) and file for file in files):
        must = f"must be a list of 1 to {MOST_KEYS} paths of files with a key each, the key for new records first"
        raise place.wrong("key_files", files, must)
    keys = [
        _read_key(os.path.expanduser(file), f"{place.at('key_files')}[{i}]") for i, file in enumerate(files)
    ]
    if len(set(keys)) < len(keys):
        raise place.hidden("key_files", "two files hold the same key; remove one")
    return keys


def _read_key(path: str, field: str) -> bytes:
    key = read_token_file(path, field)
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{field}: {path} holds {len(key)} characters, but a key must have at least {MIN_KEY_CHARS}; make one with"
            " openssl rand -hex 32",
            field=field,
        )
    return key.encode()
