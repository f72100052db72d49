"""Finds LMCache's settings in what people have: its own file, an env file, a script, a compose file, or a manifest of
Kubernetes with env blocks or a ConfigMap.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvstrata.config.lmcache.fates import find, meant
from kvstrata.config.lmcache.keys import CLIENT_KEYS, VARIABLE_PREFIXES, VARIABLES
from kvstrata.config.lmcache.variables import FILE, PREFIX
from kvstrata.errors import ConfigError

_KEY = rf"{PREFIX}[A-Z0-9_]+"
_NAME = rf"({_KEY})="
_LINE = re.compile(rf"\s*{_NAME}(.*)")
_IN_TEXT = re.compile(rf"(?:^|\s){_NAME}(\"[^\"]*\"|'[^']*'|\{{.*\}}|\S*)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*", re.MULTILINE)


Found = tuple[str, Any]
"""A setting as a source spells it: the key of a file, or a variable, and its value."""


def merged(sources: Iterable[Sequence[Found]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of several sources, and what is said of those that have two values.

    Variables win over files, as in LMCache; else the first source wins.
    """
    values: dict[str, Any] = {}
    twice: dict[str, str] = {}
    found = [one for source in sources for one in source]
    for of_variables in (True, False):
        given: dict[str, Any] = {}
        for name, value in found:
            if name.startswith(PREFIX) is of_variables:
                key = _key(name)
                if str(meant(given.setdefault(key, value))) != str(meant(value)):
                    twice[key] = (
                        "two values are given; the first one is kept, migrate the other one by itself"
                    )
        values = given | values
    return values, twice


def read(path: str) -> list[Found]:
    """The settings in a file. Raises ConfigError that names the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="config") from None
    except yaml.YAMLError as error:
        documents = [""]
        if not _IN_TEXT.search(text):
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", field="config") from None
    if documents and all(isinstance(document, str) for document in documents):
        documents = [text]  # an env file or a script, whose lines YAML would join
    found = [one for document in documents for one in _in(document)]
    if found or not documents:
        return found
    if (
        isinstance(only := documents[0], Mapping)
        and len(documents) == 1
        and all(isinstance(key, str) for key in only)
    ):
        return list(only.items())  # unknown names, each of which is told
    raise ConfigError(
        f"{path}: must be a mapping of setting names, or name {PREFIX}… variables, found {type(only).__name__}",
        field="config",
    )


def _in(node: Any) -> Iterator[Found]:
    if isinstance(node, Mapping):
        if any(key in CLIENT_KEYS for key in node):
            yield from ((str(key), value) for key, value in node.items())
        elif str(node.get("name")).startswith(PREFIX) and "value" in node:  # of a container in Kubernetes
            yield node["name"], node["value"]
        else:
            for key, value in node.items():
                yield from [(key, value)] if re.fullmatch(_KEY, str(key)) else _in(value)
    elif isinstance(node, list):
        for one in node:
            yield from _in(one)
    elif isinstance(node, str):
        inner = None
        with contextlib.suppress(yaml.YAMLError):
            inner = yaml.safe_load(node) if "\n" in node else None
        if line := _LINE.fullmatch(node):
            yield line[1], line[2]
        elif isinstance(inner, Mapping):
            yield from _in(inner)
        else:
            yield from _IN_TEXT.findall(_COMMENT.sub("", node))


def _key(name: str) -> str:
    """The key of LMCache's file that a variable gives; the variable's own name if it gives none."""
    if not name.startswith(PREFIX) or name == FILE or find(name, VARIABLES, VARIABLE_PREFIXES):
        return name
    return name.removeprefix(PREFIX).lower()
