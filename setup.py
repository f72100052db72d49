"""Builds the native part of kvstrata with `ext/make`; everything declarative stands in pyproject.toml.

- Every `ext/core/src/**/*.cpp` goes into one static library.
- `ext/cython/core.pyx` and `connector.pyx`, which include the files of their folders, become the modules
  `kvstrata.native.core` and `connector`, linked with that library.
- `ext/core/include` goes into `kvstrata/include`, for connectors that others write in C++.
- `ext/cuda/*.cpp` go into `kvstrata.native.cuda`, which needs nothing of CUDA to be built or loaded; its kernels,
  `ext/cuda/kernels.cu`, become `kvstrata/native/kvstrata_cuda.fatbin` where nvcc is found.

- `ext/envoy/watch.c` becomes `kvstrata/gateway/envoy/libkv_watch.so`, which the gateway's Envoy loads.

The stubs of the modules, for type checkers, are written from the Cython sources (`ext/make/stubs.py`).

C++ sources are found by pattern: a new file needs no edit here. Compiled files are kept in the cache folder
(`$KVSTRATA_CACHE` or `~/.cache/kvstrata`, at most 1 GiB of objects) and found again by content.

Environment: `CXX`, `CPPFLAGS`, `CXXFLAGS`, `LDFLAGS` as usual; `KVSTRATA_WERROR=1` turns warnings into
errors; `KVSTRATA_CUDA` is `auto` (default), `require` (no nvcc is an error) or `off`; `CUDA_HOME` names the
toolkit.
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

from make import native, stubs  # noqa: E402
from make.build import Builder, BuildFailed  # noqa: E402

PUBLIC = Path("ext/core/include")
"""The headers for connectors outside the tree; copied into the package, see `kvstrata --native-include-dir`."""
NATIVE = Path("kvstrata/native")
WATCHER = Path("kvstrata/gateway/envoy/libkv_watch.so")
"""Apart from the modules of Python, since only Envoy can load it."""


class NativeBuildFailed(BaseError):
    """What setuptools shows without a traceback."""


def place(source: Path, target: Path) -> None:
    """Replaces `target` by a copy of `source` unless they are equal; who has `target` open keeps the old one."""
    if not target.exists() or not filecmp.cmp(source, target, shallow=False):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(source, partial)
        partial.chmod(0o755 if target.suffix == ".so" else 0o644)
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

    def run(self) -> None:
        try:
            with native.exclusive_build():
                self._build(Builder())
        except BuildFailed as error:
            raise NativeBuildFailed(str(error)) from None

    def _build(self, builder: Builder) -> None:
        def made(name: str) -> str:
            return f"build/native/modules/{Path(self.get_ext_filename(name)).name}"

        with ThreadPoolExecutor(max_workers=1) as beside:
            # One process for half a minute, while the modules are compiled on all cores.
            making = beside.submit(native.make_kernels, builder, werror=native.WERROR)
            native.make_modules(builder, MODULES, int(self.parallel or native.jobs_wanted()), made)
            kernels = making.result()
        placed = {NATIVE / native.FATBIN: kernels} if kernels else {}
        placed[WATCHER] = Path(native.WATCHER)
        placed |= {NATIVE / path.name: path for path in stubs.write(Path("build/native/stubs"))}
        for module in MODULES:
            placed[Path(self.get_ext_filename(module.name))] = Path(made(module.name))
        beside_sources = self.inplace or self.editable_mode
        tree = Path("src" if beside_sources else self.build_lib)
        if not beside_sources:
            placed |= {
                Path("kvstrata/include") / path.relative_to(PUBLIC): path for path in PUBLIC.rglob("*.h")
            }
        # A module that an earlier commit or build had could still be imported, and would hide that its code is gone.
        names = {path.name.partition(".")[0] for path in placed}
        for path in (tree / NATIVE).glob("*"):
            if path.suffix in (".so", ".fatbin") and path.name.partition(".")[0] not in names:
                path.unlink()
        for path, source in placed.items():
            place(source, tree / path)
        self._outputs = [str(tree / path) for path in placed]

    def get_outputs(self) -> list[str]:
        return list(getattr(self, "_outputs", ()))


os.chdir(ROOT)
try:
    MODULES = native.modules()
except BuildFailed as error:
    raise NativeBuildFailed(str(error)) from None
setup(
    # setuptools asks only which modules there are; they are built by BuildNative.
    ext_modules=[Extension(module.name, list(module.sources)) for module in MODULES],
    cmdclass={"build_py": BuildPackages, "build_ext": BuildNative},
)
