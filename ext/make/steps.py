"""One step of a build: a command that makes one file, and that runs only when the cache does not have the file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from make.cache import ROOT, Cache, digest_of_text

ENVIRONMENT_READ = ("CPATH", "CPLUS_INCLUDE_PATH", "SOURCE_DATE_EPOCH")
"""The variables of the environment that change the output of compilers."""


class BuildFailed(Exception):
    """A command failed; the message holds the command and its output."""


@lru_cache
def version_of(*tool: str) -> str:
    """The output of the tool's --version. Raises BuildFailed if the tool cannot be run."""
    try:
        return subprocess.run([*tool, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildFailed(f"{shlex.join(tool)} --version: {error}") from None


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
    finish: Callable[[Path], None] | None = None
    """Changes the product before it is kept."""
    prepare: Callable[[], None] | None = None
    """Runs before the command."""
    run: Callable[[Sequence[str], Path], str] = run_tool
    """Runs the command in a folder, and returns its output; raises BuildFailed."""

    def recipe(self, cache: Cache) -> str:
        # The path of the tool is left out: `tool_version` identifies the tool.
        words = [word.replace(str(ROOT), ".") for word in self.command[1:]]
        inputs = [f"{name} {cache.digests.of(self.folder / name)}" for name in self.sources]
        environment = [os.environ.get(name, "") for name in ENVIRONMENT_READ]
        where = str(self.folder.relative_to(ROOT)) if self.folder.is_relative_to(ROOT) else ""
        return digest_of_text(where, self.tool_version, *words, "", *inputs, "", *environment)


class Builder:
    """Runs steps through a cache. Thread-safe."""

    def __init__(self, cache: Cache | None = None, *, links: bool = True) -> None:
        """Without `links`, products are copies with the present time, for a make that compares times."""
        self.cache = cache or Cache()
        self._links = links
        self.ran: list[str] = []
        """The products that were not in the cache and had to be made."""
        self._printing = threading.Lock()

    def say(self, text: str) -> None:
        with self._printing:
            print(text, flush=True)

    def make(self, step: Step) -> list[str]:
        """Brings the product of a step up to date; returns the names of the files that it was made from.

        With links, a product that is up to date is left untouched, so that its time says when it last changed. Raises
        BuildFailed if the command fails.
        """
        recipe = step.recipe(self.cache)
        product = step.folder / step.product
        stamp = product.with_name(product.name + ".key")
        entry = self.cache.find(recipe, step.folder)
        if entry is None:
            begin_ns = time.time_ns()
            product.parent.mkdir(parents=True, exist_ok=True)
            product.unlink(missing_ok=True)  # it may be a link into the cache
            stamp.unlink(missing_ok=True)
            self.say(step.shown)
            if step.prepare is not None:
                step.prepare()
            output = step.run(step.command, step.folder)
            if step.finish is not None:
                step.finish(product)
            self.ran.append(step.product)
            self._show(output)
            self.cache.digests.forget(product)
            files = self._files(step)
            # A file that changed while the compiler ran may have been read before or after.
            if any(self._changed_since(step.folder / name, begin_ns) for name in [*step.sources, *files]):
                return [*step.sources, *files]
            with contextlib.suppress(OSError):
                entry = self.cache.add(recipe, step.folder, files, product, output)
                stamp.write_text(entry.key)
            return [*step.sources, *files]
        self._show(entry.output)
        if not (product.exists() and stamp.exists() and stamp.read_text() == entry.key):
            product.parent.mkdir(parents=True, exist_ok=True)
            product.unlink(missing_ok=True)
            place(entry.product, product, link=self._links)
            stamp.write_text(entry.key)
            self.cache.digests.forget(product)
        elif not self._links:
            product.touch()
        return [*step.sources, *entry.files]

    def _show(self, output: str) -> None:
        if output:
            with self._printing:
                print(output, end="", file=sys.stderr, flush=True)

    @staticmethod
    def _changed_since(path: Path, time_ns: int) -> bool:
        try:
            return path.stat().st_mtime_ns >= time_ns
        except FileNotFoundError:
            return True

    def _files(self, step: Step) -> list[str]:
        if step.depfile is None:
            return []
        depfile = step.folder / step.depfile
        names = names_in(depfile.read_text())
        depfile.unlink()
        return sorted({name for name in names if name not in step.sources and step.files_kept(name)})


def place(source: Path, target: Path, *, link: bool) -> None:
    """Makes `target` a hard link to `source`, or a copy if `link` is false or no link can be made."""
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        if not link:
            raise OSError
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    partial.rename(target)


@dataclass(frozen=True)
class Common:
    """A header of system headers that goes before each source with some flags, and is compiled once for all of them.

    GCC takes the compiled header in the place of the text if it is there, which saves 0.6 s of a source's 1.4 s. It is
    not part of the cache: 70 MB, and made in 3 s when the first source with these flags is compiled.
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
        if compiled.exists():
            return
        with open(copy.with_name(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not compiled.exists():
                partial = compiled.with_name("partial.gch")
                with contextlib.suppress(BuildFailed):
                    run_tool([*compiler(), *self.flags, "-x", "c++-header", str(copy), "-o", str(partial)])
                    partial.rename(compiled)


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
