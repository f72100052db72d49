"""The core library and the package's extension modules.

Every `ext/core/src/**/*.cpp` is compiled once, into one static library. A module is one Cython source, translated to
C++, and any further C++ sources; it is linked with that library. Files are compiled on as many threads as there are
cores, the largest first. A module or program is linked again when one of its objects or the command has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from make.cache import ROOT, digest_of_text
from make.steps import (
    Builder,
    BuildFailed,
    Step,
    compile_step,
    compiler,
    environment_flags,
    run_tool,
    version_of,
)

CORE_INCLUDES = ["-Iext/core/src", "-Iext/core/include"]
WERROR = os.environ.get("KVSTRATA_WERROR") == "1"
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if WERROR else [])]
# Generated code has unused functions and parameters, and compares Python's signed sizes with unsigned sizes of C++.
GENERATED_WARNINGS = ["-Wall", "-Wno-unused-function", "-Wno-sign-compare"]
# No -march: the code targets the baseline CPU of the platform's ABI. Functions that need more have a target attribute
# of their own and are chosen at run time. -UNDEBUG keeps assertions.
CXX_FLAGS = ["-std=c++20", "-O3", "-g1", "-fPIC", "-UNDEBUG", "-fvisibility=hidden", "-pthread"]
OBJECTS = "build/native/objects"
GENERATED = "build/native/generated"
LIBRARY = "build/native/libkvstrata_core.a"


@dataclass(frozen=True)
class Module:
    name: str
    sources: tuple[str, ...]
    """The Cython source, then C++ sources."""
    includes: tuple[str, ...] = ()
    optional: bool = False
    """If the module cannot be compiled, the build prints a warning and leaves it out."""


def jobs_wanted() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def exclusive_build() -> Iterator[None]:
    """Holds the tree's build lock: a second build of the same tree waits."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / ".native.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def core_sources() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("ext/core/src/**/*.cpp"))


def size_of(name: str) -> int:
    return os.path.getsize(ROOT / name)


def object_of(source: str) -> str:
    return f"{OBJECTS}/{source.removeprefix(f'{GENERATED}/').removesuffix('.cpp')}.o"


def own_flags() -> list[str]:
    return [*CXX_FLAGS, *WARNINGS, *CORE_INCLUDES, *environment_flags("CPPFLAGS", "CXXFLAGS")]


def python_flags(module: Module, *, generated: bool) -> list[str]:
    """The flags for a source of an extension module. Of the flags of `setuptools` only -fwrapv matters: generated code
    relies on signed integers that wrap.
    """
    paths = sysconfig.get_paths()
    folders = ["ext/cython", *module.includes, *dict.fromkeys([paths["include"], paths["platinclude"]])]
    warnings = GENERATED_WARNINGS if generated else WARNINGS
    flags = [*CXX_FLAGS, "-fwrapv", *warnings, *CORE_INCLUDES, *(f"-I{folder}" for folder in folders)]
    return [*flags, *environment_flags("CPPFLAGS", "CXXFLAGS")]


@lru_cache
def cython_place() -> tuple[str, str]:
    """The version and the folder of Cython."""
    import Cython

    return f"cython {metadata.version('cython')}", str(Path(Cython.__file__).parent)


def without_places(generated: Path) -> None:
    """Removes Cython's folder from the names of its own files, so that every clone generates the same C++."""
    text = generated.read_text()
    generated.write_text(re.sub(r'"[^"\n]*/Cython/Includes/', '"', text))


def translate_step(module: Module) -> Step:
    """The step that translates a module's Cython source to C++."""
    version, place = cython_place()
    source, product = module.sources[0], f"{GENERATED}/{module.name.rpartition('.')[2]}.cpp"
    command = [sys.executable, "-m", "cython", "-3", "--cplus", "-M", "-X", "show_performance_hints=False"]
    command += ["-I", "ext/cython", "--module-name", module.name, source, "-o", product]
    return Step(
        shown=f"translating {source}",
        command=command,
        sources=[source],
        product=product,
        depfile=f"{product}.dep",
        tool_version=version,
        files_kept=lambda name: not os.path.normpath(ROOT / name).startswith(place),
        finish=without_places,
    )


def archive(builder: Builder, objects: Sequence[str], target: str = LIBRARY) -> str:
    """Makes a static library of `objects` and returns its path. A library whose objects are unchanged is left as it is,
    so that its users need not be linked again.
    """
    stamp = ROOT / f"{target}.key"
    key = digest_of_text(*(f"{name} {builder.cache.digests.of(ROOT / name)}" for name in objects))
    if not ((ROOT / target).exists() and stamp.exists() and stamp.read_text() == key):
        (ROOT / target).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / target).unlink(missing_ok=True)
        run_tool([os.environ.get("AR", "ar"), "rcsD", target, *objects])
        builder.cache.digests.forget(ROOT / target)
        stamp.write_text(key)
    return target


def link(builder: Builder, inputs: Sequence[str], target: Path, flags: Sequence[str] = ()) -> bool:
    """Links `inputs` into a shared object or program unless it is up to date; returns whether it was linked.

    The file is replaced by a rename, so a running process keeps the old file.
    """
    command = [*compiler(), *flags, "-pthread", *inputs, *environment_flags("LDFLAGS"), "-ldl", "-lrt"]
    contents = [str(builder.cache.digests.of(ROOT / name)) for name in inputs]
    key = digest_of_text(version_of(*compiler()), *command, "", *contents)
    stamp = ROOT / "build" / "native" / "linked" / f"{target.name}.key"
    if target.exists() and stamp.exists() and stamp.read_text() == f"{key} {target}":
        return False
    partial = target.with_name(target.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    run_tool([*command, "-o", str(partial)])
    partial.rename(target)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(f"{key} {target}")
    return True


def all_of(pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all tasks and returns their results. If a task fails, cancels the tasks that have not begun and raises the
    error.
    """
    futures: list[Future[Any]] = [pool.submit(task) for task in tasks]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def make_core(builder: Builder, pool: ThreadPoolExecutor) -> str:
    """Builds the core library and returns its path, relative to the tree."""
    sources = sorted(core_sources(), key=size_of, reverse=True)
    steps = [compile_step(source, object_of(source), own_flags()) for source in sources]
    all_of(pool, [partial(builder.make, step) for step in steps])
    return archive(builder, sorted(step.product for step in steps))


def make_modules(
    builder: Builder, modules: Sequence[Module], jobs: int, target_of: Callable[[str], Path]
) -> set[str]:
    """Builds all modules, each at `target_of(name)`; returns the names of the optional modules that failed to build."""
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        translations = [translate_step(module) for module in modules]
        order = sorted(translations, key=lambda step: size_of(step.sources[0]), reverse=True)
        all_of(pool, [partial(builder.make, step) for step in order])

        compilations: dict[Module, list[Step]] = {}
        for module, translation in zip(modules, translations, strict=True):
            sources = [(translation.product, True), *((source, False) for source in module.sources[1:])]
            compilations[module] = [
                compile_step(source, object_of(source), python_flags(module, generated=generated))
                for source, generated in sources
            ]
        failed: dict[str, str] = {}

        def compile_of(module: Module, step: Step) -> None:
            try:
                builder.make(step)
            except BuildFailed as error:
                if not module.optional:
                    raise
                failed[module.name] = str(error)

        tasks = [(module, step) for module, steps in compilations.items() for step in steps]
        tasks.sort(key=lambda task: size_of(task[1].sources[0]), reverse=True)
        pending = [pool.submit(compile_of, module, step) for module, step in tasks]
        library = make_core(builder, pool)
        for future in pending:
            future.result()

        def link_of(module: Module) -> None:
            if module.name not in failed:
                inputs = [*(step.product for step in compilations[module]), library]
                link(builder, inputs, target_of(module.name), ["-shared"])

        all_of(pool, [partial(link_of, module) for module in modules])
    for name, message in failed.items():
        print(f"{message}\nwarning: {name} is left out")
    builder.cache.sweep()
    return set(failed)
