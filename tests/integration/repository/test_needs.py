"""`make setup` and a C++ test need only what README.md names: git, make, a C++ compiler, Python with its headers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import provision
from tests.tools.provision import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

NAMED = ("git", "make", "g++", "gcc", "cpp", "as", "ld", "ar", "nm", "ranlib", "strip")
"""A compiler brings its preprocessor, assembler and linker."""
KEPT = ("PIP_", "UV_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
"""Variables that say how this machine reaches its registry."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has the programs of every Debian system and those that README.md names."""
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg-query tells which programs every system has; this is no Debian")
    every = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Priority} ${Package}\n"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    packages = [line.split()[1] for line in every.splitlines() if line.startswith("required ")]
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True).stdout
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = [path for line in listed.splitlines() if (path := Path(line)).parent.name in ("bin", "sbin")]
    programs += [
        Path(found) for name in (*NAMED, "awk") if (found := shutil.which(name, path="/usr/bin:/bin"))
    ]
    for program in programs:
        if not (folder / program.name).exists() and os.access(program, os.X_OK):
            (folder / program.name).symlink_to(program)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / version).symlink_to(Path(sys._base_executable).resolve())
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    home = tmp_path / "home"
    home.mkdir()
    return {**kept, "PATH": str(folder), "HOME": str(home), "KVSTRATA_CACHE": str(provision.cache_root())}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            target = tmp_path / "clone" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return tmp_path / "clone"


def run(clone: Path, environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=clone,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_a_clone_is_set_up_and_a_cpp_test_runs_with_what_the_readme_names(clone, bare):
    assert "`g++`, git, make" in (ROOT / "README.md").read_text()
    run(clone, bare, "make", "setup")
    run(clone, bare, str(clone / ".venv/bin/kvstrata"), "doctor", "--help")
    run(clone, bare, "make", "-C", "ext/core", "check", "SANITIZER=address", "TEST=hash/sha256_test")
