"""`make gpu-pack`: the wheels that `make gpu` needs on a machine without a network, in pieces of at most 64 MiB.

They are for Linux on x86_64 and the Python that is named (`make gpu-pack GPU_PYTHON=3.12`, the default), and go to
build/gpu-pack/1, 2, …: bring the whole folder, or one piece after the other, to the same place in the clone there.
torch, CuPy and CUDA are not among them: that machine has its own. `requirements/gpu-pack.lock` pins the files.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tomllib
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import locked, provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

PACK = ROOT / "build" / "gpu-pack"
PIECE_BYTES = 64 << 20
OF_TESTS = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis", "httpx", "zstandard", "cryptography")
"""The packages of the extra `test` that the tests marked `gpu` and their fixtures import."""
BUILD_TOOLS = ("setuptools>=77", "cython>=3.1")
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
]


def requirements() -> list[str]:
    """The requirements of the server, of the tests, and of compiling the modules."""
    with open(ROOT / "pyproject.toml", "rb") as source:
        project = tomllib.load(source)["project"]
    names = tuple(name.lower() for name in OF_TESTS)
    extra = [line for line in project["optional-dependencies"]["test"] if line.lower().startswith(names)]
    return [*project["dependencies"], *extra, *BUILD_TOOLS]


def pieces(wheels: list[Path], most_bytes: int = PIECE_BYTES) -> list[list[Path]]:
    """The wheels, largest first, each in the first piece with room for it. Raises ValueError for one over the limit."""
    made: list[tuple[int, list[Path]]] = []
    for wheel in sorted(wheels, key=lambda path: (-path.stat().st_size, path.name)):
        size = wheel.stat().st_size
        if size > most_bytes:
            raise ValueError(f"{wheel.name} has {size:,} bytes, a piece at most {most_bytes:,}")
        for at, (used, piece) in enumerate(made):
            if used + size <= most_bytes:
                made[at] = (used + size, [*piece, wheel])
                break
        else:
            made.append((size, [wheel]))
    return [piece for _, piece in made]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", default="3.12", choices=("3.11", "3.12", "3.13"), help="of that machine (%(default)s)"
    )
    python = parser.parse_args().python
    shutil.rmtree(PACK, ignore_errors=True)
    loose = PACK / "loose"
    loose.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", loose]
    command += ["--no-deps", "--require-hashes", "--requirement", locked.lock_path("gpu-pack")]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    steps = Steps(ROOT / "build" / "gpu-pack.log")
    try:
        with steps.step(f"fetch wheels for Python {python}"):
            steps.run(command, attempts=DOWNLOAD_ATTEMPTS, environment=provision.download_environment())
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        steps.close()
    for number, piece in enumerate(pieces(sorted(loose.glob("*.whl"))), 1):
        folder = PACK / str(number)
        folder.mkdir()
        for wheel in piece:
            wheel.rename(folder / wheel.name)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"build/gpu-pack/{number}: {len(piece)} wheels, {size / (1 << 20):.1f} MiB")
    loose.rmdir()
    print("Bring build/gpu-pack into the clone on the machine with the GPU, then there: make gpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
