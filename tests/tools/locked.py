"""Installs the packages that a lock in `requirements/` pins, and only files whose hashes the lock has.

uv does it. It is pinned by a lock too and kept in the cache folder, which also keeps the unpacked packages.
Environments have hard links to them, so nothing may change a file of a package in place. uv does not read pip's
configuration, so it is told pip's index.

Only the standard library is used.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.tools import provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, Steps

FOLDER = ROOT / "requirements"


def lock_path(name: str) -> Path:
    return FOLDER / f"{name}.lock"


def digest_of(*names: str) -> str:
    """A short digest of these locks, for the name of a folder that is made from them."""
    return hashlib.sha256(b"".join(lock_path(name).read_bytes() for name in names)).hexdigest()[:8]


def download_mb(name: str) -> int:
    """The size of the files of a lock for Python 3.11 on x86_64, in MB, as `make lock` found it."""
    found = re.search(r"^# Download: (\d+) MB", lock_path(name).read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def entries(name: str) -> dict[str, str]:
    """For each package of a lock the lines that pin it; packages have several where versions differ by Python."""
    found: dict[str, str] = {}
    for entry in re.findall(r"^[a-zA-Z0-9].*(?:\n .*)*\n", lock_path(name).read_text(), re.MULTILINE):
        package = entry.partition("==")[0]
        found[package] = found.get(package, "") + entry
    return found


class Installer(NamedTuple):
    python: Path
    """A Python of the running version with pip."""
    uv: Path


def installer() -> Installer:
    """What installs; fetched on the first call of this machine. Raises StepFailed."""
    folder = provision.cache_root() / f"uv-{sys.implementation.cache_tag}-{digest_of('uv')}"
    found = Installer(folder / "bin" / "python", folder / "bin" / "uv")

    def fetch_uv(steps: Steps) -> None:
        words = ["--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:"]
        steps.run([sys.executable, "-m", "venv", folder])
        steps.run(
            [found.python, "-m", "pip", "install", *words, "--requirement", lock_path("uv")],
            attempts=DOWNLOAD_ATTEMPTS,
            environment=provision.download_environment(),
        )

    if not found.python.exists():  # the Python of which it was made has gone
        (folder / provision.COMPLETE).unlink(missing_ok=True)
    provision.made(folder, f"fetch uv ({download_mb('uv')} MB)", fetch_uv, "uv-setup.log")
    return found


def uv_environment(steps: Steps, python: Path) -> dict[str, str]:
    """The environment of uv: its cache inside ours, pip's index and certificates, no Python of its own."""
    environment = provision.download_environment()
    environment.setdefault("UV_CACHE_DIR", str(provision.cache_root() / "uv"))
    environment.update(UV_NO_PROGRESS="1", UV_PYTHON_DOWNLOADS="never")
    listed = steps.run([python, "-m", "pip", "config", "list"], environment=environment)
    settings = dict(re.findall(r"^\S+\.([\w-]+)=('.*')$", listed, re.MULTILINE))
    for setting, variable in (("index-url", "UV_DEFAULT_INDEX"), ("cert", "SSL_CERT_FILE")):
        if setting in settings:
            environment.setdefault(variable, ast.literal_eval(settings[setting]))
    return environment


def install(
    steps: Steps, lock: Path | str, *, python: Path | None = None, target: Path | None = None
) -> None:
    """Installs a lock, given by its path or as text.

    It goes into the environment of `python`, or into the folder `target` for the running version of Python.
    Dependencies that the lock does not name are not fetched. Raises StepFailed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = lock if isinstance(lock, Path) else Path(scratch) / "wanted.lock"
        if isinstance(lock, str):
            path.write_text(lock)
        _install(steps, ["--require-hashes", "--requirement", path], python, target)


def install_files(steps: Steps, wheels: Iterable[Path], *, python: Path) -> None:
    """Installs wheels that lie here into the environment of `python`. Raises StepFailed."""
    _install(steps, [*wheels], python, None)


def _install(steps: Steps, what: list[str | Path], python: Path | None, target: Path | None) -> None:
    tools = installer()
    into = ["--target", target] if target else []
    steps.run(
        [
            tools.uv,
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            *into,
            *what,
            "--python",
            python or tools.python,
        ],
        attempts=DOWNLOAD_ATTEMPTS,
        environment=uv_environment(steps, tools.python),
    )


def fetch(steps: Steps, lock: Path | str, folder: Path) -> list[Path]:
    """Downloads the files of a lock, for the running version of Python, where pip finds them; returns their paths.

    pip's configuration may name files that are in no registry, such as a build of torch for CPUs. Raises StepFailed.
    """
    path = lock if isinstance(lock, Path) else folder / "wanted.lock"
    if isinstance(lock, str):
        path.write_text(lock)
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    steps.run(
        [installer().python, "-m", "pip", *download, "--requirement", path, "--dest", folder],
        attempts=DOWNLOAD_ATTEMPTS,
        environment=provision.download_environment(),
    )
    return sorted(folder.glob("*.whl"))


def make_environment(steps: Steps, folder: Path, base: Path | str = sys.executable) -> Path:
    """Makes an environment of the Python `base` without any package; returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    steps.run([base, "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"
