"""A step of a build, and the cache of the products of all steps, found by the content of the files that were read.

A product is found in two lookups, as in ccache's direct mode. A *recipe* is the digest of the command, the tool's
version and the sources that the command names. A recipe has several *editions*, each with the digest of every other
file that the tool read (headers). The edition whose files all have the same content today is the one that a build
uses.

- File names are those of the command line, relative to the tree for files inside it: a second clone of the same commit
  finds all products of the first clone. A file under another name is compiled again, because assertions and debug
  information contain the name.
- A new header that comes before a header of the same name in the search path goes unnoticed until a file that was read
  changes.
- Entries are written under a temporary name and renamed, so processes may share the folder. A truncated product counts
  as missing.
- The folder stays below a limit: the least recently used files go first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 1 << 30
EDITIONS_KEPT = 8
SWEEP_INTERVAL_S = 600.0
ENVIRONMENT_READ = ("CPATH", "CPLUS_INCLUDE_PATH", "SOURCE_DATE_EPOCH")
"""The variables of the environment that change the output of compilers."""


class BuildFailed(Exception):
    """A command failed; the message holds the command and its output."""


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
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return ROOT / "build" / "cache" / "objects"


def digest_of_text(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


@lru_cache
def version_of(*tool: str) -> str:
    """The output of the tool's --version. Raises BuildFailed if the tool cannot be run."""
    return run_tool([*tool, "--version"])


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def environment_flags(*names: str) -> list[str]:
    return [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]


def run_tool(command: Sequence[str], folder: Path = ROOT) -> str:
    """Runs a command in `folder` and returns its output. Raises BuildFailed if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise BuildFailed(f"{shlex.join(command)}\n{error}") from None
    if done.returncode != 0:
        raise BuildFailed(f"{shlex.join(command)}\n{done.stdout}exit status {done.returncode}")
    return done.stdout


def names_in(depfile: str) -> list[str]:
    """The prerequisites of a rule that a compiler wrote for make."""
    rule = depfile.replace("\\\n", " ").split(":", 1)[1].split("\n", 1)[0]
    names = re.findall(r"(?:\\.|\S)+", rule)
    return [re.sub(r"\\(.)", r"\1", name) for name in names]


@dataclass
class Step:
    """`command` reads `sources`, and other files that it lists in `depfile`, and writes `product`.

    All paths are relative to `folder`. `shown` is the line that is printed when the step runs.
    """

    shown: str
    command: list[str]
    sources: list[str]
    product: str
    depfile: str | None = None
    folder: Path = ROOT
    tool_version: str = ""
    files_kept: Callable[[str], bool] = field(default=lambda name: True)
    """Which names of the depfile become part of the entry; the other files belong to the tool and change only with its
    version.
    """
    prepare: Callable[[], None] | None = None
    """Runs before the command."""
    finish: Callable[[Path], None] | None = None
    """Changes the product before it is kept."""


class Builder:
    """Runs the steps whose products the cache lacks. Thread-safe."""

    def __init__(
        self, folder: Path | None = None, *, links: bool = True, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """Products are hard links into the cache's folder; without `links`, copies with the present time, for a make
        that compares times.
        """
        self.folder = folder or objects_folder()
        self.ran: list[str] = []
        """The products that were not in the cache and had to be made."""
        self._links = links
        self._limit_bytes = limit_bytes
        self._digests: dict[Path, str | None] = {}
        self._printing = threading.Lock()

    def make(self, step: Step) -> list[str]:
        """Brings the product of a step up to date; returns the names of the files that it was made from.

        Raises BuildFailed if the command fails.
        """
        recipe = self._recipe_of(step)
        product = step.folder / step.product
        product.parent.mkdir(parents=True, exist_ok=True)
        for edition in self._editions(recipe):
            kept = self._path(edition["key"], ".product")
            files = edition["files"]
            if any(self._digest_of(step.folder / name) != digest for name, digest in files.items()):
                continue
            with contextlib.suppress(OSError):
                if kept.stat().st_size == edition["size_bytes"]:
                    self._print(edition["output"], sys.stderr)
                    self._place(kept, product)
                    for path in (kept, self._path(recipe, ".json")):
                        # Not the modification time, which a build reads through its link.
                        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                    return [*step.sources, *files]
            break
        return self._run(step, recipe, product)

    def _run(self, step: Step, recipe: str, product: Path) -> list[str]:
        begin_ns = time.time_ns()
        product.unlink(missing_ok=True)  # it may be a link into the cache
        self._print(f"{step.shown}\n", sys.stdout)
        if step.prepare is not None:
            step.prepare()
        output = run_tool(step.command, step.folder)
        if step.finish is not None:
            step.finish(product)
        self._print(output, sys.stderr)
        self.ran.append(step.product)
        self._digests.pop(product, None)
        others: set[str] = set()
        if step.depfile is not None:
            depfile = step.folder / step.depfile
            others = {name for name in names_in(depfile.read_text()) if step.files_kept(name)}
            depfile.unlink()
        files = sorted(others - {*step.sources})
        # A file that changed while the tool ran may have been read before or after.
        with contextlib.suppress(OSError):
            if all((step.folder / name).stat().st_mtime_ns < begin_ns for name in [*step.sources, *files]):
                self.add(recipe, step.folder, files, product, output)
        return [*step.sources, *files]

    def add(self, recipe: str, folder: Path, files: Sequence[str], product: Path, output: str) -> None:
        """Keeps a copy of `product`, made by `recipe` from `files`. Raises OSError if the cache cannot be written."""
        digests = {name: self._digest_of(folder / name) for name in files}
        key = digest_of_text(recipe, json.dumps(digests))
        self._write(self._path(key, ".product"), product)
        size_bytes = product.stat().st_size
        edition = {"key": key, "files": digests, "size_bytes": size_bytes, "output": output}
        others = [other for other in self._editions(recipe) if other["key"] != key]
        self._write(self._path(recipe, ".json"), json.dumps([edition, *others][:EDITIONS_KEPT]))

    def sweep(self, *, now: bool = False) -> None:
        """If the folder exceeds the limit, removes the least recently used files until nine tenths are left.

        Without `now`, all processes together check the folder at most once in ten minutes.
        """
        stamp = self.folder / ".swept"
        with contextlib.suppress(OSError):
            if not now and time.time() - stamp.stat().st_mtime < SWEEP_INTERVAL_S:
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        found = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path))
        total_bytes = sum(size_bytes for _, size_bytes, _ in found)
        if total_bytes > self._limit_bytes:
            for _, size_bytes, path in sorted(found):
                if total_bytes <= self._limit_bytes * 9 // 10:
                    break
                path.unlink(missing_ok=True)
                total_bytes -= size_bytes

    def _recipe_of(self, step: Step) -> str:
        # The path of the tool is left out: `tool_version` identifies the tool.
        words = [word.replace(str(ROOT), ".") for word in step.command[1:]]
        inputs = [f"{name} {self._digest_of(step.folder / name)}" for name in step.sources]
        environment = [os.environ.get(name, "") for name in ENVIRONMENT_READ]
        where = str(step.folder.relative_to(ROOT)) if step.folder.is_relative_to(ROOT) else ""
        return digest_of_text(where, step.tool_version, *words, "", *inputs, "", *environment)

    def _path(self, key: str, suffix: str) -> Path:
        return self.folder / key[:2] / f"{key}{suffix}"

    def _editions(self, recipe: str) -> list[dict[str, Any]]:
        try:
            editions = json.loads(self._path(recipe, ".json").read_text())
        except (OSError, ValueError):
            return []
        return editions if isinstance(editions, list) else []

    def _digest_of(self, path: Path) -> str | None:
        """The digest of a file's content, read once; None if the file cannot be read."""
        if path not in self._digests:
            try:
                self._digests[path] = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError:
                self._digests[path] = None
        return self._digests[path]

    def _place(self, kept: Path, product: Path) -> None:
        if self._links and product.exists() and product.samefile(kept):
            return
        partial = product.with_name(product.name + ".partial")
        partial.unlink(missing_ok=True)
        try:
            if not self._links:
                raise OSError
            os.link(kept, partial)
        except OSError:
            shutil.copyfile(kept, partial)
        partial.rename(product)
        self._digests.pop(product, None)

    def _write(self, target: Path, content: Path | str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".partial.")
        try:
            os.close(handle)
            if isinstance(content, str):
                Path(name).write_text(content)
            else:
                shutil.copyfile(content, name)
                shutil.copymode(content, name)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _print(self, text: str, stream: TextIO) -> None:
        if text:
            with self._printing:
                print(text, end="", file=stream, flush=True)


@dataclass(frozen=True)
class Common:
    """A header that is precompiled for one set of flags and read in front of each source: sources include mostly the
    same standard headers. It takes 3 s when the first source with these flags is compiled.
    """

    header: str
    """Relative to the tree."""
    flags: tuple[str, ...]

    def placed(self) -> Path:
        """The header's copy, beside which the compiled header lies. Its path depends on its content and the flags."""
        text = (ROOT / self.header).read_text()
        key = digest_of_text(version_of(*compiler()), *self.flags, self.header, text)[:16]
        copy = ROOT / "build" / "native" / "headers" / key / "common.h"
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            partial = copy.with_name(f"partial-{os.getpid()}-{threading.get_ident()}")
            partial.write_text(f'#include "{os.path.relpath(ROOT / self.header, copy.parent)}"\n')
            partial.rename(copy)
        return copy

    def compile(self) -> None:
        """Threads and processes may call this at once; one compiles, the others wait. Without success text is read."""
        copy = self.placed()
        compiled = copy.with_name("common.h.gch")
        with open(copy.with_name(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not compiled.exists():
                partial = compiled.with_name("partial.gch")
                with contextlib.suppress(BuildFailed):
                    run_tool([*compiler(), *self.flags, "-x", "c++-header", str(copy), "-o", str(partial)])
                    partial.rename(compiled)


def common_of(header: str, flags: Sequence[str], *includes: str) -> Common | None:
    """The header `header` with those of `flags` that matter to it; None if another header has to come first."""
    if "-include" in flags:
        return None
    before = ["", *flags]
    kept = [
        flag
        for flag, previous in zip(flags, before, strict=False)
        if not flag.startswith(("-I", "-isystem")) and previous != "-isystem"
    ]
    return Common(header, (*kept, *includes))


def compile_step(
    source: str, product: str, flags: Sequence[str], folder: Path = ROOT, common: Common | None = None
) -> Step:
    """The step that compiles a C++ source to an object. The object does not depend on the path of the tree."""
    depfile = product + ".d"
    first = ["-include", os.path.relpath(common.placed(), folder)] if common else []
    command = [*compiler(), *first, *flags, f"-ffile-prefix-map={ROOT}=.", "-MD", "-MF", depfile]
    return Step(
        shown=f"compiling {source}",
        command=[*command, "-c", source, "-o", product],
        sources=[source],
        product=product,
        depfile=depfile,
        folder=folder,
        tool_version=version_of(*compiler()),
        prepare=common.compile if common else None,
    )
