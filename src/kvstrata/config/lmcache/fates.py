"""The possible treatments of a setting's name that comes from LMCache.

    kept        same name, same meaning
    translated  accepted; one log line names the setting of ours that it sets
    no effect   accepted; one log line says so
    refused     kvstrata has no such feature.  As a flag, it is an error that says what to do, unless its value turns
                the feature off, as LMCache's default does.  In an engine's settings it is accepted without effect,
                since an engine without the cache's extra feature answers correctly.

A flag or key in no table is an error that suggests a known name of nearly the same spelling.  An unknown name in a file
or variable for LMCache only causes a warning at the start.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvstrata.config.demands import nearest_name
from kvstrata.errors import ConfigError, together

NO_NAMES: Mapping[str, str] = MappingProxyType({})
NEARLY = 0.8
"""Names at least this similar may be the same name, misspelt; others may mean anything."""


class Fate(enum.StrEnum):
    """What happens to a known name."""

    KEPT = "kept"
    TRANSLATED = "translated"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Name(NamedTuple):
    """`target`: our setting (dotted path), for KEPT and TRANSLATED.  `say`: the log line or error, without the name."""

    fate: Fate
    target: str = ""
    say: str = ""
    harmless: tuple[str, ...] = ()
    """Values with which a refused name is accepted, since they ask for what happens anyway."""
    factor: int = 0
    """For TRANSLATED: factor from LMCache's number to ours; 0: the value is a text, which stays unchanged."""
    also: str = ""
    """For TRANSLATED: a setting that gets the same value unless it is given too."""

    def asks(self, value: object) -> bool:
        """Whether a refused name asks for something with this value."""
        return self.fate is Fate.REFUSED and is_on(value) and str(value) not in self.harmless


_OFF: tuple[object, ...] = (False, None, "", "false", "none", "null", "0", "0.0", 0, [], {}, "[]", "{}")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def is_on(value: object) -> bool:
    """Whether a value asks for something, quoted or not."""
    value = meant(value)
    return (value.lower() if isinstance(value, str) else value) not in _OFF


def meant(value: object, kind: object = None) -> Any:
    """A value as LMCache reads it, for a setting of this type.

    Text of an env file may stand in quotes, and text of a number or truth value is that value.  None: not set, as are
    null and the empty text.
    """
    if isinstance(value, str):
        text = value.strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]
        if kind is bool:
            return _TRUTH.get(text.lower(), text or None)
        for number in (int, float) if kind in (int, float) else ():
            with contextlib.suppress(ValueError):
                return number(text)
        return text or None
    return value if kind is not bool or value not in (0, 1) else bool(value)


def each(names: str, entry: Name) -> dict[str, Name]:
    """One entry for several names, with blanks between them."""
    return dict.fromkeys(names.split(), entry)


def kept(**targets: str) -> dict[str, Name]:
    """Same meaning as our setting of this name."""
    return {name: Name(Fate.KEPT, target) for name, target in targets.items()}


def no_effect(say: str) -> Name:
    """Accepted, without effect."""
    return Name(Fate.NO_EFFECT, "", say)


TUNES = no_effect("it configures a part of LMCache that kvstrata does not have")
"""The entry of names of which users need to know no more."""


def refused(say: str, *harmless: str) -> Name:
    """Nothing does what it asks for, unless the value is harmless."""
    return Name(Fate.REFUSED, "", say, harmless)


def find(name: str, table: Mapping[str, Name], prefixes: Mapping[str, Name]) -> Name | None:
    """The entry of the whole name, or else of a prefix of it."""
    if name in table:
        return table[name]
    return next((entry for prefix, entry in prefixes.items() if name.startswith(prefix)), None)


def hint(name: str, own: Iterable[str], table: Mapping[str, Name], unwanted: Iterable[str] = ()) -> str:
    """` (did you mean 'x'?)` with the name of `own` or the table that was misspelt or cut short, or an empty string.

    Names that are unwanted or do nothing here may be meant too, but are not suggested.
    """
    names = dict.fromkeys(own, True) | {
        one: entry.fate in (Fate.KEPT, Fate.TRANSLATED) for one, entry in table.items()
    }
    names |= dict.fromkeys(unwanted, False)
    asked, known = bare(name), [bare(one) for one in names]
    longer = [one for one in known if one.startswith((f"{asked}-", f"{asked}_"))]
    near = nearest_name(asked, known, cutoff=NEARLY) or (longer[0] if len(longer) == 1 else "")
    return next(
        (f" (did you mean '{one}'?)" for one, good in names.items() if good and bare(one) == near), ""
    )


def bare(name: str) -> str:
    """A name without what all names of its kind begin with, which would make any two of them similar."""
    return name.removeprefix("--").removeprefix("LMCACHE_").removeprefix("lmcache.")


def translate(
    values: Mapping[str, Any],
    *,
    source: str,
    table: Mapping[str, Name],
    prefixes: Mapping[str, Name],
    kinds: Mapping[str, Any],
    own: Iterable[str] = (),
    names: Mapping[str, str] = NO_NAMES,
    strict: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Translate settings that a user gave under LMCache's or our own names; returns our settings and the log lines.

    `kinds`: the types of our settings.  `own`: those that are accepted by their own names.  `names`: how the source
    spells a name.  Raises ConfigError for all unknown names, if `strict`.
    """
    own_names = set(own)
    settings: dict[str, Any] = {}
    notes: list[str] = []
    wrong: list[ConfigError] = []
    for name, value in values.items():
        where = f"{source}: {names.get(name, name)}"
        entry = find(name, table, prefixes)
        if entry is None and name in own_names:
            entry = Name(Fate.KEPT, name)
        if entry is None:
            says = f"unknown key{hint(name, own_names, table)}"
            if strict:
                wrong.append(ConfigError(f"{where}: {says}", field=name))
            else:
                notes.append(f"{where} has no effect: {says}")
        elif entry.fate is Fate.KEPT:
            if (given := meant(value, kinds[entry.target])) is not None:
                settings[entry.target] = given
        else:
            notes.append(f"{where} has no effect: {entry.say}")
    if wrong:
        raise together(wrong)
    return settings, notes
