"""`make lock`, `make audit` and `make sbom`: the packages that tests and the image install, pinned with hashes.

`requirements/NAME.lock` names each package with one version and the hashes of its files, for every Python that we
support; pip refuses a file with another hash (`--require-hashes`). Where the files come from is left to pip, so the
locks name no registry. The programs that write, audit and list the locks are pinned by a lock too, and are installed
into an environment in the cache folder.

Only the standard library is used.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import provision, setup_env
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

FOLDER = ROOT / "requirements"
IMAGE_EXTRAS = ("codecs", "gateway", "mooncake", "object_store", "picker")
TOOLS = ("uv>=0.9", "pip-audit>=2.9", "cyclonedx-bom>=7")
HEADER = "# Written by `make lock` from {source}. Do not edit.\n"
SHIPPED = ("image", "image-build", "test", "tools")
"""The locks by their importance to users."""
NOT_CHECKED = (
    "make audit: {lock}: the advisory database gave no answer for {what}, so they were not checked. It needs HTTPS to "
    "pypi.org itself (a mirror has no advisories) or, with ARGS='--vulnerability-service osv', to api.osv.dev; "
    "HTTPS_PROXY names a proxy."
)


class NoTools(Exception):
    """The tools cannot be installed here; the message says why."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def wanted(name: str) -> list[str]:
    """The requirements that the lock `name` pins, together with all their dependencies."""
    declared = project()
    if name == "test":
        return [*setup_env.BUILD_TOOLS, *setup_env.declared_requirements()]
    if name == "image":
        extras = declared["project"]["optional-dependencies"]
        return [*declared["project"]["dependencies"], *(each for key in IMAGE_EXTRAS for each in extras[key])]
    if name == "image-build":
        return [*declared["build-system"]["requires"], "wheel"]
    return [*TOOLS]


def lock_path(name: str) -> Path:
    return FOLDER / f"{name}.lock"


def tools(steps: Steps, bootstrap: bool = False) -> Path:
    """The folder with the programs of the tools, installed on the first call. Raises NoTools.

    With `bootstrap` a missing tools.lock is no error: the newest versions are taken.
    """
    lock = lock_path("tools")
    pinned = lock.exists() or not bootstrap
    digest = hashlib.sha256(lock.read_bytes() if pinned else b"").hexdigest()[:12]
    folder = provision.cache_root() / f"supply-{sys.implementation.cache_tag}-{digest}"
    complete = folder / ".complete"
    with provision.exclusive(
        folder.with_name(folder.name + ".lock"), "waiting for another fetch of the tools"
    ):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
            try:
                with steps.step(f"fetch {', '.join(name.partition('>')[0] for name in TOOLS)}"):
                    steps.run([sys.executable, "-m", "venv", folder])
                    steps.run(
                        [*install, *(("--require-hashes", "-r", lock) if pinned else TOOLS)],
                        attempts=DOWNLOAD_ATTEMPTS,
                        environment=provision.download_environment(),
                    )
            except StepFailed as error:
                raise NoTools(f"the tools could not be installed:\n{error}") from None
            complete.touch()
    return folder / "bin"


def write_locks(upgrade: bool) -> int:
    """Bring the locks up to date with pyproject.toml. Versions that still fit are kept unless `upgrade`."""
    steps = Steps(ROOT / "build" / "lock.log")
    FOLDER.mkdir(exist_ok=True)
    try:
        uv = tools(steps, bootstrap=True) / "uv"
        for name in SHIPPED:
            with steps.step(f"requirements/{name}.lock"), tempfile.TemporaryDirectory() as scratch:
                source, made = Path(scratch) / "wanted.in", Path(scratch) / "made.lock"
                source.write_text("\n".join(wanted(name)) + "\n")
                if lock_path(name).exists():
                    shutil.copyfile(lock_path(name), made)  # uv keeps the versions that it finds here
                steps.run(
                    [
                        *(uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes"),
                        *(
                            "--python-version",
                            f"3.{setup_env.SUPPORTED_MINORS[0]}",
                            "--no-header",
                            "--no-annotate",
                        ),
                        *(
                            "--no-emit-index-url",
                            "--no-emit-find-links",
                            *(("--upgrade",) if upgrade else ()),
                        ),
                        *("--cache-dir", provision.cache_root() / "uv", "--output-file", made, source),
                    ],
                    attempts=DOWNLOAD_ATTEMPTS,
                )
                text = made.read_text()
                if found := re.search(r"^.*(?:://|^\s*-(?!-hash)).*$", text, re.MULTILINE):
                    print(f"requirements/{name}.lock would name a registry: {found[0]!r}", file=sys.stderr)
                    return 1
                origin = "tests/tools/supply.py" if name == "tools" else "pyproject.toml"
                lock_path(name).write_text(HEADER.format(source=origin) + text)
    except (NoTools, StepFailed) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        steps.close()
    return 0


def audit(more: list[str]) -> int:
    """Look up every pinned version among the published vulnerabilities: 0 none, 1 some, 2 not checked."""
    steps = Steps(ROOT / "build" / "audit.log")
    try:
        program = tools(steps) / "pip-audit"
    except NoTools as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        steps.close()
    worst = 0
    for name in SHIPPED:
        lock = lock_path(name)
        print(f"requirements/{name}.lock:", flush=True)
        done = subprocess.run(
            [program, "--progress-spinner=off", "--disable-pip", "--require-hashes", "-r", lock, *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = done.stdout.strip().splitlines()
        skipped = sum("could not be audited" in line for line in lines)
        if done.returncode == 0 and not skipped:
            print("\n".join(lines))
        elif not skipped and any(re.match(r"Found \d+ known vulnerabilit", line) for line in lines):
            print("\n".join(lines))
            worst = max(worst, 1)
        else:
            print("\n".join(lines[-3:]))
            print(NOT_CHECKED.format(lock=lock.name, what=f"{skipped or 'its'} packages"), file=sys.stderr)
            return 2
    return worst


def sbom() -> int:
    """Write build/sbom/NAME.json for each lock, in CycloneDX's format."""
    steps = Steps(ROOT / "build" / "sbom.log")
    folder = ROOT / "build" / "sbom"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        program = tools(steps) / "cyclonedx-py"
        for name in SHIPPED:
            out = folder / f"{name}.json"
            # The same lock gives the same bytes.
            arguments = ["requirements", "--pyproject", ROOT / "pyproject.toml", "--output-reproducible"]
            with steps.step(str(out.relative_to(ROOT))):
                steps.run(
                    [program, *arguments, "--output-format", "JSON", "--output-file", out, lock_path(name)]
                )
    except (NoTools, StepFailed) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        steps.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("lock", "audit", "sbom"))
    parser.add_argument("--upgrade", action="store_true", help="lock: take the newest versions")
    chosen, more = parser.parse_known_args()
    if more and chosen.what != "audit":
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if chosen.what == "lock":
        return write_locks(chosen.upgrade)
    return audit(more) if chosen.what == "audit" else sbom()


if __name__ == "__main__":
    sys.exit(main())
