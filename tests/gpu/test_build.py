"""The kernels: they are built, used on a real GPU, and what a machine without nvcc says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import fetch_wheels
from tests.tools.provision import ROOT

pytestmark = pytest.mark.long

FATBIN_MAGIC = bytes.fromhex("50ed55ba")
PROGRAM = """
import sys
sys.path.insert(0, "ext")
from make.native import find_nvcc, make_kernels
from make.build import Builder
print(find_nvcc()[0])
print(make_kernels(Builder(), werror=True))
"""


@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_kernels_are_built_by_the_packages_of_pypi_where_no_other_nvcc_is_named(tmp_path: Path) -> None:
    packages = fetch_wheels.ensure(fetch_wheels.NVCC)
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


COMMAND = """
import json, sys
sys.path.insert(0, "ext")
from make.native import KERNELS, NVCC_FLAGS, find_nvcc
print(json.dumps([*(find_nvcc() or []), *NVCC_FLAGS, KERNELS]))
"""


def test_no_step_of_the_codec_is_contracted_or_flushed_to_zero(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", COMMAND], cwd=ROOT, check=True, capture_output=True, text=True
    )
    command = json.loads(told.stdout)
    if not Path(command[0]).is_absolute():
        pytest.skip(
            "no nvcc is found: install the CUDA toolkit, or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`"
        )
    target = tmp_path / "kernels.ptx"
    subprocess.run([*command, "-ptx", "-arch=compute_80", "-o", str(target)], cwd=ROOT, check=True)
    kernels = dict(re.findall(r"\.entry (kvstrata_fp8_\w+)\((.*?)\n}", target.read_text(), re.DOTALL))
    assert len(kernels) == 13
    for name, body in kernels.items():
        floats = set(re.findall(r"\b(\w+(?:\.\w+)*\.f32)\b", body))
        # Without ".rn" the driver's assembler may contract them still.
        assert not {step for step in floats if re.match("fma|mad|mul.f32|add.f32|sub.f32|div.[^r]", step)}, (
            name
        )
        assert not {step for step in floats if "ftz" in step}, name
        if name.startswith("kvstrata_fp8_encode"):
            assert {"mul.rn.f32", "add.rn.f32", "div.rn.f32"} <= floats, name
