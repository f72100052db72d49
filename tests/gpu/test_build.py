"""The kernels are compiled with the compiler that comes from PyPI, where no other is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import fetch_wheels
from tests.harness.provision import ROOT

FATBIN_MAGIC = bytes.fromhex("50ed55ba")
PROGRAM = """
import runpy, sys
sys.argv = ["setup.py", "--quiet", "--name"]
made = runpy.run_path("setup.py", run_name="__main__")
print(made["find_nvcc"]()[0])
print(made["compile_cuda"]())
"""


@pytest.mark.integration
def test_kernels_are_built_by_the_packages_of_pypi_where_no_other_nvcc_is_named(tmp_path: Path) -> None:
    try:
        packages = fetch_wheels.ensure(fetch_wheels.NVCC)
    except fetch_wheels.Unavailable as error:
        pytest.skip(str(error))
    path = "/usr/bin:/bin"
    if shutil.which("nvcc", path=path):
        pytest.skip("an nvcc in /usr/bin is found first")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "ext", tmp_path / "ext")
    (tmp_path / "src" / "kvstrata").mkdir(parents=True)
    shutil.copy2(ROOT / "src" / "kvstrata" / "__init__.py", tmp_path / "src" / "kvstrata")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_HOME"}
    environment |= {"PATH": path, "PYTHONPATH": str(packages)}
    environment |= {"KVSTRATA_CUDA": "require", "KVSTRATA_UCX": "off", "KVSTRATA_WERROR": "1"}
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
