"""The error of a Python for which the native modules were not compiled."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import kvstrata


def test_a_missing_compiled_package_names_the_command_that_builds_it(tmp_path: Path) -> None:
    source = Path(kvstrata.__file__).parent
    copy = tmp_path / "kvstrata"
    (copy / "native").mkdir(parents=True)
    shutil.copy(source / "__init__.py", copy)
    shutil.copy(source / "native" / "__init__.py", copy / "native")
    done = subprocess.run(
        [sys.executable, "-c", "import kvstrata.native"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ImportError: kvstrata was not compiled for this Python" in done.stderr
    assert "`make setup`" in done.stderr
