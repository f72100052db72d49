"""Compiles the GPU kernels of `ext/cuda/kernels.cu` into one file with code for every GPU generation."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from make.cache import ROOT
from make.steps import Builder, BuildFailed, Step, version_of

KERNELS = "ext/cuda/kernels.cu"
FATBIN = "kvstrata_cuda.fatbin"
ARCHITECTURES = (80, 90, 100)
# The compiled code has one IEEE operation for each operation in the source, so the kernels and the CPU's codec compute
# the same bits.
FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-Iext/core/src"]


def find_nvcc() -> list[str] | None:
    """The command of nvcc, with the options that it needs to find its own files; None if there is no nvcc.

    Takes the first that exists: in $CUDA_HOME, on PATH, in the packages `nvidia-cuda-nvcc` and `nvidia-cuda-cccl` of
    the Python that builds, in /usr/local/cuda.
    """
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    candidates = [[str(Path(home) / "bin" / "nvcc")]] if home else []
    candidates += [[on_path]] if on_path else []
    package = importlib.util.find_spec("nvidia")
    for folder in (package and package.submodule_search_locations) or ():
        # Since CUDA 13 all packages share one folder (nvidia/cu13); before, each had its own.
        includes = [f"-I{found}" for found in sorted(Path(folder).glob("*/include"))]
        candidates += [[str(nvcc), *includes] for nvcc in sorted(Path(folder).glob("*/bin/nvcc"))]
    candidates.append(["/usr/local/cuda/bin/nvcc"])
    return next((command for command in candidates if os.access(command[0], os.X_OK)), None)


def make_kernels(builder: Builder, *, werror: bool) -> Path | None:
    """Brings the kernels up to date under build/ and returns their path.

    If there is no nvcc, or nvcc fails, prints a line that says so and returns None; with KVSTRATA_CUDA=require, raises
    BuildFailed or the error of the command instead. The file contains code for each GPU generation that this nvcc
    knows, and portable code for later generations.
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
        return _compiled(builder, nvcc, werror)
    except (BuildFailed, OSError, subprocess.CalledProcessError) as error:
        if wish == "require":
            raise
        (ROOT / "build" / "native" / "cuda-error.log").write_text(str(error))
        print(f"cuda: {nvcc[0]} failed (see build/native/cuda-error.log), the GPU kernels are left out")
        return None


def _compiled(builder: Builder, nvcc: list[str], werror: bool) -> Path:
    known = subprocess.run([nvcc[0], "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    generations = [number for number in ARCHITECTURES if f"sm_{number}" in known.split()]
    if not generations:
        raise BuildFailed(f"{nvcc[0]} knows none of the GPU generations {ARCHITECTURES}")
    code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in generations]
    code.append(f"-gencode=arch=compute_{generations[-1]},code=compute_{generations[-1]}")
    product = f"build/native/cuda/{FATBIN}"
    command = [*nvcc, *FLAGS, "-fatbin", *code, "-Xcompiler", "-Wall,-Wextra"]
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
    return ROOT / product
