"""The kernels that round KV on its way, as nvcc translates them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "native" / "cuda" / "command.txt"


@pytest.mark.long
def test_no_step_of_the_codec_is_contracted_or_flushed_to_zero(tmp_path: Path) -> None:
    if not BUILT.exists():
        pytest.skip("the kernels were not built here: install the CUDA toolkit (nvcc), then `make cuda`")
    command = [
        part for part in shlex.split(BUILT.read_text()) if not part.startswith(("-gencode", "-fatbin"))
    ]
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
