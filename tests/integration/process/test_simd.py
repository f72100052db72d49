"""`KVSTRATA_SIMD` leaves CPU features out, so that one machine can measure what another one would do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PATHS = "from kvstrata.native import codec, hashing; print(codec.planes_path(), hashing.sha256_path())"
ORDER = ["scalar", "avx2", "avx512"]


def paths(simd: str) -> tuple[str, str]:
    """The paths that a process with this value chooses: of the codec's planes, and of SHA-256."""
    environment = os.environ | {"KVSTRATA_SIMD": simd}
    done = subprocess.run(
        [sys.executable, "-c", PATHS], env=environment, capture_output=True, text=True, check=True
    )
    planes, sha256 = done.stdout.split()
    return planes, sha256


@pytest.mark.parametrize(("simd", "best"), [("avx2", "avx2"), ("none", "scalar"), ("", "avx512")])
def test_no_kernel_uses_more_than_the_variable_allows(simd: str, best: str) -> None:
    here, sha256 = paths("")
    planes, sha256_now = paths(simd)
    assert planes == min(here, best, key=ORDER.index)
    assert sha256_now == ("scalar" if simd == "none" else sha256)
