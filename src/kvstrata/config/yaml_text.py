"""Parses YAML with the scalars of YAML 1.2's core schema, and refuses duplicate keys in a mapping.

PyYAML follows YAML 1.1, in which `no` is false, `22:30` is 1350, `0700` is 448, and the last of two equal keys wins. A
key is always text: `no:` is the key "no", and `0700:` the key "0700".  `<<` still merges mappings.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)
"""Tag, pattern and first characters of the plain scalars that are not text, in the order of precedence."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 -- a class attribute of PyYAML's

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for index, (key, value) in enumerate(node.value):
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
                continue
            if key.value in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value!r:.80} is given twice; leave one out", key.start_mark
                )
            seen.add(key.value)
            # A new node, since an alias may use the key's node as a value.
            named = yaml.ScalarNode(f"{_TAG}str", key.value, key.start_mark, key.end_mark, key.style)
            node.value[index] = named, value
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        return self.construct_object(node, deep=True)  # which refuses an alias within itself


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    try:
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)
    except ValueError as error:  # too long for Python, or under an explicit tag
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(f"{_TAG}int", _whole_number)


def load(text: str) -> Any:
    """The value that is written in `text`. Raises yaml.YAMLError, which names the line."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None
