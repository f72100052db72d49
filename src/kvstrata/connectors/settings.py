"""A connector's settings: the engine's own option for it, then the environment, then a file; the first wins.

- the engine's option (vLLM's `kv_connector_extra_config`): LMCache's `lmcache.mp.*`; our settings as `kvstrata.NAME`,
  `lmcache.NAME` or `NAME`;
- environment: `KVSTRATA_NAME`, then `LMCACHE_NAME`;
- file: the YAML in `KVSTRATA_CONFIG_FILE` or `LMCACHE_CONFIG_FILE`.

Server and engine may share one file and one environment: settings of the server are ignored here.  Every name that has
no effect here is logged once.  An unknown name stops the start with advice, except in a file or variable for LMCache.
Numbers and booleans may be text, as in LMCache, since env files and shell variables can hold only text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, get_origin
from urllib.parse import urlsplit

import msgspec

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.demands import bare_type
from kvstrata.config.lmcache.fates import meant, translate
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    CONNECTOR_EXTRA,
    CONNECTOR_EXTRA_PREFIXES,
    FILE,
    engine_keys,
)
from kvstrata.config.load import (
    NO_NAMES,
    convert,
    from_environment,
    leaves,
    parse_yaml,
    read_yaml,
    variable_names,
    with_patience,
)
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError, together

OWN = {field.name: bare_type(field.type) for field in msgspec.structs.fields(ClientSettings)}
KINDS = OWN | {"host": str}
_SERVER_TOP = {field.name for field in msgspec.structs.fields(ServerSettings)} - set(OWN)
_SERVER_ENVIRONMENT = {"KVSTRATA_" + key.upper().replace(".", "_") for key, _ in leaves(ServerSettings)} - {
    "KVSTRATA_" + name.upper() for name in OWN
}
FILE_VARIABLES = ("KVSTRATA_CONFIG_FILE", FILE)
Layer = tuple[dict[str, Any], Mapping[str, str]]
"""The settings of one source, and how it spells their names."""
_YAML_1_1 = {"yes": True, "on": True, "no": False, "off": False}
"""Words that LMCache reads in its file as truth values, unlike kvstrata in its own."""
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def load_settings(
    extra: Mapping[str, Any], environment: Mapping[str, str], option: str = "kv_connector_extra_config"
) -> tuple[ClientSettings, list[str]]:
    """The settings, and lines to log about names without effect. Raises ConfigError for all that is wrong.

    `extra` comes from the engine's option of the name `option`.
    """
    notes: list[str] = []
    merged: dict[str, Any] = {}
    wrong: list[ConfigError] = []
    ours, theirs = (meant(environment.get(name)) or "" for name in FILE_VARIABLES)
    path = ours or theirs
    for source, read in (
        (path, partial(_from_file, path, bool(ours))),
        ("environment", partial(_from_environment, environment)),
        (option, partial(_from_extra, extra, option)),
    ):
        try:
            layer, names = read(notes)
            _take_host(layer, source, notes)
            convert(ClientSettings, layer, source, names=names)  # so that an error names the source
            merged.update(layer)
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise together(wrong)
    settings = convert(ClientSettings, with_patience(ClientSettings, merged, environment), "settings")
    return settings, notes


def _from_file(path: str, strict: bool, notes: list[str]) -> Layer:
    if not path:
        return {}, NO_NAMES
    words = {} if strict else _YAML_1_1
    values = {
        key: words.get(str(value).lower(), value)
        for key, value in read_yaml(path).items()
        if key not in _SERVER_TOP
    }
    settings, said = translate(
        values,
        source=path,
        table=CLIENT_KEYS,
        prefixes=CLIENT_KEY_PREFIXES,
        kinds=KINDS,
        own=OWN,
        strict=strict,
    )
    notes.extend(said)
    return settings, NO_NAMES


def _from_environment(environment: Mapping[str, str], notes: list[str]) -> Layer:
    names, said = engine_keys(environment, OWN)
    notes.extend(said)
    settings, said = translate(
        {key: _parse(key, environment[name], name) for key, name in names.items()},
        source="environment",
        table=CLIENT_KEYS,
        prefixes=CLIENT_KEY_PREFIXES,
        kinds=KINDS,
        own=OWN,
        names=names,
    )
    notes.extend(said)
    ours = {name: text for name, text in environment.items() if name not in _SERVER_ENVIRONMENT}
    own = from_environment(ClientSettings, ours)
    own_names = variable_names(ClientSettings)
    return settings | own, names | {key: own_names[key] for key in own}


def _from_extra(extra: Mapping[str, Any], source: str, notes: list[str]) -> Layer:
    mp, plain = {}, {}
    for key, value in extra.items():
        if key.startswith("lmcache.mp."):
            mp[key] = value
        elif key.startswith(("kvstrata.", "lmcache.")):
            plain[key.split(".", 1)[1]] = value
        else:
            plain[key] = value
    settings, said = translate(
        plain, source=source, table=CLIENT_KEYS, prefixes=CLIENT_KEY_PREFIXES, kinds=KINDS, own=OWN
    )
    notes.extend(said)
    over, said = translate(
        mp, source=source, table=CONNECTOR_EXTRA, prefixes=CONNECTOR_EXTRA_PREFIXES, kinds=KINDS
    )
    notes.extend(said)
    names = {key: f"lmcache.mp.{key}" for key in over}
    if "store" in over:
        lazy = meant(over["store"], bool)
        over["store"] = {True: "late", False: "commit"}.get(lazy, lazy) if isinstance(lazy, bool) else lazy
        names["store"] = "lmcache.mp.lazy_offload"
    return settings | over, names


def _parse(key: str, text: str, name: str) -> Any:
    """The value of a variable's text: for a setting that is a list, read as YAML."""
    if get_origin(OWN.get(key)) is not list:
        return text
    try:
        return parse_yaml(text)
    except ConfigError:
        raise ConfigError(f"environment: {name}: is not valid YAML; correct it", field=name) from None


def _take_host(layer: dict[str, Any], source: str, notes: list[str]) -> None:
    """Take LMCache's host of the server out of a layer; of `tcp://HOST:PORT`, as users write it, the port stays."""
    host = str(layer.pop("host", "localhost"))
    if "://" in host:
        try:
            parts = urlsplit(host)
            port = parts.port
        except ValueError:
            raise ConfigError(f"{source}: host: {host!r:.80} is not an address", field="host") from None
        if parts.scheme != "tcp" or not parts.hostname:
            raise ConfigError(f"{source}: host: {host!r:.80} must look like tcp://localhost", field="host")
        host = parts.hostname
        if port is not None:
            layer.setdefault("port", port)
    if host not in LOOPBACK:
        notes.append(
            f"{source}: the server's host is {host!r:.80}: KV is shared through memory, so the server must run on this "
            "machine; it is looked for in socket_dir, not over the network"
        )
