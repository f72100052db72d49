"""Checks that the directory of a medium is still the one that was opened, and is writable.

A tier whose directory is deleted or unmounted may continue without any error: descriptors of deleted files can be read
and written as before, and the bytes are lost at the end of the process.
"""

from __future__ import annotations

import contextlib
import enum
import os

_RENEW = "restart the server to open it anew"
_NOT_USED = "lookups count its chunks as absent, and it gets no new ones"


class FolderState(enum.StrEnum):
    """The state of the path of a medium's directory."""

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
    """The directory of a medium, compared with the one that was opened.

    `mark` and `look` block for as long as the file system does.  The directory is kept open, so that its inode number
    is not reused.
    """

    def __init__(self, path: str) -> None:
        """`path` is absolute."""
        self.path = path
        self.state = FolderState.WELL
        """The last answer of a probe (tiers/tier.py)."""
        self._fd = -1
        self._marked: tuple[int, int] | None = None

    def mark(self) -> None:
        """Remember the directory's device and inode. Raises OSError."""
        self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        self._marked = found.st_dev, found.st_ino

    def look(self) -> FolderState:
        """The current state of the path."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return FolderState.GONE
        except OSError:
            return FolderState.UNREACHABLE
        if (found.st_dev, found.st_ino) != self._marked:
            return FolderState.REPLACED
        # This respects modes, and detects file systems that are mounted or have become read-only, for root too.
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            return FolderState.READ_ONLY
        return FolderState.WELL

    def close(self) -> None:
        """Close the directory. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


_EVENTS = {
    FolderState.READ_ONLY: {
        "what": "its directory cannot be written to",
        "meaning": "its records are served, and it gets no new ones",
        "advice": "make it writable, or mount its file system read-write; the tier then resumes by itself",
    },
    FolderState.GONE: {
        "what": "its directory was deleted, or the file system was unmounted",
        "meaning": _NOT_USED,
        "advice": f"mount the file system again, and the tier resumes by itself; if it was deleted, {_RENEW}",
    },
    FolderState.REPLACED: {
        "what": "its path now leads to another directory",
        "meaning": _NOT_USED,
        "advice": f"mount the old directory again, and the tier resumes by itself; to use the new one, {_RENEW}",
    },
    FolderState.UNREACHABLE: {
        "what": "its file system does not answer, or answers with an error",
        "meaning": _NOT_USED,
        "advice": "check the file system and its disk or server; the tier resumes by itself when it answers",
    },
}


def event_of(now: FolderState, *, stays_read_only: bool) -> tuple[str, dict[str, str]]:
    """The event that says for the log that a directory's state has changed to `now`, and its fields.

    `stays_read_only`: the medium itself has given up writing, as the disk log does when a sync fails.
    """
    if now is not FolderState.WELL:
        return f"medium_{now}", _EVENTS[now]
    if stays_read_only:
        return "medium_back", {"advice": f"the medium takes no more records after a failed write; {_RENEW}"}
    return "medium_back", {}
