"""docs/coming-from-lmcache.md from the tables of LMCache's names."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.config.lmcache import READ_ON, VERSION
from kvstrata.config.lmcache.fates import Fate, Name
from kvstrata.config.lmcache.flags import CONTROLLER_FLAGS, FLAG_PREFIXES, SERVER_FLAGS
from kvstrata.config.lmcache.interfaces import COMMANDS, CONNECTORS, CONTROLLER_PATHS, SERVER_PATHS, advice
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    CONNECTOR_EXTRA,
    CONNECTOR_EXTRA_PREFIXES,
    VARIABLE_PREFIXES,
    VARIABLES,
)

_INTRO = f"""# Coming from LMCache

Generated from the code by `make docs`; to change it, change the tables in `src/kvstrata/config/lmcache`. The names are
those of LMCache {VERSION}, its program and its documentation, read on {READ_ON}.

1. `kvstrata migrate LMCACHE_FILE… > kvstrata.yaml` prints a configuration for server and engines, with a comment for
   each line. It exits with status 1 if something has no counterpart, which a comment then says.
2. `kvstrata names install` installs the commands `lmcache server …` and `lmcache_controller …` beside `lmcache-server`
   and `lmcache-controller`, where LMCache's own are not installed. They belong to no package, so installing or removing
   kvstrata or LMCache never takes LMCache's commands away. Where LMCache is installed, they run LMCache.
   `kvstrata names remove` removes them.
3. Start vLLM as before. Without the `lmcache` package, or with `KVSTRATA_TAKEOVER=1`, the names of
   [connectors](#connectors) mean kvstrata's.

KV that LMCache has stored is not read: the cache begins empty, and old files, keys and objects stay until you delete
them.

What happens to a name:

| | |
|---|---|
| kept | same name, same meaning |
| translated | accepted; the log names our setting |
| noted | accepted without effect; the log says why |
| replaced | a flag: an error that says what to use; a server's setting given to an engine: a warning that says where |
| refused | an error that says what to do |

An unknown flag or key is an error; an unknown `LMCACHE_…` variable is a warning. `--blend*` stands for all other names
that begin so.
"""


def coming_from_lmcache() -> str:
    """The whole page."""
    parts = [_INTRO]
    for title, table, prefixes in (
        ("`lmcache server` flags", SERVER_FLAGS, FLAG_PREFIXES),
        ("`lmcache_controller` flags", CONTROLLER_FLAGS, {}),
        ("`kv_connector_extra_config`", CONNECTOR_EXTRA, CONNECTOR_EXTRA_PREFIXES),
        ("`LMCACHE_CONFIG_FILE` keys and `LMCACHE_<KEY>` variables", CLIENT_KEYS, CLIENT_KEY_PREFIXES),
        ("Other variables", VARIABLES, VARIABLE_PREFIXES),
    ):
        rows = [*table.items(), *((f"{name}*", entry) for name, entry in prefixes.items())]
        parts.append(_table(title, [(f"`{name}`", str(entry.fate), _says(entry)) for name, entry in rows]))
    parts.append(_table("Commands", _advice(COMMANDS)))
    connectors = [
        (f"`{name}`", "kept", "`kv_connector_module_path`: " + (_codes(modules) or "none"))
        for name, modules in CONNECTORS.items()
    ]
    parts.append(_table("Connectors", connectors))
    parts.append(_table("HTTP paths of `lmcache server`", _advice(SERVER_PATHS)))
    parts.append(_table("HTTP paths of `lmcache_controller`", _advice(CONTROLLER_PATHS)))
    return "".join(parts)


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"\n## {title}\n\n| name | here | |\n|---|---|---|\n{lines}"


def _says(entry: Name) -> str:
    harmless = f"{_codes(entry.harmless)}: noted; else: " if entry.harmless else ""
    target = f"`{entry.target}`" if entry.target else ""
    return harmless + "; ".join(filter(None, (target, entry.say)))


def _advice(table: Mapping[str, Name]) -> list[tuple[str, str, str]]:
    return [
        (f"`{name}`", str(entry.fate), f"`{entry.target}`" if entry.fate is Fate.KEPT else advice(entry))
        for name, entry in table.items()
    ]


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
