"""LMCACHE_… variables: which of them an engine reads as settings, and what is said about the others.

No variable stops a start by its name alone, since whoever sets it may mean another program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvstrata.config.lmcache.fates import Name, find, hint, meant
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    OF_SERVER,
    VARIABLE_PREFIXES,
    VARIABLES,
)
from kvstrata.config.pod_links import is_pod_link

PREFIX = "LMCACHE_"
FILE = "LMCACHE_CONFIG_FILE"


def engine_keys(environment: Mapping[str, str], own: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The variable of each key that an engine's variables give, and notes for the other variables.

    `own`: names of the engine's own settings.
    """
    keys: dict[str, str] = {}
    notes = []
    for name in _variables(environment):
        key = name.removeprefix(PREFIX).lower()
        if entry := find(name, VARIABLES, VARIABLE_PREFIXES):
            notes.append(f"environment: {name} has no effect: {entry.say}")
        elif key in own or find(key, CLIENT_KEYS, CLIENT_KEY_PREFIXES):
            keys[key] = name
        else:
            notes.append(_unknown(name, own))
    return keys, notes


def server_notes(environment: Mapping[str, str], own: Collection[str]) -> list[str]:
    """Notes for the variables that say something to a server. Those of an engine that shares its environment do not.

    `own`: names of an engine's own settings.
    """
    notes = []
    for name in _variables(environment):
        key = name.removeprefix(PREFIX).lower()
        of_engine = find(key, CLIENT_KEYS, CLIENT_KEY_PREFIXES)
        if entry := find(name, VARIABLES, VARIABLE_PREFIXES):
            notes.append(f"environment: {name} has no effect: {entry.say}")
        elif of_engine is OF_SERVER:
            notes.append(f"environment: {name} has no effect: {of_engine.say}")
        elif of_engine is None and key not in own:
            notes.append(_unknown(name, own))
    if environment.get(FILE):
        notes.append(
            f"environment: {FILE} has no effect on a server: name its own file with --config; `kvstrata migrate FILE` "
            "makes one from LMCache's"
        )
    return notes


def _variables(environment: Mapping[str, str]) -> list[str]:
    """The names of the variables that are set; an empty one is not."""
    return sorted(
        name
        for name, text in environment.items()
        if name.startswith(PREFIX) and name != FILE and meant(text) and not is_pod_link(name, text)
    )


def _unknown(name: str, own: Collection[str]) -> str:
    keys = {PREFIX + key.upper(): entry for key, entry in CLIENT_KEYS.items()}
    known: dict[str, Name] = {**keys, **VARIABLES}
    says = hint(name, [PREFIX + key.upper() for key in own], known)
    return f"environment: {name} has no effect: unknown variable{says}"
