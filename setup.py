"""Builds the native part of kvstrata with `ext/make`; everything declarative stands in pyproject.toml.

- Every `ext/core/src/**/*.cpp` goes into one static library.
- `ext/cython/core.pyx` and `connector.pyx`, which include the files of their folders, become the modules
  `kvstrata.native.core` and `connector`, linked with that library.
- `ext/core/include` goes into `kvstrata/include`, for connectors that others write in C++.
- `ext/ucx` becomes `kvstrata.native.ucx` where UCX's headers are found; libucp itself is loaded at run time.
- `ext/cuda/*.cpp` go into `kvstrata.native.cuda`, which needs nothing of CUDA to be built or loaded; its kernels,
  `ext/cuda/kernels.cu`, become `kvstrata/native/kvstrata_cuda.fatbin` where nvcc is found.

Sources are found by pattern: a new file needs no edit here. Compiled files are kept in the cache folder
(`$KVSTRATA_CACHE` or `~/.cache/kvstrata`, at most 1 GiB of objects) and found again by content.

Environment: `CXX`, `CPPFLAGS`, `CXXFLAGS`, `LDFLAGS` as usual; `KVSTRATA_WERROR=1` turns warnings into
errors; `KVSTRATA_CUDA` is `auto` (default), `require` (no nvcc is an error) or `off`; `CUDA_HOME` names the
toolkit; `KVSTRATA_UCX` is `auto`, `require` (no headers of UCX is an error) or `off`.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ext"))

from make.cuda import FATBIN, make_kernels  # noqa: E402
from make.modules import WERROR, Module, exclusive_build, jobs_wanted, make_modules  # noqa: E402
from make.steps import Builder, BuildFailed  # noqa: E402
from make.ucx import find_ucx  # noqa: E402

PUBLIC = Path("ext/core/include")
"""The headers for connectors outside the tree; copied into the package, see `kvstrata --native-include-dir`."""
NATIVE = Path("kvstrata/native")
UCX_MODULE = "kvstrata.native.ucx"
CUDA_MODULE = "kvstrata.native.cuda"


class NativeBuildFailed(BaseError):
    """What setuptools shows without a traceback."""


def found(pattern: str) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)))


def modules() -> list[Module]:
    wanted = [Module(f"kvstrata.native.{Path(name).stem}", (name,)) for name in found("ext/cython/*.pyx")]
    wanted.append(Module(CUDA_MODULE, ("ext/cuda/cuda.pyx", *found("ext/cuda/*.cpp")), ("ext/cuda",)))
    if headers := find_ucx():
        sources = ("ext/ucx/ucx.pyx", *found("ext/ucx/*.cpp"))
        optional = os.environ.get("KVSTRATA_UCX") != "require"
        wanted.append(Module(UCX_MODULE, sources, ("ext/ucx", str(headers)), optional))
    return wanted


def place(source: Path, target: Path) -> None:
    """Replaces `target` by a copy of `source` unless they are equal; who has `target` open keeps the old one."""
    if not target.exists() or not filecmp.cmp(source, target, shallow=False):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(source, partial)
        shutil.copymode(source, partial)
        partial.rename(target)


class BuildPackages(build_py):
    """Copies the packages into a folder without files of an earlier commit, which would be shipped too."""

    def run(self) -> None:
        if not self.editable_mode:
            for path in Path(self.build_lib, "kvstrata").rglob("*"):
                if path.is_file() and path.suffix != ".so":
                    path.unlink()
        super().run()


class BuildNative(build_ext):
    """Builds modules and kernels, and places them in the wheel's tree or beside the sources."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:
            # An editable install would build in a fresh temporary folder each time; keep what is current.
            self.build_lib = str(ROOT / "build" / f"lib.{self.plat_name}-{sys.implementation.cache_tag}")

    def run(self) -> None:
        try:
            with exclusive_build():
                self._build(Builder())
        except BuildFailed as error:
            raise NativeBuildFailed(str(error)) from None

    def _build(self, builder: Builder) -> None:
        lib = Path(self.build_lib)
        named = {module.name: module for module in MODULES}
        jobs = int(self.parallel or jobs_wanted())
        with ThreadPoolExecutor(max_workers=1) as beside:
            # One process for half a minute, while the modules are compiled on all cores.
            making = beside.submit(make_kernels, builder, werror=WERROR)
            failed = make_modules(
                builder, MODULES, jobs, lambda name: lib.absolute() / self.get_ext_filename(name)
            )
            kernels = making.result()
        placed = {NATIVE / FATBIN: kernels} if kernels else {}
        for name in named.keys() - failed:
            filename = Path(self.get_ext_filename(name))
            placed[filename] = lib / filename
        beside_sources = self.inplace or self.editable_mode
        if not beside_sources:
            placed |= {
                Path("kvstrata/include") / path.relative_to(PUBLIC): path for path in PUBLIC.rglob("*.h")
            }
        absent = {NATIVE / FATBIN, Path(self.get_ext_filename(UCX_MODULE))} - placed.keys()
        for tree in [lib, *([Path("src")] if beside_sources else [])]:
            for path, source in placed.items():
                if source != tree / path:
                    place(source, tree / path)
            for path in absent:
                (tree / path).unlink(missing_ok=True)
            # A module that an earlier commit had could still be imported, and would hide that its code is gone.
            for module in (tree / NATIVE).glob("*.so"):
                if f"kvstrata.native.{module.name.partition('.')[0]}" not in named:
                    module.unlink()
        self._outputs = [str(lib / path) for path in placed]

    def get_outputs(self) -> list[str]:
        return list(getattr(self, "_outputs", ()))


os.chdir(ROOT)
try:
    MODULES = modules()
except BuildFailed as error:
    raise NativeBuildFailed(str(error)) from None
setup(
    # setuptools asks only which modules there are; they are built by BuildNative.
    ext_modules=[
        Extension(module.name, list(module.sources), optional=module.optional) for module in MODULES
    ],
    cmdclass={"build_py": BuildPackages, "build_ext": BuildNative},
)
