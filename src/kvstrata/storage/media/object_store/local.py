"""Keeps an object store in a directory inside that directory.

The library follows links: one in place of a folder or of an object leads what is read, replaced or removed out of the
directory, and a pipe in place of an object holds the thread that reads it.  So each name is looked at first.  Somebody
who may write to the directory can still put a link there between the look and the use (docs/limits.md).
"""

from __future__ import annotations

import os
import stat
from urllib.parse import unquote, urlsplit


class NotAFile(OSError):
    """Something else than a file in folders lies where an object should be."""


class Inside:
    """The directory of a `file://` URL; for any other URL every name is good."""

    def __init__(self, url: str) -> None:
        self._root = unquote(urlsplit(url).path) if url.startswith("file:") else ""

    def checked(self, name: str) -> str:
        """The name of an object below the URL, unless something other than a file has it. Raises NotAFile."""
        if not self._root:
            return name
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            place = os.path.join(self._root, *parts[:end])
            try:
                mode = os.lstat(place).st_mode
            except FileNotFoundError:
                return name
            if not (stat.S_ISREG(mode) if end == len(parts) else stat.S_ISDIR(mode)):
                what = "file" if end == len(parts) else "folder"
                raise NotAFile(f"{place} is not a {what}; it is not followed, remove it")
        return name

    def has(self, name: str) -> bool:
        """Whether an object that the library lists is a file in folders of the directory."""
        try:
            self.checked(name)
        except OSError:
            return False
        return True
