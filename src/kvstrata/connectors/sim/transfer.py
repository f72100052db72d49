"""Parses vLLM's `--kv-transfer-config` for the simulated engine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.lmcache import CONNECTORS
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError

FLAG = "kv-transfer-config"
MODULE = "kvstrata.connectors.vllm"
ROLES = {"kv_both": (True, True), "kv_producer": (False, True), "kv_consumer": (True, False)}
"""By role, whether KV is loaded and whether it is stored."""
POLICY = "recompute"


class Transfer(NamedTuple):
    """What a simulated engine's connector does."""

    settings: ClientSettings
    may_load: bool
    may_store: bool


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of vLLM's KVTransferConfig that have an effect here."""

    kv_connector: str
    kv_role: str
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = POLICY
    kv_connector_extra_config: dict[str, Any] = {}


def read_transfer(text: str, environment: Mapping[str, str]) -> tuple[Transfer, list[str]]:
    """Read the JSON of the flag; also returns lines to log about settings without effect.

    Raises ConfigError that names the field.
    """
    try:
        fields = msgspec.json.decode(text, type=_Fields)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `")
        raise _wrong(path.removesuffix("`").removeprefix("$."), _advised(what)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _wrong("", f"{text!r:.80} is not JSON: {error}") from None
    _check(fields)
    settings, notes = load_settings(fields.kv_connector_extra_config, environment)
    if settings.fidelity == "fp8":
        raise _wrong("fidelity", "KV of a simulated engine lies in host memory; set fidelity to 'lossless'")
    if settings.load_mode == "sync":
        raise _wrong(
            "load_mode",
            "'sync' cannot be simulated, since vLLM's default, asynchronous scheduling always loads beside its steps; "
            "set load_mode to 'auto' or 'async'",
        )
    may_load, may_store = ROLES[fields.kv_role]
    return Transfer(settings, may_load, may_store), notes


def _check(fields: _Fields) -> None:
    if fields.kv_connector not in CONNECTORS:
        raise _wrong(
            "kv_connector",
            f"only {', '.join(CONNECTORS)} can be simulated, found {fields.kv_connector!r:.80}",
        )
    paths = (None, MODULE, *CONNECTORS[fields.kv_connector])
    if fields.kv_connector_module_path not in paths:
        raise _wrong(
            "kv_connector_module_path",
            f"only {MODULE} can be simulated, found {fields.kv_connector_module_path!r:.80}",
        )
    if fields.kv_role not in ROLES:
        raise _wrong("kv_role", f"must be one of {', '.join(ROLES)}, found {fields.kv_role!r:.80}")
    if fields.kv_load_failure_policy != POLICY:
        raise _wrong(
            "kv_load_failure_policy",
            f"a simulated engine computes what could not be loaded, found {fields.kv_load_failure_policy!r:.80}; set "
            f"it to {POLICY!r}",
        )


def _advised(what: str) -> str:
    """An error of the decoder, and for an unknown field the nearest one."""
    _, unknown, rest = what.partition("unknown field `")
    if not unknown:
        return what
    name, known = rest.removesuffix("`"), msgspec.structs.fields(_Fields)
    near = difflib.get_close_matches(name, [field.name for field in known], n=1)
    return f"{name!r:.80} has no effect on a simulated engine; " + (
        f"did you mean {near[0]!r}?" if near else "leave it out"
    )


def _wrong(field: str, what: str) -> ConfigError:
    where = f"--{FLAG}: {field}" if field else f"--{FLAG}"
    return ConfigError(f"{where}: {what}", field=field or FLAG)
