"""Which adapter entries an admin may add while the server runs: entries that reach only what the settings allow.

The permission to add an adapter gives an admin an L2 medium and nothing more: no access to the files of the server's
user, no free choice of where KV is sent, and no code to run.  An entry must satisfy all rules, which are checked before
anything is opened, read or imported:

1. The type is one of `l2.runtime.types`, and its medium declares what an entry reaches (`Medium.reach`).  A type that
   declares nothing (`plugin`, another package's type) can only be configured in the settings.
2. No field, at any depth, has a name that ends in `_file` or `_env`: such a field names the place of a secret.
3. Fields that a medium hands to its library are refused unless the medium lists them (`Medium.runtime_rest`).
4. A directory lies below one of `l2.runtime.roots` once all symbolic links are resolved, no other user can replace a
   folder on the path to it, and it is new, empty, or already holds a tier.
5. A host is one of `l2.runtime.hosts`.

An allowed host is trusted to redirect the server to further hosts (a cluster's `MOVED`, a sentinel's master).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.errors import ConfigError, NotPermitted
from kvstrata.storage import catalogue
from kvstrata.storage.common import COMMON
from kvstrata.storage.entry import entry_of, kind_of
from kvstrata.storage.structs import Place

NAMES_A_SECRET = re.compile(r"_(file|env)$", re.IGNORECASE)
"""Names of fields that say where a secret lies."""
MARK = ".kvstrata.lock"
"""A file of this name marks a directory as that of a tier."""
BY_NAME = "an adapter that the settings name (l2_adapters) can be added again by its name"
MAX_DEPTH = 16
HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")
BUCKET = re.compile(r"(?:s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*")


class RuntimeRules(NamedTuple):
    """The settings `l2.runtime`, checked."""

    types: tuple[str, ...]
    roots: tuple[str, ...]
    """Absolute paths."""
    hosts: tuple[str, ...]
    """`HOST`, `HOST:PORT` or `s3://BUCKET`, in lower case."""


def checked_rules(types: Sequence[str], roots: Sequence[str], hosts: Sequence[str]) -> RuntimeRules:
    """Check the settings `l2.runtime`, and return them as rules. Raises ConfigError."""
    for i, kind in enumerate(types):
        where = f"l2.runtime.types[{i}]"
        if catalogue.find(kind, where).medium.reach is None:
            raise ConfigError(
                f"{where}: {kind!r} cannot be added while the server runs, since this type does not declare what its "
                "entries reach; leave it out, and name the adapter in l2_adapters",
                field=where,
            )
    absolute = []
    for i, root in enumerate(roots):
        path = os.path.expanduser(root)
        if not _is_plain(path):
            where = f"l2.runtime.roots[{i}]"
            raise ConfigError(
                f"{where}: must be an absolute path without `..`, found {root!r:.80}", field=where
            )
        absolute.append(os.path.normpath(path))
    for i, host in enumerate(hosts):
        if not HOST.fullmatch(host) and not BUCKET.fullmatch(host):
            where = f"l2.runtime.hosts[{i}]"
            raise ConfigError(
                f"{where}: must be HOST, HOST:PORT or s3://BUCKET, found {host!r:.80}", field=where
            )
    return RuntimeRules(tuple(types), tuple(absolute), tuple(host.lower() for host in hosts))


def admitted(entry: str | Mapping[str, Any], rules: RuntimeRules, path: str) -> dict[str, Any]:
    """The entry to add, with the symbolic links in its directories resolved.

    Raises NotPermitted if the rules do not allow the entry, and ConfigError if the entry is invalid.
    """
    place = Place(path)
    return _admitted(entry_of(entry, path), rules, place, depth=0)


def _admitted(entry: Mapping[str, Any], rules: RuntimeRules, place: Place, depth: int) -> dict[str, Any]:
    for where, name, value in _fields(entry, place.path):
        if NAMES_A_SECRET.search(name):
            raise NotPermitted(
                f"{where}: {value!r:.80} names the place of a secret, which is not allowed in an adapter that is added "
                f"while the server runs; {BY_NAME}",
                field=where,
            )
    kind = kind_of(entry, place)
    allowed = {catalogue.reference_of(one) for one in rules.types}
    if catalogue.reference_of(kind) not in allowed:
        catalogue.find(kind, place.at("type"))  # a misspelt type gets its own error
        raise NotPermitted(
            f"{place.at('type')}: {kind!r:.80} may not be added while the server runs (allowed: "
            f"{', '.join(rules.types) or 'none'}); {_advice('types', kind)}, or name the adapter in l2_adapters; "
            f"{BY_NAME}",
            field=place.at("type"),
        )
    found = catalogue.find(kind, place.at("type"))
    medium = found.medium
    if medium.reach is None:
        raise NotPermitted(
            f"{place.at('type')}: {kind!r:.80} cannot be added while the server runs; name the adapter in l2_adapters",
            field=place.at("type"),
        )
    if medium.rest:
        for name in entry:
            known = name in COMMON or name in medium.config.__struct_fields__ or name in medium.runtime_rest
            if not known or name == medium.rest:
                raise NotPermitted(
                    f"{place.path}.{name:.80}: this option may not be set in an adapter that is added while the server "
                    f"runs; leave it out, or name the adapter in l2_adapters; {BY_NAME}",
                    field=f"{place.path}.{name:.80}",
                )
    reach = medium.reach(found.config(entry, place), place)
    taken = dict(entry)
    for name, folder in reach.folders.items():
        taken[name] = _below_a_root(folder, rules, place, name)
    for name, hosts in reach.hosts.items():
        for host in hosts:
            _check_host(host, rules, place, name)
    for name, inner in reach.inner.items():
        if depth >= MAX_DEPTH:
            raise place.wrong(name, "...", f"must not be nested more than {MAX_DEPTH} times")
        taken[name] = _admitted(inner, rules, Place(place.at(name)), depth + 1)
    return taken


def _fields(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """(path, name, value) of every field, at any depth."""
    if depth > 2 * MAX_DEPTH:
        raise ConfigError(f"{path:.200}: is nested too deeply", field=f"{path:.200}")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            where = f"{path}.{name:.80}"
            yield where, str(name), inner
            yield from _fields(inner, where, depth + 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _fields(inner, f"{path}[{i}]", depth + 1)


# --- directories ----------------------------------------------------------------------------------------------


def _is_plain(path: str) -> bool:
    return os.path.isabs(path) and path.isprintable() and ".." not in path.split("/")


def _below_a_root(text: str, rules: RuntimeRules, place: Place, name: str) -> str:
    """The directory with its symbolic links resolved. Raises NotPermitted, ConfigError."""
    path = os.path.expanduser(text)
    if not _is_plain(path):
        raise place.wrong(
            name, text, "must be an absolute path without `..` and without unprintable characters"
        )
    path = os.path.normpath(path)
    real = os.path.realpath(path)
    roots = [os.path.realpath(root) for root in rules.roots]
    root = next((one for one in roots if _is_below(real, one)), None)
    field = place.at(name)
    if root is None:
        if any(_is_below(path, one) for one in rules.roots):
            raise NotPermitted(
                f"{field}: a symbolic link leads from {path!r:.80} out of the folders of l2.runtime.roots; name a "
                "folder without links",
                field=field,
            )
        raise NotPermitted(
            f"{field}: {path!r:.80} lies below none of the folders in which adapters may be added while the server "
            f"runs ({', '.join(rules.roots) or 'none'}); choose one below them, or {_advice('roots', path)}",
            field=field,
        )
    for folder in _between(root, real):
        _check_folder(folder, real, place, name)
    return real


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _between(root: str, path: str) -> Iterator[str]:
    """The folders on the way from the root to the path, both ends included."""
    yield root
    while root != path:
        below = os.path.relpath(path, root).partition("/")[0]
        root = os.path.join(root, below)
        yield root


def _check_folder(folder: str, target: str, place: Place, name: str) -> None:
    try:
        found = os.lstat(folder)
        names = os.listdir(folder) if stat.S_ISDIR(found.st_mode) else []
    except FileNotFoundError:
        return
    except OSError as error:
        raise place.wrong(
            name, folder, f"must be a folder that this server may read ({error.strerror})"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise place.wrong(name, folder, "must be a folder")
    others_write = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if others_write or found.st_uid not in (0, os.geteuid()):
        raise NotPermitted(
            f"{place.at(name)}: other users can replace what is in {folder!r:.80}; choose a folder that, like all "
            "folders above it, only this server's user can write to",
            field=place.at(name),
        )
    is_ours = MARK in names
    if folder == target:
        if names and not is_ours:
            raise NotPermitted(
                f"{place.at(name)}: {folder!r:.80} is neither empty nor a tier of kvstrata; name an empty or a new "
                "folder",
                field=place.at(name),
            )
    elif is_ours:
        raise NotPermitted(
            f"{place.at(name)}: {folder!r:.80} holds a tier, which may not contain another; name a folder outside it",
            field=place.at(name),
        )


# --- hosts ----------------------------------------------------------------------------------------------------


def _check_host(host: str, rules: RuntimeRules, place: Place, name: str) -> None:
    """`host` is HOST, HOST:PORT or SCHEME://BUCKET."""
    asked = host.lower()
    bare = asked if "://" in asked else re.sub(r":\d{1,5}$", "", asked) if _has_port(asked) else asked
    if asked in rules.hosts or bare in rules.hosts:
        return
    raise NotPermitted(
        f"{place.at(name)}: {host!r:.80} may not be used by an adapter that is added while the server runs (allowed "
        f"hosts: {', '.join(rules.hosts) or 'none'}); {_advice('hosts', host)}, or name the adapter in l2_adapters",
        field=place.at(name),
    )


def _has_port(host: str) -> bool:
    return host.rpartition(":")[0].endswith("]") or host.count(":") == 1


def _advice(name: str, value: str) -> str:
    return f"in the settings, l2.runtime.{name}: add {value!r:.80}"
