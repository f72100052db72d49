"""kvstrata and LMCache in one environment, installed and removed in both orders: LMCache's files stay whole.

LMCache is a stand-in with the console scripts of its wheel, unless LMCACHE_WHEEL names the real one.  kvstrata's wheel
is packed from src with the scripts that pyproject.toml declares; test_package.py tests how the real one is built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = {
    "lmcache": "lmcache.cli.main:main",
    "lmcache_controller": "lmcache.v1.api_server.__main__:main",
    "lmcache_server": "lmcache.v1.server.__main__:main",
}


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], scripts: dict[str, str]) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    points = "".join(f"{script} = {target}\n" for script, target in scripts.items())
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{points}",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**files, **texts}.items():
            archive.writestr(member, data)
        names = [*files, *texts, f"{info}/RECORD"]
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in names))
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    package = ROOT / "src" / "kvstrata"
    files = {
        str(path.relative_to(package.parent)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    modules = {
        "lmcache/"
        + target.partition(":")[0].replace(".", "/").removeprefix("lmcache/")
        + ".py": b"def main(): ..."
        for target in SCRIPTS.values()
    }
    given = os.environ.get("LMCACHE_WHEEL")
    theirs = (
        Path(given)
        if given
        else wheel(folder, "lmcache", "0.5.6", {"lmcache/__init__.py": b"", **modules}, SCRIPTS)
    )
    return {"kvstrata": wheel(folder, "kvstrata", "0.1.0", files, declared), "lmcache": theirs}


class Environment:
    """A virtual environment without any other package."""

    def __init__(self, folder: Path, wheels: dict[str, Path]) -> None:
        self.bin = folder / "bin"
        self._wheels = wheels
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        [self._site] = folder.glob("lib/python*/site-packages")

    def install(self, name: str) -> None:
        self._pip("install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(self._wheels[name]))

    def uninstall(self, name: str) -> None:
        self._pip("uninstall", "--quiet", "--yes", name)

    def theirs(self) -> dict[str, bytes]:
        """The commands and modules of LMCache that are there, with their contents."""
        paths = [*(self.bin / name for name in SCRIPTS), *(self._site / "lmcache").rglob("*.py")]
        return {str(path): path.read_bytes() for path in paths if path.exists()}

    def _pip(self, *arguments: str) -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            str(self.bin / "python"),
        ]
        subprocess.run([*pip, *arguments], capture_output=True, check=True, timeout=120)


@pytest.fixture
def environment(wheels: dict[str, Path], tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv", wheels)


def test_lmcache_stays_whole_if_it_was_there_first(environment: Environment) -> None:
    environment.install("lmcache")
    whole = environment.theirs()
    assert len(whole) > len(SCRIPTS)
    environment.install("kvstrata")
    assert environment.theirs() == whole
    environment.uninstall("kvstrata")
    assert environment.theirs() == whole


def test_lmcache_is_whole_if_it_comes_second_and_kvstrata_leaves(environment: Environment) -> None:
    environment.install("kvstrata")
    assert environment.theirs() == {}
    environment.install("lmcache")
    whole = environment.theirs()
    environment.uninstall("kvstrata")
    assert environment.theirs() == whole
