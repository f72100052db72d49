"""What happens to a name of LMCache.

    kept        same name, same meaning
    translated  accepted; one log line names our setting that it sets
    noted       accepted; one log line says why it has no effect
    replaced    our setting has another name.  As a flag, LMCache's name is an error; in a client's file or variables,
                one log line says that it has no effect.  Both texts name our setting.
    refused     an error that says what to do

A replaced or refused name is noted where its value asks for nothing, as LMCache's default does.  A flag or key in no
table is an error that suggests the nearest known name; a variable in no table is only noted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvstrata.config.nearest import nearest
from kvstrata.config.secrets import quoted
from kvstrata.errors import ConfigError, together

NO_NAMES: Mapping[str, str] = MappingProxyType({})


class Fate(enum.StrEnum):
    """What happens to a known name."""

    KEPT = "kept"
    TRANSLATED = "translated"
    NOTED = "noted"
    REPLACED = "replaced"
    REFUSED = "refused"


class Name(NamedTuple):
    """`target`: our setting for KEPT, TRANSLATED and REPLACED (dotted path; empty where no single setting has that
    meaning).  `say`: the text of the log line or the error, without the name itself."""

    fate: Fate
    target: str = ""
    say: str = ""
    harmless: tuple[str, ...] = ()
    """Values with which the name asks for nothing that we do not do anyway."""
    factor: int = 0
    """For TRANSLATED: our number is LMCache's number times this; 0: the value is a text, ours unchanged."""
    also: str = ""
    """For TRANSLATED: a setting that gets the same value unless it is given too."""

    def asks(self, value: object) -> bool:
        """Whether a replaced or refused name asks for something with this value."""
        return value not in _OFF and str(value) not in self.harmless


_OFF: tuple[object, ...] = (False, None, "", "false", "False", "0", 0, [], {}, "[]", "{}")


def kept(target: str) -> Name:
    """Same name, same meaning."""
    return Name(Fate.KEPT, target)


def noted(say: str) -> Name:
    """Accepted, without effect."""
    return Name(Fate.NOTED, "", say)


def refused(say: str, *harmless: str) -> Name:
    """An error, unless the value is harmless."""
    return Name(Fate.REFUSED, "", say, harmless)


def replaced(target: str, say: str, *harmless: str) -> Name:
    """Our setting has another name."""
    return Name(Fate.REPLACED, target, say, harmless)


def find(name: str, table: Mapping[str, Name], prefixes: Mapping[str, Name]) -> Name | None:
    """The entry of the whole name, or else of a prefix of it."""
    if name in table:
        return table[name]
    return next((entry for prefix, entry in prefixes.items() if name.startswith(prefix)), None)


def hint(name: str, own: Iterable[str], table: Mapping[str, Name], unwanted: Iterable[str] = ()) -> str:
    """The nearest name of `own` and the table, as an error suggests it, unless it is unwanted, replaced or refused."""
    unwanted = set(unwanted) | {
        one for one, entry in table.items() if entry.fate in (Fate.REPLACED, Fate.REFUSED)
    }
    return nearest(name, [*own, *(table.keys() - unwanted)], unwanted=unwanted)


def translate(
    values: Mapping[str, Any],
    *,
    source: str,
    table: Mapping[str, Name],
    prefixes: Mapping[str, Name],
    own: Iterable[str],
    names: Mapping[str, str] = NO_NAMES,
) -> tuple[dict[str, Any], list[str]]:
    """Translate settings that a user gave under LMCache's or our own names; returns our settings and the log lines.

    `own`: names of our settings, accepted as they are.  `names`: how the source spells a name.  Raises ConfigError for
    all refused and unknown names.
    """
    own_names = set(own)
    settings: dict[str, Any] = {}
    notes: list[str] = []
    wrong: list[ConfigError] = []
    for name, value in values.items():
        where = f"{source}: {names.get(name, name)}"
        entry = find(name, table, prefixes)
        if entry is None and name in own_names:
            entry = kept(name)
        if entry is None:
            says = f"unknown key{hint(name, own_names, table)}"
            wrong.append(ConfigError(f"{where}: {says}", field=name))
        elif entry.fate is Fate.KEPT:
            settings[entry.target] = value
        elif entry.fate is Fate.REFUSED and entry.asks(value):
            says = f"{entry.say} (value {quoted(name, value)})"
            wrong.append(ConfigError(f"{where}: {says}", field=name))
        else:
            notes.append(f"{where} has no effect: {entry.say}")
    if wrong:
        raise together(wrong)
    return settings, notes
