"""The field `codec` of an entry: which codecs, in which order, with which options and key."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstrata.config.nearest import nearest
from kvstrata.config.tokens import read_token_file
from kvstrata.errors import AllWrong, ConfigError, install

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


def read_chain(value: object, path: str) -> ChainSettings:
    """The chain that the field `path` asks for. Raises ConfigError naming the parts that are wrong."""
    if value is None:
        return ChainSettings()
    entries = value if isinstance(value, list) else [value]
    settings, wrong = ChainSettings(), AllWrong()
    seen: list[str] = []
    for i, entry in enumerate(entries):
        with wrong:
            settings = _with(settings, entry, f"{path}[{i}]" if isinstance(value, list) else path, seen)
    wrong.tell()
    return settings


def _with(settings: ChainSettings, entry: object, where: str, seen: list[str]) -> ChainSettings:
    """The chain with one more codec, whose name `seen` gets. Raises ConfigError."""
    options: Any = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
        raise ConfigError(
            f'{where}: must be the name of a codec or an object with a "name", found {entry!r:.80}',
            field=where,
        )
    name = options["name"]
    if name == "fp8":
        advice = "KV is rounded where it is stored: give the engine fidelity: fp8; remove it here"
        raise ConfigError(f"{where}: 'fp8' is no codec of L2 any more: {advice}", field=where)
    if name not in NAMES:
        raise ConfigError(
            f"{where}: unknown codec {name!r:.80}{nearest(name, NAMES)}; known codecs: {', '.join(NAMES)}",
            field=where,
        )
    if seen and NAMES.index(name) <= NAMES.index(seen[-1]):
        raise ConfigError(
            f"{where}: {name!r} cannot come after {seen[-1]!r}; the order is {', '.join(NAMES)}, each once",
            field=where,
        )
    if name == "mac" and "aes-gcm" in seen:
        raise ConfigError(
            f"{where}: 'mac' cannot come after 'aes-gcm', which authenticates records itself; remove one",
            field=where,
        )
    seen.append(name)
    known, wrong = ["name"], AllWrong()
    if name == "zstd":
        known += ["level", "planes"]
        level, planes = 1, None
        with wrong:
            _need("zstandard", where, name)
        with wrong:
            level = _whole(options, "level", where, 1, -50, 19)
        with wrong:
            planes = _whole(options, "planes", where, None, 1, 2)
        settings = settings._replace(zstd=ZstdOptions(level, planes))
    else:
        known += ["key_file", "key_files"]
        keys = [b""]
        with wrong:
            _need("cryptography", where, name)
        with wrong:
            keys = _read_keys(options, where)
        settings = settings._replace(
            master_key=keys[0] if name == "aes-gcm" else b"",
            mac_key=keys[0] if name == "mac" else b"",
            old_keys=tuple(keys[1:]),
        )
    for field in options:
        if field not in known:
            wrong.add(
                ConfigError(
                    f"{where}.{field}: unknown field{nearest(str(field), known)}", field=f"{where}.{field}"
                )
            )
    wrong.tell()
    return settings


def _need(module: str, where: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{where}: {name!r} needs the Python package {module!r}, which is not installed: {install('codecs')}",
            field=where,
        )


def _whole(options: Mapping[str, Any], name: str, where: str, default: Any, least: int, most: int) -> Any:
    value = options.get(name, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"{where}.{name}: must be a whole number from {least} to {most}, found {value!r:.80}",
            field=f"{where}.{name}",
        )
    return value


def _read_keys(options: Mapping[str, Any], where: str) -> list[bytes]:
    """The keys of `key_file`, or of `key_files`: the first one writes, all of them read."""
    files, field = options.get("key_file"), f"{where}.key_file"
    if "key_files" not in options:
        if not isinstance(files, str) or not files:
            raise ConfigError(
                f"{field}: must be the path of a file with the key, found {files!r:.80}", field=field
            )
        return [_read_key(os.path.expanduser(files), field)]
    if files is not None:
        raise ConfigError(f"{field}: key_files is given too; give one of them", field=field)
    files, field = options["key_files"], f"{where}.key_files"
    if (
        not isinstance(files, list)
        or not 0 < len(files) <= MOST_KEYS
        or not all(isinstance(file, str) and file for file in files)
    ):
        raise ConfigError(
            f"{field}: must be a list of 1 to {MOST_KEYS} paths of files with a key each, the key for new records "
            f"first, found {files!r:.80}",
            field=field,
        )
    keys = [_read_key(os.path.expanduser(file), f"{field}[{i}]") for i, file in enumerate(files)]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{field}: two files hold the same key; remove one", field=field)
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
