"""Confines an object store whose URL is a directory to that directory.

The library follows links.  With a link in place of a folder or an object, it would read, replace or remove files
outside the directory; with a pipe in place of an object, the reading thread would hang.  So each name is checked before
it is used.  Somebody who may write to the directory can still put a link there between the check and the use
(docs/limits.md).
"""

from __future__ import annotations

import os
import stat
from urllib.parse import unquote, urlsplit


class NotAFile(OSError):
    """Something lies where an object should be, and it is not a regular file in real folders."""


class Inside:
    """The directory of a `file://` URL; with any other URL every name is accepted."""

    def __init__(self, url: str) -> None:
        self._root = unquote(urlsplit(url).path) if url.startswith("file:") else ""

    def checked(self, name: str) -> str:
        """Return the name of an object below the URL. Raises NotAFile if something other than a file has that name."""
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
                raise NotAFile(f"{place} is not a {what}, so it is not followed; remove it")
        return name

    def has(self, name: str) -> bool:
        """Whether an object that the library lists is a regular file in real folders below the directory."""
        try:
            self.checked(name)
        except OSError:
            return False
        return True
