"""The one rule by which pages, answers, printed settings and errors leave out secret values.

The text of a field is shown only if fields of its name are known to hold no secret (`SHOWN`), or only the location of a
secret (`REFERENCE`).  The text of any other field is left out, including that of an SDK's option that is not listed
here.  Numbers, true, false and null are shown, unless the field's name says that the value is a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvstrata.text import LEFT_OUT as SECRET_LEFT_OUT
from kvstrata.text import one_line, remember_secret, without_credentials

__all__ = ["SECRET_LEFT_OUT", "masked", "quoted", "remember_secrets", "scrubbed", "secrets_in", "shown"]

_WORDS = (
    r"pass(?:word|wd|phrase)?|pwd|secret|token|credentials?|auth(?:orization)?|bearer|cookie|signature|sas"
    r"|(?:api|access|private|account|customer|service)[_-]?key|connection_string|dsn"
)
SECRET = re.compile(
    rf"(?:^|(?<!_per)[_\-.])(?:{_WORDS})(?:$|[_\-.])|key(?:_base64)?$|apikey|password|secret", re.IGNORECASE
)
"""Names of fields whose value is never shown, whatever it is."""
REFERENCE = re.compile(r"_(file|env)$", re.IGNORECASE)
"""Endings of fields that name the place of a secret; their text is shown."""
SHOWN = frozenset({
    # settings
    "advertise", "advertise_url", "allowed_hosts", "controllers", "controller", "endpoints", "engine", "engine_url",
    "envoy",
    "fidelity", "eviction_policy", "gateways", "host", "hosts", "http_host", "instance_id", "listen",
    "load", "load_mode", "log_format", "log_level", "monitor_host", "numa", "otlp_endpoint", "peer_hosts",
    "prefix",
    "request_tenants", "roots",
    "record", "segment_dir", "slo", "snapshot_dir", "socket_dir", "split", "store", "tenant",
    "types", "url", "urls", "user", "why", "zone",
    # entries of l2_adapters
    "base_path", "bucket", "class_name", "codec", "eviction", "faults", "isolation", "key_prefix", "max_capacity_gb",
    "config_class_name", "module_path", "name", "policy", "pool", "read_ahead_size", "relative_tmp_dir", "s3_endpoint",
    "sentinel_master", "sentinels", "serde", "startup_nodes", "tls_server_name",
    "type", "username", "num_read_workers", "read_max_bytes_in_flight",
    # options of Mooncake's setup
    "global_segment_size", "ipc_socket_path", "local_buffer_size", "local_hostname", "master_server_addr",
    "metadata_server", "protocol", "rdma_devices", "ssd_offload_path", "tenant_id",
    # options of obstore
    "account_name", "conditional_put", "connect_timeout", "endpoint", "proxy_url", "region", "timeout",
})  # fmt: skip
"""Names of fields whose text is shown; tests/unit/config/test_secrets.py fails for a field of ours without a rule."""
OBJECTS = frozenset({"adapter_params", "inner", "l2_adapters", "options", "replicate", "setup"})
"""Names of fields that contain other fields. A text given for such a field is not shown, since it may contain them."""
_NAMED = re.compile(
    rf"(\b[\w-]{{0,24}}(?:{_WORDS})[\w-]{{0,24}}[\"']?\s{{0,3}}[:=]\s{{0,3}})"
    r"(?:(?:bearer|basic|digest)\s+)?(?:\"[^\"]*\"?|'[^']*'?|[^\s,;)}\]]+)",
    re.IGNORECASE,
)
MAX_FOREIGN_CHARS = 1_000
_REDIS = re.compile(r"\bAUTH(?:\s+\S+){1,2}")


def masked(name: str, text: str) -> str:
    """The text of field `name` as it may be shown: without the secret, but with the path or variable that holds one."""
    if not text:
        return text
    if REFERENCE.search(name) or (name in SHOWN and not SECRET.search(name)):
        return without_credentials(text)
    return SECRET_LEFT_OUT


def shown(entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """An entry without its secrets, and the paths of the fields that held them."""
    left_out: list[str] = []

    def public(value: Any, name: str, path: str) -> Any:
        if isinstance(value, Mapping):
            return {
                key: public(one, str(key), f"{path}.{key}" if path else str(key))
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [public(one, name, f"{path}[{i}]") for i, one in enumerate(value)]
        if isinstance(value, str):
            text = masked(name, value)
        elif value is None or isinstance(value, bool) or not SECRET.search(name) or REFERENCE.search(name):
            return value
        else:
            text = SECRET_LEFT_OUT
        if text != value:
            left_out.append(path)
        return text

    return public(entry, "", ""), left_out


def quoted(name: str, value: object) -> str:
    """The wrong value of field `name` as an error shows it: at most 80 characters of it, without secrets."""
    if (SECRET.search(name) and not REFERENCE.search(name)) or (name in OBJECTS and isinstance(value, str)):
        return SECRET_LEFT_OUT
    if isinstance(value, Mapping | list | tuple):
        value = shown({name: value})[0][name]
    return f"{value!r:.80}"


def secrets_in(entry: Mapping[str, Any]) -> list[str]:
    """The paths of the entry's fields whose names say that they hold a secret."""
    return [
        path for path in shown(entry)[1] if SECRET.search(re.sub(r"\[\d+\]$", "", path.rpartition(".")[2]))
    ]


def remember_secrets(entry: Mapping[str, Any]) -> None:
    """Leave every secret in the entry out of errors and log lines from now on."""
    for text in _secrets_in(entry, ""):
        remember_secret(text)


def _secrets_in(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _secrets_in(one, str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _secrets_in(one, name)
    elif isinstance(value, str) and SECRET.search(name) and not REFERENCE.search(name):
        yield value


def scrubbed(foreign: object, most_chars: int = 300) -> str:
    """The text of another library's exception, on one line, without anything that may be a credential."""
    text = _NAMED.sub(rf"\1{SECRET_LEFT_OUT}", str(foreign)[:MAX_FOREIGN_CHARS])
    return one_line(_REDIS.sub(f"AUTH {SECRET_LEFT_OUT}", text), most_chars)
