"""Builds the native part of kvstrata; everything declarative stands in pyproject.toml.

- Every `ext/core/src/**/*.cpp` is compiled once, in parallel, into one static library.
- Every `ext/cython/NAME.pyx` becomes the module `kvstrata.native.NAME`, linked with that library.
- `ext/core/include` in part goes into `kvstrata/include`, for connectors that others write in C++.
- `ext/ucx` becomes `kvstrata.native.ucx` where UCX's headers are found; libucp itself is loaded at run time.
- `ext/cuda/*.cpp` go into `kvstrata.native.cuda`, which needs nothing of CUDA to be built or loaded; its kernels,
  `ext/cuda/kernels.cu`, become `kvstrata/native/kvstrata_cuda.fatbin` where nvcc is found.

Sources are found by pattern: a new file needs no edit here. Object files are kept under `build/native/` and
are remade when their source, a header they include, or the command line changes.

Environment: `CXX`, `CPPFLAGS`, `CXXFLAGS`, `LDFLAGS` as usual; `KVSTRATA_WERROR=1` turns warnings into
errors; `KVSTRATA_CUDA` is `auto` (default), `require` (no nvcc is an error) or `off`; `CUDA_HOME` names the
toolkit; `KVSTRATA_UCX` is `auto`, `require` (no headers of UCX is an error) or `off`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
CORE_SOURCES = sorted(p.relative_to(ROOT) for p in ROOT.glob("ext/core/src/**/*.cpp"))
CORE_HEADERS = sorted(p.relative_to(ROOT) for p in ROOT.glob("ext/core/**/*.h"))
CYTHON_SOURCES = sorted(p.relative_to(ROOT) for p in ROOT.glob("ext/cython/*.pyx"))
CYTHON_HEADERS = sorted(
    p.relative_to(ROOT) for pattern in ("pxd", "pxi", "h") for p in ROOT.glob(f"ext/cython/**/*.{pattern}")
)
CUDA_KERNELS = Path("ext/cuda/kernels.cu")
CUDA_SOURCES = sorted(p.relative_to(ROOT) for p in ROOT.glob("ext/cuda/*.cpp"))
CUDA_HEADERS = sorted(p.relative_to(ROOT) for p in ROOT.glob("ext/cuda/*.h"))
UCX_SOURCES = sorted(p.relative_to(ROOT) for p in ROOT.glob("ext/ucx/*.cpp"))
UCX_HEADERS = sorted(p.relative_to(ROOT) for p in ROOT.glob("ext/ucx/*.h"))
CORE_INCLUDE = "ext/core/include"
PUBLIC_HEADERS = ("connector.h", "digest.h")
"""What an extension outside needs; goes into the package, see `kvstrata --native-include-dir`."""
UCX_MODULE = "kvstrata.native.ucx"
OLDEST_UCX = [1, 16]
CUDA_MODULE = "kvstrata.native.cuda"
CUDA_FATBIN = "kvstrata_cuda.fatbin"
CUDA_ARCHITECTURES = (80, 90, 100)
# One IEEE operation for each in the source: kernels and the CPU's codec make the same bits.
CUDA_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", f"-I{CORE_INCLUDE}"]
CUDA_SHARED_HEADERS = [Path(CORE_INCLUDE) / "kvstrata" / name for name in ("fp8_scalar.h", "host_device.h")]

WARNINGS = ["-Wall", "-Wextra"] + (["-Werror"] if os.environ.get("KVSTRATA_WERROR") == "1" else [])
# Python's own flags carry -DNDEBUG, which would remove every assert. The baseline of the platform's ABI is
# kept: functions that need more choose at run time and carry a target attribute of their own.
CXX_FLAGS = ["-std=c++20", "-O3", "-g1", "-fPIC", "-UNDEBUG", "-fvisibility=hidden", "-pthread"]


class BuildFailed(BaseError):
    """A native build step failed; the message holds the command and its output."""


def environment_flags(*names: str) -> list[str]:
    return [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]


def run_tool(command: list[str]) -> None:
    """Runs one compiler command; raises BuildFailed with its output when it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BuildFailed(f"{shlex.join(command)}\n{done.stdout}exit status {done.returncode}")
    if done.stdout:
        print(done.stdout, end="", file=sys.stderr)


def newest_mtime_ns(paths: list[Path]) -> int:
    """The newest modification time, or a time in the far future when one of the files is missing."""
    try:
        return max(path.stat().st_mtime_ns for path in paths)
    except FileNotFoundError:
        return 1 << 63


def object_is_current(target: Path, command: list[str]) -> bool:
    """Whether `target` was made by this very command from sources and headers that did not change since."""
    depfile, stamp = target.with_suffix(".d"), target.with_suffix(".cmd")
    try:
        made_ns = target.stat().st_mtime_ns
        if stamp.read_text() != shlex.join(command):
            return False
        listed = depfile.read_text().replace("\\\n", " ").split(":", 1)[1]
    except (FileNotFoundError, IndexError):
        return False
    names = [name.replace("\0", " ") for name in listed.replace("\\ ", "\0").split()]
    return newest_mtime_ns([ROOT / name for name in names]) <= made_ns


@contextlib.contextmanager
def exclusive_build() -> Iterator[None]:
    """Only one build works in a tree at a time; a second one waits."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / ".native.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_core(jobs: int) -> Path:
    """Brings the static library of `ext/core/src` up to date and returns its path."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*CXX_FLAGS, *WARNINGS, f"-I{CORE_INCLUDE}", *environment_flags("CPPFLAGS", "CXXFLAGS")]
    digest = hashlib.sha256(shlex.join([*compiler, *flags]).encode()).hexdigest()[:12]
    folder = ROOT / "build" / "native" / f"core-{sysconfig.get_platform()}-{digest}"
    library = folder / "libkvstrata_core.a"

    def compile_one(source: Path) -> tuple[Path, bool]:
        target = folder / source.relative_to("ext/core/src").with_suffix(".o")
        relative = target.relative_to(ROOT)
        command = [*compiler, *flags, "-MMD", "-MF", str(relative.with_suffix(".d")), "-c", str(source)]
        command += ["-o", str(relative)]
        if object_is_current(target, command):
            return target, False
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"compiling {source}", flush=True)
        run_tool(command)
        target.with_suffix(".cmd").write_text(shlex.join(command))
        return target, True

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        results = list(pool.map(compile_one, CORE_SOURCES))
    objects = [str(target.relative_to(ROOT)) for target, _ in results]
    members = folder / "members.txt"
    unchanged = members.exists() and members.read_text() == "\n".join(objects)
    if library.exists() and unchanged and not any(made for _, made in results):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    library.unlink(missing_ok=True)
    run_tool([os.environ.get("AR", "ar"), "rcsD", str(library.relative_to(ROOT)), *objects])
    members.write_text("\n".join(objects))
    return library


def find_nvcc() -> list[str] | None:
    """nvcc of $CUDA_HOME, else on PATH, else of the packages `nvidia-cuda-nvcc` and `nvidia-cuda-cccl` of the Python
    that builds, else of the usual folder; with the options that it needs to find its own files."""
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    candidates = [[str(Path(home) / "bin" / "nvcc")]] if home else []
    candidates += [[on_path]] if on_path else []
    package = importlib.util.find_spec("nvidia")
    for place in (package and package.submodule_search_locations) or ():
        # One folder for all packages since CUDA 13 (nvidia/cu13), before that one for each.
        includes = [f"-I{folder}" for folder in sorted(Path(place).glob("*/include"))]
        candidates += [[str(nvcc), *includes] for nvcc in sorted(Path(place).glob("*/bin/nvcc"))]
    candidates.append(["/usr/local/cuda/bin/nvcc"])
    return next((command for command in candidates if os.access(command[0], os.X_OK)), None)


def compile_cuda() -> Path | None:
    """Brings the kernels up to date under build/ and returns their path.

    Without nvcc, or where it fails, returns None after one line that says so; with KVSTRATA_CUDA=require that
    is an error instead. The code for each GPU generation that this nvcc knows goes in, and portable code for
    later ones.
    """
    wish = os.environ.get("KVSTRATA_CUDA", "auto")
    if wish not in ("auto", "require", "off"):
        raise BuildFailed(f"KVSTRATA_CUDA={wish}: use auto, require or off")
    if wish == "off":
        return None
    nvcc = find_nvcc()
    if nvcc is None:
        if wish == "require":
            raise BuildFailed(
                "KVSTRATA_CUDA=require: no nvcc in $CUDA_HOME/bin, on PATH, of the package nvidia-cuda-nvcc or in "
                "/usr/local/cuda/bin; pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
            )
        print(
            "cuda: no nvcc found, the GPU kernels are left out (the server and CPU engines do not need them)"
        )
        return None
    try:
        known = subprocess.run(
            [nvcc[0], "--list-gpu-code"], capture_output=True, text=True, check=True
        ).stdout.split()
        generations = [number for number in CUDA_ARCHITECTURES if f"sm_{number}" in known]
        if not generations:
            raise BuildFailed(f"{nvcc[0]} knows none of the GPU generations {CUDA_ARCHITECTURES}")
        code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in generations]
        code.append(f"-gencode=arch=compute_{generations[-1]},code=compute_{generations[-1]}")
        command = [*nvcc, *CUDA_FLAGS, "-fatbin", *code, "-Xcompiler", "-Wall,-Wextra"]
        if "-Werror" in WARNINGS:
            command += ["-Werror", "all-warnings"]
        command.append(str(CUDA_KERNELS))
        folder = ROOT / "build" / "native" / "cuda"
        target, stamp = folder / CUDA_FATBIN, folder / "command.txt"
        unchanged = stamp.exists() and stamp.read_text() == shlex.join(command)
        inputs = [ROOT / path for path in (CUDA_KERNELS, *CUDA_HEADERS, *CUDA_SHARED_HEADERS)]
        if unchanged and target.exists() and newest_mtime_ns(inputs) <= target.stat().st_mtime_ns:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        print(
            f"compiling {CUDA_FATBIN} for {', '.join(f'sm_{number}' for number in generations)}", flush=True
        )
        run_tool([*command, "-o", str(target.relative_to(ROOT))])
        stamp.write_text(shlex.join(command))
        return target
    except (BuildFailed, OSError, subprocess.CalledProcessError) as error:
        if wish == "require":
            raise
        (ROOT / "build" / "native" / "cuda-error.log").write_text(str(error))
        print(f"cuda: {nvcc[0]} failed (see build/native/cuda-error.log), the GPU kernels are left out")
        return None


def find_ucx() -> Path | None:
    """The folder of UCX's headers: of the package `libucx` of the Python that builds, else the system's."""
    wish = os.environ.get("KVSTRATA_UCX", "auto")
    if wish not in ("auto", "require", "off"):
        raise BuildFailed(f"KVSTRATA_UCX={wish}: use auto, require or off")
    if wish == "off":
        return None
    package = importlib.util.find_spec("libucx")
    folders = [Path(place) / "include" for place in (package and package.submodule_search_locations) or ()]
    folders += [Path("/usr/local/include"), Path("/usr/include")]
    for folder in folders:
        version = folder / "ucp" / "api" / "ucp_version.h"
        numbers = re.findall(r"#define UCP_API_M\w+ +(\d+)", version.read_text()) if version.exists() else []
        if [int(number) for number in numbers] >= OLDEST_UCX:
            return folder
    if wish == "require":
        what = f"no headers of UCX {OLDEST_UCX[0]}.{OLDEST_UCX[1]} or newer"
        raise BuildFailed(f"KVSTRATA_UCX=require: {what}; pip install libucx-cu13, or install libucx-dev")
    print("ucx: no headers found, the UCX transfer engine is left out (see docs/p2p.md)")
    return None


class BuildNative(build_ext):
    """Compiles the core library first, then the Cython modules, then the GPU kernels where nvcc is there."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = len(os.sched_getaffinity(0))
        if self.editable_mode:
            # An editable install would build in a fresh temporary folder each time; keep what is current.
            version = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
            self.build_temp = str(ROOT / "build" / f"temp.{version}")
            self.build_lib = str(ROOT / "build" / f"lib.{version}")

    def run(self) -> None:
        with exclusive_build():
            super().run()
            self._place_cuda(compile_cuda())
        if not (self.inplace or self.editable_mode):
            for source, target in self._headers():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def build_extensions(self) -> None:
        if not any(extension.name == UCX_MODULE for extension in self.extensions):
            self._remove(UCX_MODULE)
        library = compile_core(int(self.parallel or 1)) if CORE_SOURCES else None
        self._translate_cython()
        for extension in self.extensions:
            if library is not None:
                extension.extra_objects = [str(library)]
                extension.depends.append(str(library))
        super().build_extensions()

    def _place_cuda(self, fatbin: Path | None) -> None:
        """Puts the kernels beside the compiled modules, or removes those that this build does not include."""
        folders = [Path(self.build_lib) / "kvstrata" / "native"]
        if self.inplace or self.editable_mode:
            folders.append(ROOT / "src" / "kvstrata" / "native")
        for folder in folders:
            target = folder / CUDA_FATBIN
            if fatbin is None:
                target.unlink(missing_ok=True)
            elif newest_mtime_ns([fatbin]) > (target.stat().st_mtime_ns if target.exists() else 0):
                folder.mkdir(parents=True, exist_ok=True)
                partial = target.with_suffix(".partial")
                shutil.copy2(fatbin, partial)
                partial.rename(target)

    def _remove(self, module: str) -> None:
        """Removes a module of an earlier build that this one does not include."""
        filename = Path(self.get_ext_filename(module))
        folders = [Path(self.build_lib)]
        if self.inplace or self.editable_mode:
            folders.append(ROOT / "src")
        for folder in folders:
            (folder / filename).unlink(missing_ok=True)

    def _headers(self) -> list[tuple[Path, Path]]:
        folder = Path(self.build_lib) / "kvstrata" / "include" / "kvstrata"
        return [(ROOT / CORE_INCLUDE / "kvstrata" / name, folder / name) for name in PUBLIC_HEADERS]

    def get_outputs(self) -> list[str]:
        fatbin = Path(self.build_lib) / "kvstrata" / "native" / CUDA_FATBIN
        placed = [fatbin, *(target for _, target in self._headers())]
        return [*super().get_outputs(), *(str(path) for path in placed if path.exists())]

    def _translate_cython(self) -> None:
        """Replaces each .pyx source by C++ generated under build/cython."""
        pending = [extension for extension in self.extensions if extension.sources[0].endswith(".pyx")]
        if not pending:
            return
        from Cython.Build import cythonize

        translated = cythonize(
            [Extension(e.name, list(e.sources), language="c++") for e in pending],
            build_dir="build/cython",
            include_path=["ext/cython"],
            compiler_directives={"language_level": 3},
            force=bool(self.force),
            quiet=True,
        )
        for extension, result in zip(pending, translated, strict=True):
            extension.sources = list(result.sources)


def extension(name: str, sources: list[Path], includes: list[Path], depends: list[Path]) -> Extension:
    return Extension(
        name,
        [str(source) for source in sources],
        include_dirs=[CORE_INCLUDE, "ext/cython", *(str(folder) for folder in includes)],
        language="c++",
        # Generated code casts functions and leaves parameters unused.
        extra_compile_args=[*CXX_FLAGS, "-Wno-unused-function", "-Wno-cast-function-type"],
        extra_link_args=["-pthread"],
        depends=[str(path) for path in (*CORE_HEADERS, *CYTHON_HEADERS, *depends)],
    )


def extensions() -> list[Extension]:
    found = [extension(f"kvstrata.native.{source.stem}", [source], [], []) for source in CYTHON_SOURCES]
    sources = [Path("ext/cuda/cuda.pyx"), *CUDA_SOURCES]
    found.append(extension(CUDA_MODULE, sources, [Path("ext/cuda")], CUDA_HEADERS))
    if ucx := find_ucx():
        sources = [Path("ext/ucx/ucx.pyx"), *UCX_SOURCES]
        found.append(extension(UCX_MODULE, sources, [Path("ext/ucx"), ucx], UCX_HEADERS))
        # Where nobody insists, headers that it cannot be compiled with cost a warning.
        found[-1].optional = os.environ.get("KVSTRATA_UCX") != "require"
    return found


os.chdir(ROOT)
setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
