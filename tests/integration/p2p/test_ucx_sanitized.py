"""The C++ part of the UCX engine under AddressSanitizer and UndefinedBehaviorSanitizer (UCX itself is not)."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.long]

SOURCES = Path(__file__).resolve().parents[3] / "ext" / "ucx"
CORE = SOURCES.parent / "core" / "src"
# UCX's memory lives until the process ends; its hooks and the sanitizer's would be in each other's way.
VARIABLES = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "UCX_MEM_EVENTS": "n",
    "UCX_HANDLE_ERRORS": "none",
}


@pytest.fixture(scope="module")
def libucx() -> Path:
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no package libucx; run `make setup` where PyPI can be reached")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def program(libucx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("ucx") / "ucx_engine_test"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++20", "-O1", "-g", "-UNDEBUG", "-pthread"]
    command += ["-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command += [f"-I{SOURCES}", f"-I{CORE}", f"-I{libucx / 'include'}"]
    command += [
        *map(str, sorted(SOURCES.glob("*.cpp"))),
        str(CORE / "base/event_fd.cpp"),
        str(CORE / "base/threads.cpp"),
    ]
    command += [str(SOURCES / "tests" / "engine_test.cpp"), "-ldl", "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("tls", ["shm,tcp", "tcp"])
def test_two_engines_in_one_process_are_clean(program: Path, libucx: Path, tls: str) -> None:
    command = [program, libucx / "lib" / "libucp.so.0", tls]
    environment = {**os.environ, **VARIABLES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ok\n")
