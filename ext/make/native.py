"""The core library, the package's extension modules and the GPU kernels.

Every `ext/core/src/**/*.cpp` is compiled once, into one static library. A module is one Cython source, translated to
C++, and any further C++ sources; it is linked with that library. Files are compiled on as many threads as there are
cores, the largest first.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from make.build import (
    ROOT,
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

WATCHER_SOURCE, WATCHER = "ext/envoy/watch.c", "build/native/modules/libkv_watch.so"
KERNELS = "ext/cuda/kernels.cu"
FATBIN = "kvstrata_cuda.fatbin"
ARCHITECTURES = (80, 90, 100)
# The compiled code has one IEEE operation for each operation in the source, so the kernels compute the same bits as
# their tests on a CPU.
NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-Iext/core/src"]


@dataclass(frozen=True)
class Module:
    name: str
    sources: tuple[str, ...]
    """The Cython source, then C++ sources."""
    includes: tuple[str, ...] = ()


def found(pattern: str) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)))


def modules() -> list[Module]:
    """The modules of the package."""
    return [
        Module("kvstrata.native.core", ("ext/cython/core.pyx",)),
        Module("kvstrata.native.connector", ("ext/cython/connector.pyx",)),
        Module("kvstrata.native.cuda", ("ext/cuda/cuda.pyx", *found("ext/cuda/*.cpp")), ("ext/cuda",)),
    ]


def wish_for(variable: str) -> str:
    """`auto`, `require` or `off`. Raises BuildFailed for another value."""
    wish = os.environ.get(variable, "auto")
    if wish not in ("auto", "require", "off"):
        raise BuildFailed(f"{variable}={wish}: use auto, require or off")
    return wish


def package_folders(name: str) -> list[Path]:
    """The folders of a package of the Python that builds; none if it is not installed."""
    package = importlib.util.find_spec(name)
    return [Path(folder) for folder in (package and package.submodule_search_locations) or ()]


def jobs_wanted() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def exclusive_build() -> Iterator[None]:
    """Holds the tree's build lock: a second build of the same tree waits."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / ".native.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def object_of(source: str) -> str:
    return f"{OBJECTS}/{source.removeprefix(f'{GENERATED}/').removesuffix('.cpp')}.o"


def own_flags() -> list[str]:
    return [*CXX_FLAGS, *WARNINGS, *CORE_INCLUDES, *environment_flags("CPPFLAGS", "CXXFLAGS")]


def python_flags(module: Module, *, generated: bool) -> list[str]:
    """The flags for a source of an extension module. Of the flags of `setuptools` only -fwrapv matters: generated code
    relies on signed integers that wrap.
    """
    language = [*GENERATED_FLAGS, *GENERATED_WARNINGS] if generated else [*CXX_FLAGS, "-fwrapv", *WARNINGS]
    paths = sysconfig.get_paths()
    folders = ["ext/cython", *module.includes, *dict.fromkeys([paths["include"], paths["platinclude"]])]
    return [
        *(*language, *CORE_INCLUDES, *(f"-I{folder}" for folder in folders)),
        *environment_flags("CPPFLAGS", "CXXFLAGS"),
    ]


def compile_own(source: str, flags: Sequence[str]) -> Step:
    return compile_step(source, object_of(source), flags, common=common_of("ext/make/common.h", flags))


def without_places(generated: Path) -> None:
    """Removes Cython's folder from the names of its own files, so that every clone generates the same C++."""
    text = generated.read_text()
    generated.write_text(re.sub(r'"[^"\n]*/Cython/Includes/', '"', text))


def translate_step(module: Module) -> Step:
    """The step that translates a module's Cython source to C++."""
    place = str(metadata.distribution("cython").locate_file("Cython"))
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
        tool_version=f"cython {metadata.version('cython')}",
        files_kept=lambda name: not os.path.normpath(ROOT / name).startswith(place),
        finish=without_places,
    )


def archive_step(objects: Sequence[str]) -> Step:
    command = [os.environ.get("AR", "ar"), "rcsD", LIBRARY, *objects]
    return Step(shown=f"linking {LIBRARY}", command=command, sources=[*objects], product=LIBRARY)


def link_step(inputs: Sequence[str], target: str, *flags: str) -> Step:
    """The step that links `inputs` into a shared object or a program. A running process keeps the file before."""
    command = [*compiler(), *flags, "-pthread", *inputs, *environment_flags("LDFLAGS"), "-ldl", "-lrt"]
    return Step(
        shown=f"linking {target}",
        command=[*command, "-o", target],
        sources=[*inputs],
        product=target,
        tool_version=version_of(*compiler()),
    )


def watcher_step() -> Step:
    """The step that makes the module for Envoy, which has the functions that it calls."""
    command = [*compiler(), "-x", "c", "-std=gnu17", "-O2", "-fPIC", *WARNINGS, "-shared", WATCHER_SOURCE]
    return Step(
        shown=f"compiling {WATCHER_SOURCE}",
        command=[*command, "-o", WATCHER],
        sources=[WATCHER_SOURCE],
        product=WATCHER,
        tool_version=version_of(*compiler()),
    )


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
    sources = sorted(
        found("ext/core/src/**/*.cpp"), key=lambda name: os.path.getsize(ROOT / name), reverse=True
    )
    return [compile_own(source, own_flags()) for source in sources]


def make_core(builder: Builder, pool: ThreadPoolExecutor) -> str:
    """Builds the core library and returns its path, relative to the tree."""
    steps = core_steps()
    all_of(pool, [partial(builder.make, step) for step in steps])
    builder.make(archive_step(sorted(step.product for step in steps)))
    return LIBRARY


def make_modules(
    builder: Builder, wanted: Sequence[Module], jobs: int, target_of: Callable[[str], str]
) -> None:
    """Builds modules, each at `target_of(name)`."""
    objects: dict[str, list[str]] = {}

    def compile_module(module: Module) -> None:
        translation = translate_step(module)
        steps = [compile_own(source, python_flags(module, generated=False)) for source in module.sources[1:]]
        flags = python_flags(module, generated=True)
        steps.append(compile_step(translation.product, object_of(translation.product), flags))
        objects[module.name] = [step.product for step in steps]
        for step in [translation, *steps]:
            builder.make(step)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        core = core_steps()
        # The largest generated source takes as long as a third of the core.
        all_of(
            pool,
            [
                *(partial(compile_module, module) for module in wanted),
                *(partial(builder.make, step) for step in core),
            ],
        )
        builder.make(archive_step(sorted(step.product for step in core)))
        builder.make(watcher_step())
        for module in wanted:
            inputs = [*objects[module.name], LIBRARY]
            builder.make(link_step(inputs, target_of(module.name), "-shared"))
    builder.sweep()


def find_nvcc() -> list[str] | None:
    """The command of nvcc, with the options that it needs to find its own files; None if there is no nvcc.

    Takes the first that exists: in $CUDA_HOME, on PATH, in the packages `nvidia-cuda-nvcc` and `nvidia-cuda-cccl` of
    the Python that builds, in /usr/local/cuda.
    """
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    candidates = [[str(Path(home) / "bin" / "nvcc")]] if home else []
    candidates += [[on_path]] if on_path else []
    for folder in package_folders("nvidia"):
        # Since CUDA 13 all packages share one folder (nvidia/cu13); before, each had its own.
        includes = [f"-I{include}" for include in sorted(folder.glob("*/include"))]
        candidates += [[str(nvcc), *includes] for nvcc in sorted(folder.glob("*/bin/nvcc"))]
    candidates.append(["/usr/local/cuda/bin/nvcc"])
    return next((command for command in candidates if os.access(command[0], os.X_OK)), None)


def make_kernels(builder: Builder, *, werror: bool) -> Path | None:
    """Brings the kernels up to date under build/ and returns their path.

    If there is no nvcc, or nvcc fails, prints a line that says so and returns None; with KVSTRATA_CUDA=require, raises
    BuildFailed instead. The file contains code for each GPU generation that this nvcc knows, and portable code for
    later generations.
    """
    wish = wish_for("KVSTRATA_CUDA")
    nvcc = None if wish == "off" else find_nvcc()
    if nvcc is None:
        if wish == "require":
            raise BuildFailed(
                "KVSTRATA_CUDA=require: no nvcc in $CUDA_HOME/bin, on PATH, of the package nvidia-cuda-nvcc or in "
                "/usr/local/cuda/bin; pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
            )
        if wish == "auto":
            print(
                "cuda: no nvcc found, the GPU kernels are left out (the server and CPU engines do not need them)"
            )
        return None
    product = f"build/native/cuda/{FATBIN}"
    try:
        known = run_tool([nvcc[0], "--list-gpu-code"]).split()
        generations = [number for number in ARCHITECTURES if f"sm_{number}" in known]
        if not generations:
            raise BuildFailed(f"{nvcc[0]} knows none of the GPU generations {ARCHITECTURES}")
        code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in generations]
        code.append(f"-gencode=arch=compute_{generations[-1]},code=compute_{generations[-1]}")
        command = [*nvcc, *NVCC_FLAGS, "-fatbin", *code, "-Xcompiler", "-Wall,-Wextra"]
        command += ["-Werror", "all-warnings"] if werror else []
        builder.make(
            Step(
                shown=f"compiling {FATBIN} for {', '.join(f'sm_{number}' for number in generations)}",
                command=[*command, "-MD", "-MF", f"{product}.d", KERNELS, "-o", product],
                sources=[KERNELS],
                product=product,
                depfile=f"{product}.d",
                tool_version=version_of(nvcc[0]),
                files_kept=lambda name: not os.path.isabs(name),
            )
        )
    except BuildFailed as error:
        if wish == "require":
            raise
        (ROOT / "build" / "native" / "cuda-error.log").write_text(str(error))
        print(f"cuda: {nvcc[0]} failed (see build/native/cuda-error.log), the GPU kernels are left out")
        return None
    return ROOT / product
