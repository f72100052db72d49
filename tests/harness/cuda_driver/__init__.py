"""A CUDA driver for machines without a GPU (driver.cpp), with which the shipped code runs in a process of its own.

A child process with the variables of `environment()` finds this driver as libcuda.so.1.  Inside such a process, tests
use `SimulatedGpu` for memory, streams, and the options that environment variables cannot change later.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import provision

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [Path(__file__).with_name("driver.cpp"), ROOT / "ext" / "cuda" / "driver.cpp"]
INCLUDES = [ROOT / "ext" / "cuda", ROOT / "ext" / "core" / "src", ROOT / "ext" / "core" / "include"]
HEADERS = [INCLUDES[0] / name for name in ("driver.h", "kernel_body.h", "fp8_kernel_body.h")]
HEADERS.append(INCLUDES[1] / "codec" / "fp8_scalar.h")
LIBRARY = "libcuda.so.1"


def build(folder: Path | None = None, *flags: str) -> Path:
    """Compile the driver into `folder` (default: below build/, and kept) unless it is current; return the folder."""
    folder = folder or ROOT / "build" / "cuda-driver"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / LIBRARY
    with provision.exclusive(folder / ".lock", "waiting for another build of the simulated CUDA driver"):
        newest_ns = max(path.stat().st_mtime_ns for path in [*SOURCES, *HEADERS])
        if target.exists() and target.stat().st_mtime_ns >= newest_ns:
            return folder
        partial = target.with_suffix(".partial")
        command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++20", "-O2", "-g", "-shared", "-fPIC"]
        command += ["-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror", *flags]
        command += [*(f"-I{folder}" for folder in INCLUDES), *map(str, SOURCES), f"-Wl,-soname,{LIBRARY}"]
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.rename(target)
    return folder


def environment(**options: object) -> dict[str, str]:
    """Return variables for a child process with this driver and these options (`delay_us=100`, `fail="copy:3:700"`)."""
    variables = {f"SIMULATED_CUDA_{name.upper()}": str(value) for name, value in options.items()}
    paths = [str(build()), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths)), **variables}


class Gpu:
    """Memory and streams of the first device through the driver's own interface, simulated or real."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(LIBRARY)
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver; assert that it succeeds."""
        error = getattr(self.driver, name)(*arguments)
        assert error == 0, f"{name}: CUDA driver error {error}"

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        assert stream.value is not None
        return stream.value

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def allocate(self, length: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, content: bytes) -> None:
        """Write to the device; the bytes have arrived when this returns."""
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))
        # A real driver returns while small contents are still on their way. A read waits for them.
        self.read(address, 1)

    def read(self, address: int, length: int) -> bytes:
        target = ctypes.create_string_buffer(length)
        self.call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(length))
        return target.raw

    def copy_later(self, target: int, content: int, length: int, stream: int) -> None:
        """Queue a copy from (registered) host memory to the device, in place of an engine's kernel that writes."""
        arguments = (ctypes.c_uint64(target), ctypes.c_void_p(content), ctypes.c_size_t(length))
        self.call("cuMemcpyHtoDAsync_v2", *arguments, ctypes.c_void_p(stream))


class SimulatedGpu(Gpu):
    """The first device of this driver, with the controls that a real one lacks."""

    def set(self, name: str, value: object) -> None:
        """Set an option of driver.cpp. Setting `fail` restarts the count of calls."""
        self.driver.simulated_cuda_set(name.encode(), str(value).encode())

    def calls(self, name: str) -> int:
        """Return the calls of a function (`cuMemcpyDtoHAsync`), or of "copy", "kernel", "pageable" (driver.cpp)."""
        self.driver.simulated_cuda_calls.restype = ctypes.c_uint64
        return int(self.driver.simulated_cuda_calls(name.encode()))

    def adopt(self, address: int, length: int, device: int = 0) -> None:
        """Let memory of the test (a tensor on the CPU) count as memory of a device."""
        self.driver.simulated_cuda_adopt(ctypes.c_uint64(address), ctypes.c_uint64(length), device)

    def hold(self, held: bool) -> None:
        """Keep streams from beginning further pieces of work, or let them go on."""
        self.driver.simulated_cuda_hold(int(held))


def simulated(**options: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test run in a process of its own on this driver, with these options; the test's arguments must be JSON."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: object) -> None:
            run_body(body, arguments, environment(**options))

        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _why_not_real() -> str:
    """Return why this machine has no real driver; empty if it has one."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"needs an NVIDIA GPU and its driver ({error})"
    return ""


# Skipped before any fixture starts a server for it.
_REAL = (pytest.mark.gpu, pytest.mark.skipif(bool(_why_not_real()), reason=_why_not_real()))
DRIVERS = pytest.mark.parametrize("driver", ["simulated", pytest.param("real", marks=_REAL)])


def environment_of(driver: str, **options: object) -> dict[str, str]:
    """Return variables for a child process with the driver `simulated`, with these options, or `real`.

    For `real` the test is skipped if the driver finds no GPU.
    """
    if driver == "simulated":
        return environment(**options)
    if ctypes.CDLL(LIBRARY).cuInit(0):
        pytest.skip("needs an NVIDIA GPU (the driver finds none)")
    return {**os.environ}


def on_gpu(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test run on this driver and, if the machine has a GPU, on the real one; see `simulated`."""

    @DRIVERS
    @functools.wraps(body)
    def test(driver: str, **arguments: object) -> None:
        run_body(body, arguments, environment_of(driver))

    signature = inspect.signature(body)
    parameter = inspect.Parameter("driver", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), parameter])  # type: ignore[attr-defined]
    test.body = body  # type: ignore[attr-defined]
    return test


def run_body(body: Callable[..., None], arguments: dict[str, object], variables: dict[str, str]) -> None:
    """Run the body of a test in a child process; assert that it succeeds."""
    code = "import sys; from tests.harness.cuda_driver import call_body; call_body(*sys.argv[1:])"
    command = [sys.executable, "-c", code, body.__module__, body.__name__, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (
        f"the test's process ended with {done.returncode}\n{done.stdout}{done.stderr}"
    )


def call_body(module: str, name: str, arguments: str) -> None:
    """Call the body of a test with arguments in JSON (called in the child)."""
    getattr(importlib.import_module(module), name).body(**json.loads(arguments))
