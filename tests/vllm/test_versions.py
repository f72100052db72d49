"""Our connector inside the classes of each supported version of vLLM, without a model (`versions_run.py`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness import vllm_env
from tests.tools import vllm_python as pythons
from tests.tools.provision import ROOT

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("versions_run.py")
CHECKS = sorted(
    check
    for file in SCRIPT.parent.glob("versions_*.py")
    for check in re.findall(r"^def (check_\w+)", file.read_text(), re.MULTILINE)
)
NEWEST = pythons.PYTHON_ONLY[-1]
VERSIONS = [
    pytest.param(version, marks=() if version == NEWEST else pytest.mark.long)
    for version in pythons.checked()
]


@pytest.fixture(scope="module", params=VERSIONS)
def results(request, vllm_python, tmp_path_factory):
    """The failure of each check of the script; empty if it passed."""
    folder = tmp_path_factory.mktemp("versions")
    in_front = pythons.on_path(request.param)
    environment = vllm_env.environment(folder, in_front)
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"  # the script imports tests.vllm.versions_engine
    done = subprocess.run(
        [str(vllm_python), "-P", str(SCRIPT), str(folder)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    version, *found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert version == {"version": request.param}
    return {result["check"]: result["failure"] for result in found}


@pytest.mark.parametrize("check", CHECKS)
def test_in_vllms_own_classes(results, check):
    assert results[check] == "", results[check]
