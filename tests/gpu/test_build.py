"""The kernels are compiled with the compiler that comes from PyPI, where no other is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import fetch_wheels
from tests.tools.provision import ROOT

FATBIN_MAGIC = bytes.fromhex("50ed55ba")
PROGRAM = """
import sys
sys.path.insert(0, "ext")
from make.cuda import find_nvcc, make_kernels
from make.steps import Builder
print(find_nvcc()[0])
print(make_kernels(Builder(), werror=True))
"""


@pytest.mark.long
@pytest.mark.integration
def test_kernels_are_built_by_the_packages_of_pypi_where_no_other_nvcc_is_named(tmp_path: Path) -> None:
    try:
        packages = fetch_wheels.ensure(fetch_wheels.NVCC)
    except fetch_wheels.Unavailable as error:
        pytest.skip(str(error))
    path = "/usr/bin:/bin"
    if shutil.which("nvcc", path=path):
        pytest.skip("an nvcc in /usr/bin is found first")
    shutil.copytree(ROOT / "ext", tmp_path / "ext")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_HOME"}
    environment |= {"PATH": path, "PYTHONPATH": str(packages)}
    environment |= {"KVSTRATA_CUDA": "require", "KVSTRATA_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    nvcc, _, made = done.stdout.splitlines()[-3:]
    assert Path(nvcc).is_relative_to(packages)
    assert Path(made).is_relative_to(tmp_path)
    assert Path(made).read_bytes().startswith(FATBIN_MAGIC)
