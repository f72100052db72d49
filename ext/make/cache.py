"""A cache of the products of compilers, which are found by the content of all files that the compiler read.

An entry is found in two steps, as in ccache's direct mode. A *recipe* is the digest of the command, the compiler's
version and the sources that the command names. A recipe has several *editions*, each with the digest of every other
file that the compiler read (headers). The edition whose files all have the same content today is the one that a build
uses.

- File names are those of the command line, relative to the tree for files inside it: a second clone of the same commit
  finds all products of the first clone. A file under another name is compiled again, because assertions and debug
  information contain the name.
- A new header that comes before a header of the same name in the search path goes unnoticed until a file that was read
  changes.
- Entries are written under a temporary name and renamed, so processes may share the folder. A truncated product counts
  as missing.
- `sweep` keeps the folder below a limit and removes the least recently used files first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 1 << 30
EDITIONS_KEPT = 8
SWEEP_INTERVAL_S = 600.0


def cache_root() -> Path:
    """The folder that all clones share: `$KVSTRATA_CACHE`, or `kvstrata` in the XDG cache folder.

    Without a home folder it is build/cache of this clone.
    """
    if named := os.environ.get("KVSTRATA_CACHE"):
        return Path(named).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "kvstrata"
    home = os.environ.get("HOME")
    return Path(home) / ".cache" / "kvstrata" if home else ROOT / "build" / "cache"


def objects_folder() -> Path:
    """The folder of the cache: the shared folder, or a folder of this clone if the user may not write there."""
    folder = cache_root() / "objects"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return ROOT / "build" / "cache" / "objects"


def digest_of_text(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


class Digests:
    """Digests of the contents of files. Reads each file once."""

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def of(self, path: Path) -> str | None:
        """The digest of a file; None if the file cannot be read."""
        name = str(path)
        if name not in self._known:
            try:
                self._known[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError:
                self._known[name] = None
        return self._known[name]

    def forget(self, path: Path) -> None:
        self._known.pop(str(path), None)


@dataclass(frozen=True)
class Entry:
    key: str
    product: Path
    files: tuple[str, ...]
    """The names of the files that the compiler read besides the sources, as its depfile has them."""
    output: str
    """The text that the compiler printed."""


class Cache:
    """The entries of one folder. Thread-safe."""

    def __init__(self, folder: Path | None = None, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder or objects_folder()
        self._limit_bytes = limit_bytes
        self.digests = Digests()

    def _path(self, key: str, suffix: str) -> Path:
        return self.folder / key[:2] / f"{key}{suffix}"

    def _editions(self, recipe: str) -> list[dict[str, object]]:
        try:
            editions = json.loads(self._path(recipe, ".json").read_text())
        except (OSError, ValueError):
            return []
        return editions if isinstance(editions, list) else []

    def find(self, recipe: str, folder: Path) -> Entry | None:
        """The entry of a recipe that fits the present files below `folder`, or None."""
        for edition in self._editions(recipe):
            key, files, size_bytes = str(edition["key"]), edition["files"], edition["size_bytes"]
            assert isinstance(files, dict)
            if any(self.digests.of(folder / name) != digest for name, digest in files.items()):
                continue
            product = self._path(key, ".product")
            try:
                if product.stat().st_size != size_bytes:
                    return None
                self._used(product)
                self._used(self._path(recipe, ".json"))
            except OSError:
                return None
            return Entry(key, product, tuple(files), str(edition["output"]))
        return None

    @staticmethod
    def _used(path: Path) -> None:
        """Sets only the access time, because a build that has a link to the product reads the modification time."""
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def add(self, recipe: str, folder: Path, files: Iterable[str], product: Path, output: str) -> Entry:
        """Keeps a copy of `product`, made by `recipe` from `files`.

        Raises OSError if a file cannot be read or the cache cannot be written.
        """
        digests: dict[str, str] = {}
        for name in files:
            digest = self.digests.of(folder / name)
            if digest is None:
                raise FileNotFoundError(folder / name)
            digests[name] = digest
        key = digest_of_text(recipe, json.dumps(digests))
        entry = Entry(key, self._path(key, ".product"), tuple(digests), output)
        self._write(entry.product, product)
        size_bytes = product.stat().st_size
        edition = {"key": key, "files": digests, "size_bytes": size_bytes, "output": output}
        others = [other for other in self._editions(recipe) if other["key"] != key]
        self._write(self._path(recipe, ".json"), json.dumps([edition, *others][:EDITIONS_KEPT]))
        return entry

    def _write(self, target: Path, content: Path | str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".partial.")
        try:
            with os.fdopen(handle, "wb") as partial:
                if isinstance(content, str):
                    partial.write(content.encode())
                else:
                    with open(content, "rb") as source:
                        shutil.copyfileobj(source, partial)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def sweep(self, *, now: bool = False) -> int:
        """If the folder exceeds the limit, removes the least recently used files until nine tenths of the limit are
        left, and returns their number.

        Without `now`, all processes together check the folder at most once in ten minutes.
        """
        stamp = self.folder / ".swept"
        with contextlib.suppress(OSError):
            if not now and time.time() - stamp.stat().st_mtime < SWEEP_INTERVAL_S:
                return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        found = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path))
        total_bytes = sum(size_bytes for _, size_bytes, _ in found)
        if total_bytes <= self._limit_bytes:
            return 0
        removed = 0
        for _, size_bytes, path in sorted(found):
            if total_bytes <= self._limit_bytes * 9 // 10:
                break
            path.unlink(missing_ok=True)
            total_bytes -= size_bytes
            removed += 1
        return removed
