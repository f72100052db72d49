"""Reads settings from a YAML file, the environment and flags; a later source overrides an earlier one, and all override
the defaults.

Errors name the source, the dotted key and the value.  An unknown key is an error that suggests the nearest name.
"""

from __future__ import annotations

import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from kvstrata.config.model import ClientSettings, ControllerSettings, ServerSettings
from kvstrata.config.nearest import nearest
from kvstrata.config.pod_links import is_pod_link
from kvstrata.config.secrets import quoted
from kvstrata.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)

ENV_PREFIX = "KVSTRATA_"
CONTROLLER_ENV_PREFIX = "KVSTRATA_CONTROLLER_"
"""Prefix of the controller's variables: it may share an environment with a server, whose ports differ."""
OTHER_ENV = {
    "KVSTRATA_CONFIG_FILE": "path of the YAML file",
    "KVSTRATA_TAKEOVER": "`1` makes vLLM's name `LMCacheConnectorV1` mean our connector even if lmcache is installed",
    "KVSTRATA_CACHE": "folder for compiled objects, and for what tests and the demo download",
    "KVSTRATA_VLLM": "lets the demo download vLLM whatever its size",
    "KVSTRATA_CUDA": "`require` makes the build fail if the CUDA compiler is missing",
    "KVSTRATA_UCX": "`require` makes the build fail if UCX's headers are missing, `off` builds without its engine",
    "KVSTRATA_WERROR": "`1` makes the build fail on warnings of the C++ compiler",
    "KVSTRATA_TESTING": "`1` allows adapters of type `fault_inject` and `KVSTRATA_FAILPOINTS`, which only tests need",
    "KVSTRATA_FAILPOINTS": "named points at which a test kills or stops the process",
}
"""Variables that begin with our prefix but are not settings."""

SURROGATE = re.compile("[\ud800-\udfff]")


def leaves(struct: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, field type) of every setting below a struct."""
    for field in msgspec.structs.fields(struct):
        inner = bare_type(field.type)
        name = f"{path}{field.name}"
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from leaves(inner, f"{name}.")
        else:
            yield name, field.type


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError that names the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="config") from None
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", field="config") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(
            f"{path}: must be a mapping of setting names, found {type(loaded).__name__}", field="config"
        )
    return loaded


def from_environment(struct: type[msgspec.Struct], environment: Mapping[str, str]) -> dict[str, Any]:
    """Nested settings from KVSTRATA_<SECTION>_<KEY> variables (KVSTRATA_CONTROLLER_… for the controller).

    Lists and mappings are written as YAML.  Variables of service links are left out (pod_links.py).
    """
    by_name = variables(struct)
    elsewhere = {
        name for other in (ServerSettings, ClientSettings, ControllerSettings) for name in variables(other)
    }
    nested: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV or is_pod_link(name, text):
            continue
        if name not in by_name and name in elsewhere:
            continue  # server, client and controller may share an environment
        if name not in by_name:
            raise ConfigError(
                f"environment: {name}: unknown variable{nearest(name, [*by_name, *OTHER_ENV])}", field=name
            )
        key, kind = by_name[name]
        value: Any = text
        if bare_type(kind) is not str:
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                # The text itself is not shown: it may hold a password.
                raise ConfigError(f"environment: {name}: is not valid YAML; correct it", field=name) from None
        put(nested, key, value)
    return nested


def variables(struct: type[msgspec.Struct]) -> dict[str, tuple[str, Any]]:
    """The environment variable of every setting below a struct, with its dotted key and type."""
    prefix = CONTROLLER_ENV_PREFIX if struct is ControllerSettings else ENV_PREFIX
    return {prefix + key.upper().replace(".", "_"): (key, kind) for key, kind in leaves(struct)}


def put(nested: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key in a nested mapping."""
    *parents, last = dotted.split(".")
    for parent in parents:
        nested = nested.setdefault(parent, {})
    nested[last] = value


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, mapping by mapping; lists are replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def check_keys(struct: type[msgspec.Struct], values: Mapping[str, Any], source: str, path: str = "") -> None:
    """Raise ConfigError, with the nearest known key, for the first key that `struct` does not have."""
    fields = {field.name: bare_type(field.type) for field in msgspec.structs.fields(struct)}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{source}: {path}{key}: unknown key{nearest(key, fields)}", field=path + key)
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{source}: {path}{key}: must be a mapping, found {quoted(key, value)}", field=path + key
                )
            check_keys(inner, value, source, f"{path}{key}.")


def odd_value(value: Any, path: str = "") -> tuple[str, str, Any] | None:
    """Find the first infinity, not-a-number or lone surrogate in nested values: (path, demand on the value, value).

    YAML and JSON can spell these; no setting accepts them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return path, "must be a finite number", value
    if isinstance(value, str) and SURROGATE.search(value):
        return path, "must be valid Unicode text, without lone surrogates", value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str) and SURROGATE.search(key):
                return path, "must have names of valid Unicode text, without lone surrogates", key
            if found := odd_value(inner, f"{path}.{key}" if path else str(key)):
                return found
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if found := odd_value(inner, f"{path}[{number}]"):
                return found
    return None


def convert(struct: type[S], values: Mapping[str, Any], source: str) -> S:
    """Settings from nested values. Raises ConfigError that names the source, the key, the value and what is wrong."""
    if odd := odd_value(values):
        path, must, found = odd
        raise ConfigError(f"{source}: {path or '(top)'}: {must}, found {found!a:.80}", field=path)
    check_keys(struct, values, source)
    try:
        return msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        says, _, where = str(error).partition(" - at `$")
        dotted = where.rstrip("`").lstrip(".")
        found = quoted(_last(dotted), _look_up(values, dotted))
        raise ConfigError(
            f"{source}: {dotted or '(top)'}: {says[:1].lower()}{says[1:]}, found {found}", field=dotted
        ) from None


def load(
    struct: type[S],
    *,
    file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> S:
    """Settings from a file, the environment and flags (nested mappings); an error names the source that is wrong."""
    layers: list[tuple[str, dict[str, Any]]] = []
    if file:
        layers.append((str(file), read_yaml(file)))
    if environment is not None:
        layers.append(("environment", from_environment(struct, environment)))
    layers.append(("flags", dict(flags or {})))
    values: dict[str, Any] = {}
    for source, layer in layers:
        convert(struct, layer, source)  # each source alone, so that an error names it
        values = merge(values, layer)
    return convert(struct, values, "settings")


def bare_type(kind: Any) -> Any:
    """A field's type without Annotated and without `| None`."""
    if typing.get_origin(kind) is typing.Annotated:
        return bare_type(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        others = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return bare_type(others[0]) if len(others) == 1 else kind
    return kind


def _last(dotted: str) -> str:
    """The name of the setting itself, without the number of an item."""
    return re.sub(r"\[\d+\]$", "", dotted.rpartition(".")[2])


def _look_up(values: Any, dotted: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", dotted):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            break
    return values
