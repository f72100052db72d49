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
import shlex
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
    common_of,
    compile_step,
    compiler,
    environment_flags,
    run_tool,
    version_of,
)
from make.translator import Translator

CORE_INCLUDES = ["-Iext/core/src", "-Iext/core/include"]
WERROR = os.environ.get("KVSTRATA_WERROR") == "1"
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if WERROR else [])]
# Generated code has unused functions and parameters, and compares Python's signed sizes with unsigned sizes of C++.
GENERATED_WARNINGS = ["-Wall", "-Wno-unused-function", "-Wno-sign-compare"]
# No -march: the code targets the baseline CPU of the platform's ABI. Functions that need more have a target attribute
# of their own and are chosen at run time. -UNDEBUG keeps assertions.
CXX_FLAGS = ["-std=c++20", "-O3", "-g1", "-fPIC", "-UNDEBUG", "-fvisibility=hidden", "-pthread"]
# Generated code converts arguments and calls the core, so -O3 gains nothing there and takes 1.5 times as long.
GENERATED_FLAGS = [*(flag if flag != "-O3" else "-O1" for flag in CXX_FLAGS), "-fwrapv"]
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


def python_folders() -> list[str]:
    paths = sysconfig.get_paths()
    return [f"-I{folder}" for folder in dict.fromkeys([paths["include"], paths["platinclude"]])]


def python_flags(module: Module, *, generated: bool) -> list[str]:
    """The flags for a source of an extension module. Of the flags of `setuptools` only -fwrapv matters: generated code
    relies on signed integers that wrap.
    """
    language = [*GENERATED_FLAGS, *GENERATED_WARNINGS] if generated else [*CXX_FLAGS, "-fwrapv", *WARNINGS]
    folders = ["-Iext/cython", *(f"-I{folder}" for folder in module.includes), *python_folders()]
    return [*language, *CORE_INCLUDES, *folders, *environment_flags("CPPFLAGS", "CXXFLAGS")]


def compile_own(source: str, flags: Sequence[str]) -> Step:
    return compile_step(source, object_of(source), flags, common=common_of("ext/make/common.h", flags))


def compile_generated(source: str, flags: Sequence[str]) -> Step:
    common = common_of("ext/make/common_python.h", flags, *python_folders())
    return compile_step(source, object_of(source), flags, common=common)


@lru_cache
def cython_place() -> tuple[str, str]:
    """The version and the folder of Cython."""
    import Cython

    return f"cython {metadata.version('cython')}", str(Path(Cython.__file__).parent)


def without_places(generated: Path) -> None:
    """Removes Cython's folder from the names of its own files, so that every clone generates the same C++."""
    text = generated.read_text()
    generated.write_text(re.sub(r'"[^"\n]*/Cython/Includes/', '"', text))


def translate_step(module: Module, translator: Translator) -> Step:
    """The step that translates a module's Cython source to C++."""

    def run(command: Sequence[str], folder: Path) -> str:
        succeeded, output = translator.run(command[3:])
        if not succeeded:
            raise BuildFailed(f"{shlex.join(command)}\n{output}")
        return output

    version, place = cython_place()
    source, product = module.sources[0], f"{GENERATED}/{module.name.rpartition('.')[2]}.cpp"
    # Cython's depfile lacks the module's own declarations.
    own = f"ext/cython/{module.name.replace('.', '/')}.pxd"
    command = [sys.executable, "-m", "cython", "-3", "--cplus", "-M", "-X", "show_performance_hints=False"]
    command += ["-I", "ext/cython", "--module-name", module.name, source, "-o", product]
    return Step(
        shown=f"translating {source}",
        command=command,
        sources=[source, own] if (ROOT / own).exists() else [source],
        product=product,
        depfile=f"{product}.dep",
        tool_version=version,
        files_kept=lambda name: not os.path.normpath(ROOT / name).startswith(place),
        finish=without_places,
        run=run,
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


@contextlib.contextmanager
def cancelled_on_failure(futures: list[Future[Any]]) -> Iterator[None]:
    """If the body fails, tasks that have not begun are cancelled."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def all_of(pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all tasks and returns their results. If a task fails, cancels the tasks that have not begun and raises the
    error.
    """
    futures: list[Future[Any]] = [pool.submit(task) for task in tasks]
    with cancelled_on_failure(futures):
        return [future.result() for future in futures]


def core_steps() -> list[Step]:
    sources = sorted(core_sources(), key=size_of, reverse=True)
    return [compile_own(source, own_flags()) for source in sources]


def make_core(builder: Builder, pool: ThreadPoolExecutor) -> str:
    """Builds the core library and returns its path, relative to the tree."""
    steps = core_steps()
    all_of(pool, [partial(builder.make, step) for step in steps])
    return archive(builder, sorted(step.product for step in steps))


def make_modules(
    builder: Builder, modules: Sequence[Module], jobs: int, target_of: Callable[[str], Path]
) -> set[str]:
    """Builds all modules, each at `target_of(name)`; returns the names of the optional modules that failed to build.

    Modules are translated one after the other while sources are compiled.
    """
    failed: dict[str, str] = {}
    objects: dict[Module, list[str]] = {}
    largest = sorted(modules, key=lambda module: size_of(module.sources[0]), reverse=True)

    def compile_of(module: Module, step: Step) -> None:
        try:
            builder.make(step)
        except BuildFailed as error:
            if not module.optional:
                raise
            failed[module.name] = str(error)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        core = core_steps()
        pending = [pool.submit(builder.make, step) for step in core]
        with contextlib.closing(Translator(ROOT)) as translator, cancelled_on_failure(pending):
            for module in largest:
                translation = translate_step(module, translator)
                builder.make(translation)
                steps = [compile_generated(translation.product, python_flags(module, generated=True))]
                own = python_flags(module, generated=False)
                steps += [compile_own(source, own) for source in module.sources[1:]]
                objects[module] = [step.product for step in steps]
                pending += [pool.submit(compile_of, module, step) for step in steps]
            for future in pending:
                future.result()
        library = archive(builder, sorted(step.product for step in core))

        def link_of(module: Module) -> None:
            if module.name not in failed:
                link(builder, [*objects[module], library], target_of(module.name), ["-shared"])

        all_of(pool, [partial(link_of, module) for module in modules])
    for name, message in failed.items():
        print(f"{message}\nwarning: {name} is left out")
    builder.cache.sweep()
    return set(failed)
