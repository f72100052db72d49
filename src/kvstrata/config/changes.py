"""Which settings differ between two sets of settings, and settings of which some are replaced by newer ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kvstrata.config.load import leaves

S = TypeVar("S", bound=msgspec.Struct)


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
    """What a reload changes in a process that runs."""

    in_force: S
    """The settings afterwards: those that can change while the process runs are the new ones."""
    applied: set[str]
    """Keys that change now, and keys of files that have another content."""
    restart: set[str]
    """Keys whose new values need a restart."""

    def shown(self) -> dict[str, object]:
        """For the log: the keys, never their values."""
        words = (("changed", self.applied), ("needs_restart", self.restart))
        return {word: ",".join(sorted(keys)) or "nothing" for word, keys in words}


def sorted_out(in_force: S, newer: S, live: Iterable[str], files: Iterable[str] = ()) -> Changes[S]:
    """Tell apart what can change now. `live`: keys that can; `files`: keys of files that can, from one to another."""
    changed = changes(in_force, newer)
    movable = {key for key in files if value_of(in_force, key) and value_of(newer, key)}
    applied = changed & {*live, *movable}
    return Changes(replaced(in_force, newer, applied), applied, changed - applied)
