"""The names of objects below the URL, and what the object says that names the records' version."""

from __future__ import annotations

import re

MARKER = "kvstrata-format"
MARKER_TEXT = b"kvstrata records, format 1\n"
MOST_MARKER_BYTES = 4096
NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})\.kvc")


def path_of(key: bytes) -> str:
    """The name of a record's object below the URL."""
    name = key.hex()
    return f"{name[:2]}/{name}.kvc"
