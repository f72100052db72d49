"""Whether the directory of a medium is still the one that was opened, and may be written to.

A tier whose directory is deleted or unmounted may go on without any error: descriptors of deleted files can be read and
written as before, and the bytes are lost at the end of the process.
"""

from __future__ import annotations

import contextlib
import enum
import os


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


class WatchedFolder:
    """A directory as it was when its medium was opened.

    `mark` and `look` block for as long as the file system does.  The directory is kept open, so that no other one gets
    its inode number.
    """

    def __init__(self, path: str) -> None:
        """`path` is absolute."""
        self.path = path
        self.state = FolderState.WELL
        """The last answer of a probe (server/l2/media.py)."""
        self._fd = -1
        self._marked: tuple[int, int] | None = None

    def mark(self) -> None:
        """Remember the directory's device and inode. Raises OSError."""
        self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        self._marked = found.st_dev, found.st_ino

    def look(self) -> FolderState:
        """What lies at the path now."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return FolderState.GONE
        except OSError:
            return FolderState.UNREACHABLE
        if (found.st_dev, found.st_ino) != self._marked:
            return FolderState.REPLACED
        # This sees what a mode forbids, and file systems that are mounted or have become read-only, for root too.
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            return FolderState.READ_ONLY
        return FolderState.WELL

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
