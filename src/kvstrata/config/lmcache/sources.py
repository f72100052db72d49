"""Finds LMCache's settings in what people have: its own file, an env file, a script, a compose file, or a manifest of
Kubernetes with env blocks or a ConfigMap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


class Found(NamedTuple):
    """A setting as a source spells it: the key of a file, or a variable."""

    name: str
    value: Any


class Merged(NamedTuple):
    """The settings of all sources: those of variables win, as they do in LMCache."""

    values: dict[str, Any]
    twice: dict[str, str]
    """Settings of which two files, or two blocks of variables, give different values, each with what is said of it."""


def merged(sources: list[list[Found]]) -> Merged:
    """The settings of several sources, of which the first one wins that gives a setting."""
    found = [one for source in sources for one in source]
    result = Merged({}, {})
    for of_variables in (True, False):
        given: dict[str, Any] = {}
        for name, value in found:
            if name.startswith(PREFIX) is not of_variables:
                continue
            key = _key(name)
            if str(meant(given.setdefault(key, value))) != str(meant(value)):
                result.twice[key] = (
                    "two values are given; the first one is kept, migrate the other one by itself"
                )
        result.values.update({key: value for key, value in given.items() if key not in result.values})
    return result


def read(path: str) -> list[Found]:
    """The settings in a file. Raises ConfigError that names the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="config") from None
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        documents = []
        if not _IN_TEXT.search(text):
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", field="config") from None
    if all(isinstance(document, str) for document in documents):
        documents = [text]  # an env file or a script, whose lines YAML would join
    found = [one for document in documents for one in _in(document)]
    if found or not documents:
        return found
    if (
        len(documents) == 1
        and isinstance(documents[0], Mapping)
        and all(isinstance(key, str) for key in documents[0])
    ):
        return [Found(*item) for item in documents[0].items()]  # unknown names, each of which is told
    raise ConfigError(
        f"{path}: must be a mapping of setting names, or name {PREFIX}… variables or a file of LMCache's, found "
        f"{type(documents[0]).__name__}",
        field="config",
    )


def _in(node: Any) -> Iterator[Found]:
    if isinstance(node, Mapping):
        if any(key in CLIENT_KEYS for key in node):
            yield from (Found(str(key), value) for key, value in node.items())
        elif str(node.get("name")).startswith(PREFIX) and "value" in node:  # of a container in Kubernetes
            yield Found(str(node["name"]), node["value"])
        else:
            for key, value in node.items():
                if re.fullmatch(_KEY, str(key)):
                    yield Found(str(key), value)
                else:
                    yield from _in(value)
    elif isinstance(node, list):
        for one in node:
            yield from _in(one)
    elif isinstance(node, str):
        if line := _LINE.fullmatch(node):
            yield Found(line[1], line[2])
            return
        inner = None
        if "\n" in node:
            try:
                inner = yaml.safe_load(node)
            except yaml.YAMLError:
                pass
        if isinstance(inner, Mapping):
            yield from _in(inner)
        else:
            yield from (Found(name, text) for name, text in _IN_TEXT.findall(_COMMENT.sub("", node)))


def _key(name: str) -> str:
    """The key of LMCache's file that a variable gives; the variable's own name if it gives none."""
    if not name.startswith(PREFIX) or name == FILE or find(name, VARIABLES, VARIABLE_PREFIXES):
        return name
    return name.removeprefix(PREFIX).lower()
