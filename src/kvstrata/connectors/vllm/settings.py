"""The connector's settings: `kv_connector_extra_config`, then the environment, then a file; the first wins.

- extra config: `lmcache.mp.*` as users of LMCache have it; our settings as `kvstrata.NAME`, `lmcache.NAME` or `NAME`;
- environment: `KVSTRATA_NAME`, then `LMCACHE_NAME`;
- file: the YAML in `KVSTRATA_CONFIG_FILE` or `LMCACHE_CONFIG_FILE`.

Server and engine may share one file and one environment: settings of the server are ignored here.  Every name that has
no effect here is logged once; an unknown or refused name stops the start with advice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from kvstrata.config.lmcache_names import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    CONNECTOR_EXTRA,
    CONNECTOR_EXTRA_PREFIXES,
    translate,
)
from kvstrata.config.load import bare_type, convert, from_environment, leaves, read_yaml
from kvstrata.config.model import ClientSettings, ServerSettings
from kvstrata.config.pod_links import is_pod_link, pod_link_notes
from kvstrata.errors import ConfigError

logger = logging.getLogger("vllm.kvstrata")

OWN = {field.name: bare_type(field.type) for field in msgspec.structs.fields(ClientSettings)}
_SERVER_TOP = {field.name for field in msgspec.structs.fields(ServerSettings)} - set(OWN)
_SERVER_ENVIRONMENT = {"KVSTRATA_" + key.upper().replace(".", "_") for key, _ in leaves(ServerSettings)} - {
    "KVSTRATA_" + name.upper() for name in OWN
}
FILE_VARIABLES = ("KVSTRATA_CONFIG_FILE", "LMCACHE_CONFIG_FILE")
_FOREIGN_ENVIRONMENT = {
    "LMCACHE_USE_EXPERIMENTAL": "there is one implementation",
    "LMCACHE_TRACK_USAGE": "nothing is reported to anybody",
    "LMCACHE_LOG_LEVEL": "the log follows vLLM's; set VLLM_LOGGING_LEVEL",
}
"""Variables that users of LMCache export although these are not configuration keys, and why each has no effect."""
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def load_settings(
    extra: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[ClientSettings, list[str]]:
    """The settings, and lines to log about names without effect. Raises ConfigError naming source and key."""
    notes: list[str] = []
    merged: dict[str, Any] = {}
    for source, layer in (
        _from_file(environment, notes),
        ("environment", _from_environment(environment, notes)),
        ("kv_connector_extra_config", _from_extra(extra, notes)),
    ):
        _read_host(layer, source)
        convert(ClientSettings, layer, source)  # so that an error names the source
        merged.update(layer)
    settings = convert(ClientSettings, merged, "settings")
    if settings.gpu_fp8 and settings.fidelity != "fp8":
        raise ConfigError(
            f"gpu_fp8: rounds KV to 8 bits, but fidelity is {settings.fidelity!r}; set fidelity to 'fp8', or "
            "gpu_fp8 to false",
            field="gpu_fp8",
        )
    if settings.gpu_fp8 and settings.gpu_copy_engine == "dma":
        raise ConfigError(
            "gpu_fp8: the gpu_copy_engine 'dma' cannot round; set it to 'auto', 'kernel' or 'staged', or gpu_fp8 "
            "to false",
            field="gpu_fp8",
        )
    if settings.host not in LOOPBACK:
        where = settings.socket_dir or "the default socket directory"
        notes.append(
            f"lmcache.mp.host is {settings.host!r}: KV is shared through memory, so the server must run on "
            f"this machine; it is looked for in {where}, not over the network"
        )
    return settings, notes


def _from_file(environment: Mapping[str, str], notes: list[str]) -> tuple[str, dict[str, Any]]:
    path = next((environment[name] for name in FILE_VARIABLES if environment.get(name)), "")
    if not path:
        return "", {}
    values = {key: value for key, value in read_yaml(path).items() if key not in _SERVER_TOP}
    settings, said = translate(values, source=path, table=CLIENT_KEYS, prefixes=CLIENT_KEY_PREFIXES, own=OWN)
    notes.extend(said)
    return path, settings


def _from_environment(environment: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    theirs: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith("LMCACHE_") or name in FILE_VARIABLES or is_pod_link(name, text):
            continue
        if name in _FOREIGN_ENVIRONMENT:
            notes.append(f"environment: {name} has no effect: {_FOREIGN_ENVIRONMENT[name]}")
            continue
        key = name.removeprefix("LMCACHE_").lower()
        theirs[key] = _parse(key, text, name)
    settings, said = translate(
        theirs, source="environment (LMCACHE_…)", table=CLIENT_KEYS, prefixes=CLIENT_KEY_PREFIXES, own=OWN
    )
    notes.extend(said)
    notes.extend(pod_link_notes(environment))
    ours = {name: text for name, text in environment.items() if name not in _SERVER_ENVIRONMENT}
    settings.update(from_environment(ClientSettings, ours))
    return settings


def _from_extra(extra: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    mp, plain = {}, {}
    for key, value in extra.items():
        if key.startswith("lmcache.mp."):
            mp[key] = value
        elif key.startswith(("kvstrata.", "lmcache.")):
            plain[key.split(".", 1)[1]] = value
        else:
            plain[key] = value
    source = "kv_connector_extra_config"
    settings, said = translate(plain, source=source, table=CLIENT_KEYS, prefixes=CLIENT_KEY_PREFIXES, own=OWN)
    notes.extend(said)
    over, said = translate(
        mp, source=source, table=CONNECTOR_EXTRA, prefixes=CONNECTOR_EXTRA_PREFIXES, own=()
    )
    notes.extend(said)
    for key in ("port", "save_decode_cache"):
        # Deployments pass these values through shell variables, so strings are common.
        if isinstance(over.get(key), str):
            over[key] = _parse(key, over[key], f"lmcache.mp.{key}")
    settings.update(over)
    return settings


def _parse(key: str, text: str, name: str) -> Any:
    """The value of a variable's text: unchanged for settings of type str, else read as YAML."""
    if OWN.get(key) is str:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"environment: {name}: is not valid YAML; correct it", field=name) from None


def _read_host(layer: dict[str, Any], source: str) -> None:
    """`tcp://host[:port]`, as users write it, becomes a host and, if it names one, a port."""
    host = layer.get("host")
    if not isinstance(host, str) or "://" not in host:
        return
    try:
        parts = urlsplit(host)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{source}: host: {host!r:.80} is not an address", field="host") from None
    if parts.scheme != "tcp" or not parts.hostname:
        raise ConfigError(f"{source}: host: {host!r:.80} must look like tcp://localhost", field="host")
    layer["host"] = parts.hostname
    if port is not None:
        layer.setdefault("port", port)
