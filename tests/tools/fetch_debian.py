"""Fetches Debian packages into the cache folder without root: servers and libraries that tests need.

apt works on package lists and an archive folder of its own; the packages are unpacked by `dpkg-deb -x` and
never installed, so nothing outside the cache folder is changed. Only the requested packages are fetched, and those of
their dependencies that this machine lacks.

    program, variables = fetch_debian.program("redis-server", ["redis-server", "redis-tools"])
    run([program], env=variables)

A program is used only if it starts: the one on PATH, otherwise the fetched one. A fetched program that does not start
is fetched anew.

Command line: `python tests/tools/fetch_debian.py PACKAGE...` prints the folder or, with exit status 3, the reason why
the packages cannot be had.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps, Unavailable

PACKAGE_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
COMPLETE = ".complete"
START_S = 60.0


def program(
    name: str,
    packages: Sequence[str],
    *,
    inside: str | None = None,
    variables: Callable[[Path], dict[str, str]] | None = None,
) -> tuple[str, dict[str, str]]:
    """Returns a program that starts (`name` on PATH, else the fetched one) and its variables. Raises Unavailable.

    `inside` is the fetched program's path below the root of the packages (default: usr/bin/name), and `variables`
    makes the variables that it needs there (default: `environment`).
    """
    installed = shutil.which(name)
    if installed is not None and why_not(installed, dict(os.environ)) is None:
        return installed, dict(os.environ)
    inside, variables = inside or f"usr/bin/{name}", variables or environment
    root = ensure(packages, lambda root: why_not(str(root / inside), variables(root)))
    return str(root / inside), variables(root)


@functools.cache
def _refusal(path: str, variables: tuple[tuple[str, str], ...]) -> str | None:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"{path} --version: {done.stdout}{done.stderr}".strip()


def why_not(path: str, variables: dict[str, str]) -> str | None:
    """Why this program does not start; None if `path --version` succeeds, which this process then remembers."""
    key = (path, tuple(sorted(variables.items())))
    reason = _refusal(*key)
    if reason is not None:
        _refusal.cache_clear()  # it may be mended meanwhile
    return reason


def ensure(packages: Sequence[str], refusal: Callable[[Path], str | None] | None = None) -> Path:
    """The folder in which the packages are unpacked as if it were `/`; fetched on the first call.

    `refusal(folder)` says why the folder cannot be used, or returns None; a folder that cannot be used is fetched anew,
    once.

    Raises Unavailable. Safe to call from several processes at once.
    """
    for package in packages:
        if PACKAGE_NAME.fullmatch(package) is None:
            raise ValueError(f"{package!r} is not the name of a Debian package")
    names = sorted(set(packages))
    tag = f"{'-'.join(names)[:80]}-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]}"
    base = provision.cache_root() / "debian"
    folder = base / tag
    root = folder / "root"

    def usable() -> bool:
        return (folder / COMPLETE).exists() and (refusal is None or refusal(root) is None)

    if usable():
        return root
    remedy = f"to install: sudo apt-get install -y {' '.join(names)}"
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{', '.join(names)}: there is no {tool} on this system; {remedy}")
    with provision.exclusive(base / ".lock", "waiting for another process that fetches Debian packages"):
        if usable():
            return root
        steps = Steps(ROOT / "build" / "debian-setup.log")
        try:
            _fetch(steps, base, folder, root, names)
            if refusal is not None and (reason := refusal(root)) is not None:
                raise Unavailable(f"{', '.join(names)}: fetched, but does not start; {remedy}\n{reason}")
            (folder / COMPLETE).touch()
        except StepFailed as error:
            raise Unavailable(f"{', '.join(names)} could not be fetched; {remedy}\n{error}") from None
        finally:
            steps.close()
    return root


def environment(root: Path) -> dict[str, str]:
    """Variables that let programs below `root` find their libraries; the caller starts them by full path."""
    folders = [root / "usr" / "lib", root / "lib"]
    triplets = [child for folder in folders if folder.is_dir() for child in folder.glob("*-linux-gnu*")]
    libraries = [str(folder) for folder in (*triplets, *folders) if folder.is_dir()]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": ":".join([*libraries, *([inherited] if inherited else [])])}


def _fetch(steps: Steps, base: Path, folder: Path, root: Path, names: list[str]) -> None:
    """Downloads into `folder` and unpacks into `root`, under the lock; the caller marks it complete."""
    lists, cache = base / "apt" / "lists", base / "apt" / "cache"
    for place in (lists / "partial", cache / "archives" / "partial"):
        place.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    archives = folder / "archives"
    archives.mkdir(parents=True)
    # The user's own state, caches and locks stay untouched; the system's sources and keys are only read.
    options = [
        f"-oDir::State::Lists={lists}",
        f"-oDir::Cache={cache}",
        "-oAPT::Sandbox::User=",
        "-oDebug::NoLocking=true",
        f"-oAcquire::Retries={DOWNLOAD_ATTEMPTS}",
        "-oAcquire::Languages=none",
        "-qq",
    ]
    with steps.step(f"fetch {', '.join(names)}"):
        steps.run(["apt-get", *options, "update"], attempts=DOWNLOAD_ATTEMPTS, timeout_s=600.0)
        wanted = _with_missing_dependencies(steps, options, names)
        steps.run(["apt-get", *options, "download", *wanted], attempts=DOWNLOAD_ATTEMPTS, cwd=archives)
        for archive in sorted(archives.glob("*.deb")):
            steps.run(["dpkg-deb", "-x", archive, root])
        shutil.rmtree(archives)


def _with_missing_dependencies(steps: Steps, options: list[str], names: list[str]) -> list[str]:
    """`names` and all packages that apt would install with them, according to its own dry run."""
    plan = steps.run(
        ["apt-get", *options, "install", "--simulate", "--no-install-recommends", "--reinstall", *names]
    )
    planned = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    return sorted({*names, *planned})


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    try:
        print(ensure(sys.argv[1:]))
        return 0
    except (Unavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
