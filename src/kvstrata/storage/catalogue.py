"""The types of adapters: entry points of installed packages in the group `kvstrata.l2_adapters`.

kvstrata's own types are in that group too (pyproject.toml); this module names none of them.

    kvstrata's own      names a `Medium`; its fields are checked when the server reads its settings
    another package's   names a callable `(fields: dict, path: str) -> StorageAdapter`, which raises ConfigError for
                        wrong fields; it is imported and called when the adapter is made (for an isolated tier, in its
                        child process)

kvstrata's own type wins over another package's type of the same name.  `importlib.metadata` is imported where it is
needed, since a server without tiers starts 10 ms sooner without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvstrata.config.nearest import nearest
from kvstrata.config.secrets import scrubbed
from kvstrata.errors import ConfigError
from kvstrata.storage import structs
from kvstrata.storage.base import StorageAdapter
from kvstrata.storage.common import COMMON
from kvstrata.storage.structs import Place

if typing.TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvstrata.l2_adapters"
OWN_PACKAGE = "kvstrata"

ELSEWHERE = (
    "raw_block", "dax", "hf3fs",
    "aerospike", "bigtable", "hfbucket", "sagemaker_hyperpod", "nixl_store", "nixl_store_dynamic",
    "nixl_native", "native_plugin",
)  # fmt: skip
"""Types of other cache servers that kvstrata lacks; an installed plugin may provide them."""

Make = Callable[[], StorageAdapter]
"""Makes the bare adapter, not open. Raises ConfigError for a mistake in the fields that shows only then."""


def _nothing() -> str:
    return ""


def _no_folder(config: Any) -> str:
    return ""


class Medium(NamedTuple):
    """A type of adapter."""

    config: type[msgspec.Struct]
    """The type's own fields in an entry: types, bounds, defaults and meanings.

    The struct may repeat a field that all types have (common.py), and then gets that field's value too.
    """
    prepare: Callable[[Any, Place, str], Make]
    """Checks what the struct cannot express, for (config, place of the entry, name of the adapter). Raises ConfigError.

    Nothing is opened.  It runs in the server, and for an isolated tier again in the child.
    """
    hosted: bool = False
    """The adapter runs in a process of its own unless its entry says otherwise."""
    rest: str = ""
    """The field of `config` that takes all fields whose names `config` does not have; empty: they are errors."""
    look: Callable[[Any, str], None] | None = None
    """Looks for what entries need of this machine, for (config, name of the adapter). Raises StorageError."""
    folder: Callable[[Any], str] = _no_folder
    """The directory of this host that keeps the records of an entry with these fields; None if there is none.

    The server probes it while the tier is in service (server/l2/media.py).
    """
    refusal: Callable[[], str] = _nothing
    """Why this installation cannot honour any entry of this type, with advice; empty where it can."""


class FoundType(NamedTuple):
    """A type, and the name by which another process finds it."""

    medium: Medium
    reference: str
    """MODULE:ATTRIBUTE, for `load`."""
    point: str = ""
    """MODULE:ATTRIBUTE of another package's entry point; empty for kvstrata's own type."""

    def config(self, entry: Mapping[str, Any], place: Place) -> msgspec.Struct:
        """The type's own fields of an entry. Raises ConfigError."""
        kind = self.medium.config
        own = {
            name: value
            for name, value in entry.items()
            if name not in COMMON or name in kind.__struct_fields__
        }
        if self.point:
            return InstalledConfig(self.point, own)
        return structs.read(kind, own, place, also=COMMON, rest=self.medium.rest)


def find(kind: str, where: str) -> FoundType:
    """The type of this name. Raises ConfigError for the field `where` if the name is unknown or the type is refused."""
    from importlib.metadata import entry_points

    own = own_points()
    if kind in own:
        reference = own[kind].value
        medium = load(reference)
        if advice := medium.refusal():
            raise ConfigError(f"{where}: {kind!r:.80} is not supported: {advice}", field=where)
        return FoundType(medium, reference)
    others: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        value = others.setdefault(point.name, point.value)
        if point.name == kind and value != point.value:
            raise ConfigError(
                f"{where}: {kind!r:.80} names two plugins, {value} and {point.value}; uninstall one of their packages",
                field=where,
            )
    if kind in others:
        return FoundType(INSTALLED, f"{__name__}:INSTALLED", others[kind])
    if not own:
        raise ConfigError(
            f"{where}: the installation of {OWN_PACKAGE} names no types of adapter; reinstall it (`make setup` "
            "in the clone, or pip install --force-reinstall with a wheel file)",
            field=where,
        )
    if kind in ELSEWHERE:
        raise ConfigError(
            f"{where}: {kind!r} is not part of this version; a plugin can provide it: install a package with"
            f" an entry point {kind!r} in the group {GROUP!r}, or use type 'plugin'",
            field=where,
        )
    here = sorted({*own, *others})
    hint = nearest(kind, [*here, *ELSEWHERE])
    raise ConfigError(
        f"{where}: unknown adapter {kind!r:.80}{hint}; known types: {', '.join(here)}", field=where
    )


@functools.cache
def own_points() -> dict[str, EntryPoint]:
    """kvstrata's own types, by name. Reads only kvstrata's metadata, which is quicker than that of all packages."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution(OWN_PACKAGE)
    except PackageNotFoundError:
        return {}
    return {point.name: point for point in installed.entry_points if point.group == GROUP}


def load(reference: str) -> Medium:
    """The type at MODULE:ATTRIBUTE."""
    medium = _named(reference)
    assert isinstance(medium, Medium), reference
    return medium


def _named(reference: str) -> Any:
    from importlib.metadata import EntryPoint

    return EntryPoint("", reference, GROUP).load()


@contextlib.contextmanager
def plugin_boundary(path: str, source: str) -> Iterator[None]:
    """Run a third party's code, which may raise anything, leave the interpreter, print or fork.

    What it prints goes to standard error, since standard output is the command's.  A child that it forks ends here, and
    never runs on as a second server.  Raises ConfigError.
    """
    pid = os.getpid()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the plugin boundary
        raise ConfigError(
            f"{path}: {source} cannot be made: {type(error).__name__}: {scrubbed(error)}", field=path
        ) from error
    finally:
        if os.getpid() != pid:
            os._exit(0)


def checked(made: object, path: str, source: str) -> StorageAdapter:
    """Return `made`, which a third party's code has made, if it is an adapter. Raises ConfigError otherwise."""
    if not isinstance(made, StorageAdapter):
        raise ConfigError(
            f"{path}: {source} must make a StorageAdapter, but made a {type(made).__name__}", field=path
        )
    return made


class InstalledConfig(msgspec.Struct, frozen=True):
    """An adapter that another package's entry point makes."""

    point: str
    """MODULE:ATTRIBUTE."""
    fields: dict[str, Any]
    """The entry's fields as given, without those that all types have."""


def _prepare_installed(config: InstalledConfig, place: Place, name: str) -> Make:
    def make() -> StorageAdapter:
        with plugin_boundary(place.path, f"plugin {config.point}"):
            return checked(_named(config.point)(config.fields, place.path), place.path, config.point)

    return make


INSTALLED = Medium(InstalledConfig, _prepare_installed)
