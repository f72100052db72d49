"""docs/configuration.md from the settings structs."""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.demands import bare_type
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.load import ONLY_TESTS, OTHER_ENV
from kvstrata.config.model import ServerSettings

_INTRO = """# Configuration

Generated from the code by `make docs`; to change it, change the structs in `src/kvstrata/config`.

Settings come from these sources; if several name a setting, the last one in the list wins:

- `lmcache-server`: defaults, the YAML file of `--config` (or of `KVSTRATA_CONFIG_FILE`),
  `KVSTRATA_<SECTION>_<KEY>` variables, flags.
- The vLLM connector: the YAML file in `LMCACHE_CONFIG_FILE`, `LMCACHE_<KEY>` variables,
  `kv_connector_extra_config`.
- `lmcache-controller`: defaults, the YAML file of `--config`, `KVSTRATA_CONTROLLER_<SECTION>_<KEY>`
  variables, flags.
- `lmcache-gateway`: defaults, the YAML file of `--config`, `KVSTRATA_GATEWAY_<SECTION>_<KEY>` variables, flags.

Service variables that Kubernetes or Docker set (`KVSTRATA_PORT=tcp://10.0.0.1:80`, `…_SERVICE_HOST`) are ignored. An
empty variable counts as not set, and quotes around a whole value, which `docker --env-file` keeps, are removed. Files
are YAML 1.2: `no`, `off` and `22:30` are text, `0700` is 700, keys are taken literally, and a duplicate key is an
error; in a file for LMCache `yes` and `on` are true. Shell variables (`$HOME`) are refused in paths; `~` is your home.
A wrong key or value stops the start; one message names all errors and what each value must be. Case does not matter in
words that a setting lists (`lru` is `LRU`). One file may have the settings of a server and of its engines. `configs/`
has working files. For LMCache's names see [Coming from LMCache](coming-from-lmcache.md).
"""


def rows(struct: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type and bounds, default, meaning) of every setting below a struct."""
    for field in msgspec.structs.fields(struct):
        inner = bare_type(field.type)
        name = path + field.name
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from rows(inner, name + ".")
            continue
        default: Any = field.default
        if default is msgspec.NODEFAULT:
            default = (
                field.default_factory() if field.default_factory is not msgspec.NODEFAULT else "required"
            )
        shown = "not set" if default is None else '""' if default == "" else str(default)
        yield name, _kind(field.type), shown, _meaning(field.type)


def reference() -> str:
    """The whole page."""
    parts = [_INTRO]
    for title, struct in (
        ("Server", ServerSettings),
        ("vLLM connector and other clients", ClientSettings),
        ("Controller", ControllerSettings),
        ("Gateway", GatewaySettings),
    ):
        parts.append(f"\n## {title}\n\n| key | values | default | meaning |\n|---|---|---|---|\n")
        parts += [
            f"| `{key}` | {kind} | `{default}` | {says} |\n" for key, kind, default, says in rows(struct)
        ]
    parts.append(
        "\n## Other variables\n\n| variable | meaning |\n|---|---|\n"
        + "".join(f"| `{name}` | {says} |\n" for name, says in OTHER_ENV.items() if name not in ONLY_TESTS)
    )
    return "".join(parts)


def _kind(kind: Any) -> str:
    bounds = ""
    if typing.get_origin(kind) is typing.Annotated:
        kind, *metas = typing.get_args(kind)
        for meta in metas:
            marks = (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
            bounds += "".join(f", {mark} {bound}" for mark, bound in marks if bound is not None)
    inner = bare_type(kind)
    if inner is not kind:
        return _kind(next((arg for arg in typing.get_args(kind) if arg is not type(None)), kind)) + bounds
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    names = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", Any: "any"}
    origin = {list: "list", dict: "mapping"}.get(typing.get_origin(kind), str(kind))
    return names.get(kind, origin) + bounds


def _meaning(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Annotated:
        return next((meta.description for meta in typing.get_args(kind)[1:] if meta.description), "")
    return ""
