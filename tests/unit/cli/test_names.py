"""`kvstrata names`: scripts under LMCache's names, which leave LMCache's own alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvstrata.cli.names import main

SRC = Path(__file__).resolve().parents[3] / "src"


def names(step: str, folder: Path) -> int:
    return main([step, "--dir", str(folder)])


def ran(command: list[str], *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_scripts_run_our_server_and_controller(tmp_path):
    names("install", tmp_path)
    check = ran([str(tmp_path / "lmcache"), "server", "--l1-size-gb", "0.1", "--check"], SRC)
    assert check.returncode == 0 and '"size_gb": 0.1' in check.stdout, check.stderr
    check = ran([str(tmp_path / "lmcache_controller"), "--port", "9001", "--check"], SRC)
    assert check.returncode == 0 and '"port": 9001' in check.stdout, check.stderr
    wrong = ran([str(tmp_path / "lmcache"), "server", "--engine-type", "blend"], SRC)
    assert wrong.returncode == 2 and "blending is not supported" in wrong.stderr


def test_the_scripts_hand_over_to_an_installed_lmcache(tmp_path):
    names("install", tmp_path)
    theirs = tmp_path / "theirs"
    (theirs / "lmcache").mkdir(parents=True)
    (theirs / "lmcache" / "__init__.py").write_text(
        "def main():\n    import sys\n    print('theirs', sys.argv[1:])\n"
    )
    metadata = theirs / "lmcache-0.5.6.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.6\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\nlmcache = lmcache:main\n")
    done = ran([str(tmp_path / "lmcache"), "server", "--port", "1"], SRC, theirs)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "theirs ['server', '--port', '1']\n"
    # lmcache-cli has no controller, so ours runs.
    check = ran([str(tmp_path / "lmcache_controller"), "--check"], SRC, theirs)
    assert check.returncode == 0 and "monitor_ports" in check.stdout, check.stderr
