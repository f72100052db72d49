"""Confines an object store whose URL is a directory to that directory, and reads objects there.

The library follows links.  With a link in place of a folder or an object, it would read, replace or remove files
outside the directory; with a pipe in place of an object, the reading thread would hang.  So each name is checked before
it is used.  Somebody who may write to the directory can still put a link there between the check and the use
(docs/limits.md); where an object is loaded, only in place of its folder, since the open follows no link.
"""

from __future__ import annotations

import contextlib
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
        if self._root:
            with contextlib.suppress(FileNotFoundError):
                self.head(name)
        return name

    @property
    def is_directory(self) -> bool:
        """Whether the URL is a directory."""
        return bool(self._root)

    def head(self, name: str) -> tuple[int, str]:
        """Bytes and version of an object in the directory. Raises FileNotFoundError, or NotAFile as `checked` does."""
        parts = name.split("/")
        for end in range(1, len(parts)):
            place = os.path.join(self._root, *parts[:end])
            if not stat.S_ISDIR(os.lstat(place).st_mode):
                raise NotAFile(f"{place} is not a folder, so it is not followed; remove it")
        place = os.path.join(self._root, name)
        return _head(place, os.lstat(place))

    def read(self, name: str, begin: int, target: memoryview, length: int) -> tuple[int, str]:
        """Read from `begin` on until `target` is full, if the object has `length` bytes; returns what `head` does.

        The library would read into memory of its own, from which the bytes would have to be copied once more.
        Raises FileNotFoundError, NotAFile, OSError, or ValueError if the object becomes shorter meanwhile.
        """
        self.head(name)
        place = os.path.join(self._root, name)
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = _head(place, os.fstat(fd))
            while target and found[0] == length:
                count = os.preadv(fd, [target], begin)
                if not count:
                    raise ValueError(f"{place} has become shorter while it was read")
                target, begin = target[count:], begin + count
            return found
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        """Whether an object that the library lists is a regular file in real folders below the directory."""
        try:
            self.checked(name)
        except OSError:
            return False
        return True


def _head(place: str, found: os.stat_result) -> tuple[int, str]:
    if not stat.S_ISREG(found.st_mode):
        raise NotAFile(f"{place} is not a file, so it is not followed; remove it")
    return found.st_size, f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
