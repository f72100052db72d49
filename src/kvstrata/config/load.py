"""Reads settings from a YAML file, the environment and flags; a later source overrides an earlier one, and all override
the defaults.

Errors name the source, the key as the source spells it, and the value, and say what the value must be (demands.py).  An
unknown key is an error that suggests the nearest name.  All errors are reported together.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kvstrata import patience
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.common_model import LIMIT
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.demands import Problem, bare_type, canonical, nearest, problems
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError, together

S = TypeVar("S", bound=msgspec.Struct)

ENV_PREFIX = "KVSTRATA_"
OWN_ENV_PREFIX: dict[type[msgspec.Struct], str] = {
    ControllerSettings: "KVSTRATA_CONTROLLER_",
    GatewaySettings: "KVSTRATA_GATEWAY_",
}
"""Prefixes of the variables of processes that may share an environment with a server, whose ports differ."""
OTHER_ENV = {
    "KVSTRATA_CONFIG_FILE": "path of the YAML file",
    "KVSTRATA_TAKEOVER": "`1` makes LMCache's connector names select ours even if lmcache is installed",
    "KVSTRATA_CACHE": "folder for compiled objects and for downloads of tests and the demo",
    "KVSTRATA_CUDA": "`require` makes the build fail if the CUDA compiler is missing",
    "KVSTRATA_WERROR": "`1` makes the build fail on warnings of the C++ compiler",
    "KVSTRATA_SIMD": "for measurements: kernels use no AVX-512 (`avx2`), no AVX (`sse`), or no extensions (`none`)",
    "KVSTRATA_TESTING": "`1` enables variables that only tests need",
    "KVSTRATA_FAILPOINTS": "named points at which a test kills or stops the process",
    "KVSTRATA_PATIENCE": "factor of every limit after which a party counts as silent",
    "KVSTRATA_TEST_EVENTS": "datagram socket that is told of each log line",
}
"""Variables that begin with our prefix but are not settings."""
SIMD = ("", "avx2", "sse", "none")
"""Values of `KVSTRATA_SIMD`, which native code reads (`base/cpu.h`)."""

ONLY_TESTS = ("KVSTRATA_FAILPOINTS", "KVSTRATA_PATIENCE", "KVSTRATA_TEST_EVENTS")
"""Variables that need `KVSTRATA_TESTING` and that the reference leaves out."""

NAMES_PATH = re.compile(r"(?:^|[._])(?:path|dir|file|folder|root)s?(?:\[\d+\])?$")
"""Names of settings that are paths."""
VARIABLE = re.compile(r"\$(?:\{|[A-Za-z_])")
SURROGATE = re.compile("[\ud800-\udfff]")
NO_NAMES: Mapping[str, str] = MappingProxyType({})


@cache
def _fields(
    struct: type[msgspec.Struct], path: str = ""
) -> tuple[tuple[str, msgspec.structs.FieldInfo], ...]:
    """(Dotted key, field) of every setting below a struct."""
    found: list[tuple[str, msgspec.structs.FieldInfo]] = []
    for field in msgspec.structs.fields(struct):
        inner, name = bare_type(field.type), f"{path}{field.name}"
        is_struct = isinstance(inner, type) and issubclass(inner, msgspec.Struct)
        found += _fields(inner, f"{name}.") if is_struct else [(name, field)]
    return tuple(found)


def leaves(struct: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """(Dotted key, field type) of every setting below a struct."""
    return [(name, field.type) for name, field in _fields(struct)]


def with_patience(
    struct: type[msgspec.Struct], values: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, Any]:
    """`values`, with each limit that they do not set at its default times the factor of patience.py."""
    raised: dict[str, Any] = {}
    if (times := patience.factor(environment)) > 1:
        for key, field in _fields(struct):
            for limit in (meta for meta in getattr(field.type, "__metadata__", ()) if meta.extra == LIMIT):
                value = min(field.default * times, math.inf if limit.le is None else limit.le)
                put(raised, key, type(field.default)(value))
    return merge(raised, values)


def parse_yaml(text: str) -> Any:
    """The value that is written as YAML. Raises ConfigError, whose message may show the text."""
    # A process that reads no YAML starts without it, 10 ms sooner.
    import yaml

    from kvstrata.config import yaml_text

    try:
        return yaml_text.load(text)
    except yaml.YAMLError as error:
        raise ConfigError(" ".join(str(error).split())) from None


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError that names the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="config") from None
    try:
        loaded = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: not YAML: {error.message}", field="config") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(
            f"{path}: must be a mapping of setting names, found {type(loaded).__name__}", field="config"
        )
    return loaded


def unquoted(text: str) -> str:
    """The text of a variable without a pair of quotes around it, which `docker --env-file` does not take away."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def from_environment(struct: type[msgspec.Struct], environment: Mapping[str, str]) -> dict[str, Any]:
    """Nested settings from KVSTRATA_<SECTION>_<KEY> variables (for controller and gateway see OWN_ENV_PREFIX).

    Lists and mappings are written as YAML.  An empty variable is not set.  Variables of service links are left out.
    Raises ConfigError for all wrong variables; their values are not checked.
    """
    by_name = variables(struct)
    elsewhere = {
        name
        for other in (ServerSettings, ClientSettings, ControllerSettings, GatewaySettings)
        for name in variables(other)
    }
    nested: dict[str, Any] = {}
    wrong: list[ConfigError] = []
    if (simd := environment.get("KVSTRATA_SIMD", "")) not in SIMD:
        says = f"KVSTRATA_SIMD: must be avx2, sse or none, or not set, found {simd!r:.40}"
        wrong.append(ConfigError(f"environment: {says}", field="KVSTRATA_SIMD"))
    try:
        patience.check(environment)
    except ConfigError as error:
        wrong.append(ConfigError(f"environment: {error.message}", field=error.field))
    for name, text in environment.items():
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV or is_pod_link(name, text):
            continue
        if name not in by_name and name in elsewhere:
            continue  # server, client, controller and gateway may share an environment
        if name not in by_name:
            says = f"unknown variable{nearest(name, [*by_name, *OTHER_ENV])}"
            wrong.append(ConfigError(f"environment: {name}: {says}", field=name))
            continue
        key, kind = by_name[name]
        if not (text := unquoted(text)):
            continue
        value: Any = text
        if bare_type(kind) is not str:
            try:
                value = parse_yaml(text)
            except ConfigError:
                # The text itself is not shown: it may hold a password.
                says = "is not valid YAML; correct it"
                wrong.append(ConfigError(f"environment: {name}: {says}", field=name))
                continue
        put(nested, key, value)
    if wrong:
        raise together(wrong)
    return nested


@cache
def variables(struct: type[msgspec.Struct]) -> Mapping[str, tuple[str, Any]]:
    """The environment variable of every setting below a struct, with its dotted key and type."""
    prefix = OWN_ENV_PREFIX.get(struct, ENV_PREFIX)
    return MappingProxyType(
        {prefix + key.upper().replace(".", "_"): (key, kind) for key, kind in leaves(struct)}
    )


def variable_names(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The environment variable of every dotted key."""
    return {key: name for name, (key, _) in variables(struct).items()}


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


def unusable_value(value: Any, path: str = "") -> tuple[str, str, Any] | None:
    """Find the first infinity, not-a-number or text that cannot be used in nested values: (path, demand, value).

    YAML and JSON can spell these; no setting accepts them.  Text must suit the locale too, since it may be a path, and
    a path must not name a variable of the shell.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return path, "must be a finite number", value
    if isinstance(value, str) and SURROGATE.search(value):
        return path, "must be valid Unicode text, without lone surrogates", value
    if isinstance(value, str):
        if NAMES_PATH.search(path) and VARIABLE.search(value):
            return path, "must be written out, since shell variables are not expanded here", value
        try:
            os.fsencode(value)
        except UnicodeEncodeError as error:
            return (
                path,
                f"must be text that the locale can spell ({error.encoding}); start with LC_ALL=C.UTF-8",
                value,
            )
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str) and SURROGATE.search(key):
                return path, "must have names of valid Unicode text, without lone surrogates", key
            if found := unusable_value(inner, f"{path}.{key}" if path else str(key)):
                return found
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if found := unusable_value(inner, f"{path}[{number}]"):
                return found
    return None


def convert(
    struct: type[S], values: Mapping[str, Any], source: str, *, names: Mapping[str, str] = NO_NAMES
) -> S:
    """Settings from nested values. Raises ConfigError for all wrong keys and values, each with its source.

    `names`: how the source spells a dotted key.
    """
    if unusable := unusable_value(values):
        path, must, found = unusable
        wrong = [Problem(path, f"{must}, found {found!a:.80}")]
    else:
        values = canonical(struct, values)
        wrong = list(problems(struct, values))
    if wrong:
        errors = [
            ConfigError(f"{source}: {names.get(path, path) or '(top)'}: {says}", field=path)
            for path, says in wrong
        ]
        raise together(errors)
    return msgspec.convert(values, struct)


def _read_file(struct: type[msgspec.Struct], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a file. A server's file may have its engines' settings too, which the engines read."""
    values = read_yaml(path)
    if struct is ServerSettings:
        others = set(ClientSettings.__struct_fields__) - set(ServerSettings.__struct_fields__)
        values = {key: value for key, value in values.items() if key not in others}
    return values


def load(
    struct: type[S],
    *,
    file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    flag_names: Mapping[str, str] = NO_NAMES,
    wrong_flags: Iterable[ConfigError] = (),
) -> S:
    """Settings from a file, the environment and flags (nested mappings).

    Raises ConfigError for everything that is wrong in any source.  `flag_names`: the flag of a dotted key;
    `wrong_flags`: what is wrong about the command line besides values.
    """
    wrong = list(wrong_flags)
    values: dict[str, Any] = {}

    def add(source: str, names: Mapping[str, str], read: Callable[[], Mapping[str, Any]]) -> None:
        nonlocal values
        try:
            layer = read()
            convert(struct, layer, source, names=names)  # each source alone, so that an error names it
            values = merge(values, layer)
        except ConfigError as error:
            wrong.append(error)

    if file:
        add(str(file), NO_NAMES, partial(_read_file, struct, file))
    if environment is not None:
        add("environment", variable_names(struct), partial(from_environment, struct, environment))
    add("command line", flag_names, lambda: flags or {})
    if wrong:
        raise together(wrong)
    return convert(struct, with_patience(struct, values, environment or {}), "settings")


# --- settings of which some are replaced by newer ones ----------------------------------------------------------------


def value_of(settings: msgspec.Struct, key: str) -> Any:
    """The value of a dotted key; None in a part that is not there."""
    found: Any = settings
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def changes(before: S, after: S) -> set[str]:
    """The dotted keys whose values differ."""
    return {key for key, _ in leaves(type(before)) if value_of(before, key) != value_of(after, key)}


def replaced(settings: S, newer: S, keys: Iterable[str]) -> S:
    """`settings` with the values of these dotted keys from `newer`."""
    for key in keys:
        settings = _with(settings, key.split("."), value_of(newer, key))
    return settings


def _with(settings: S, path: list[str], value: Any) -> S:
    first, *rest = path
    if rest:
        value = _with(getattr(settings, first), rest, value)
    return msgspec.structs.replace(settings, **{first: value})


class Changes(NamedTuple, Generic[S]):
    """The changes of a reload in a running process."""

    in_force: S
    """The settings afterwards: those that can change while the process runs are the new ones."""
    applied: set[str]
    """Keys that change now, and keys of files that have another content."""
    restart: set[str]
    """Keys whose new values need a restart."""

    def shown(self) -> dict[str, object]:
        """The changed keys for the log, never their values."""
        words = (("changed", self.applied), ("needs_restart", self.restart))
        return {word: ",".join(sorted(keys)) or "nothing" for word, keys in words}


def sorted_out(in_force: S, newer: S, live: Iterable[str], files: Iterable[str] = ()) -> Changes[S]:
    """Split changes by what applies now. `live`: keys that can; `files`: keys that can, from one file to another."""
    changed = changes(in_force, newer)
    movable = {key for key in files if value_of(in_force, key) and value_of(newer, key)}
    applied = changed & {*live, *movable}
    return Changes(replaced(in_force, newer, applied), applied, changed - applied)


# --- variables that are not for us ------------------------------------------------------------------------------------

_LINK = re.compile(
    r"(?:KVSTRATA|LMCACHE)_.*?(?:"
    r"_?PORT(?:_\d+_(?:TCP|UDP|SCTP))?=(?:tcp|udp|sctp)://\S+:\d+"
    r"|_?PORT_\d+_(?:TCP|UDP|SCTP)_(?:PROTO|PORT|ADDR)=\S+"
    r"|_?SERVICE_HOST=[0-9A-Fa-f:.]+"
    r"|_?SERVICE_PORT(?:_[A-Z0-9_]+)?=\d{1,5})"
)
"""Variables that Kubernetes sets in pods for each service of the namespace, and Docker for linked containers. A service
`kvstrata` gives KVSTRATA_SERVICE_HOST and KVSTRATA_PORT=tcp://10.0.0.1:8080, while KVSTRATA_PORT=8080 is a setting."""


def is_pod_link(name: str, value: str) -> bool:
    """Whether Kubernetes or Docker has set this variable for a service whose name begins like ours."""
    return _LINK.fullmatch(f"{name}={value}") is not None


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without our settings, for a child in which an SDK runs."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV
    }
