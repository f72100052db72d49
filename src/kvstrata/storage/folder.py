"""Whether the directory of a medium is still the one that was opened, and may be written to.

A tier whose directory is deleted or unmounted may go on without any error: descriptors of deleted files can be read and
written as before, and the bytes are lost at the end of the process.
"""

from __future__ import annotations

import contextlib
import enum
import os
from typing import NamedTuple


class FolderState(enum.StrEnum):
    """What lies at the path of a medium's directory."""

    WELL = "well"
    """The directory that was opened; it can be written to."""
    READ_ONLY = "read_only"
    """The directory that was opened, and this process may not write to it."""
    GONE = "gone"
    """No directory: it was deleted, or its file system was unmounted."""
    REPLACED = "replaced"
    """Another directory: it was deleted and made again, or another file system is mounted there, or none any more."""
    UNREACHABLE = "unreachable"
    """Unknown: the file system does not answer, or answers with an error."""


class Folder(NamedTuple):
    """The directory of a medium."""

    path: str
    """Absolute."""
    may_be_replaced: bool = False
    """Whether the medium goes on in another directory at this path; otherwise it keeps using the one that it opened."""


class WatchedFolder:
    """A directory as it was when its medium was opened.

    `mark` and `look` block for as long as the file system does.  A directory that its medium keeps using is kept open,
    so that no other directory gets its inode number.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.state = FolderState.WELL
        """The last answer of a probe (server/l2/media.py)."""
        self._fd = -1
        self._marked: tuple[int, int] | None = None

    def mark(self) -> None:
        """Remember the directory's device and inode. Raises OSError."""
        fd = os.open(self.folder.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(fd)
        self._marked = found.st_dev, found.st_ino
        if self.folder.may_be_replaced:
            os.close(fd)
        else:
            self._fd = fd

    def look(self) -> FolderState:
        """What lies at the path now. A directory that may be replaced and was is the marked one from now on."""
        path = self.folder.path
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return FolderState.GONE
        except OSError:
            return FolderState.UNREACHABLE
        if (found.st_dev, found.st_ino) != self._marked:
            if not self.folder.may_be_replaced:
                return FolderState.REPLACED
            self._marked = found.st_dev, found.st_ino
        # This sees what a mode forbids, and file systems that are mounted or have become read-only, for root too.
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            return FolderState.READ_ONLY
        return FolderState.WELL

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
