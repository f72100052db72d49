"""Checks objects against Kubernetes' own schemas, by the package kubernetes-validate, fetched on the first call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from tests.tools import fetch_wheels

UNKNOWN = frozenset(("InferencePool",))
"""Kinds that are no part of Kubernetes."""
_CODE = (
    "import json, sys, kubernetes_validate as k\n"
    "for each in json.load(sys.stdin): k.validate(each, k.latest_version(), strict=True)"
)


def check(objects: Iterable[dict[str, Any]]) -> None:
    """Assert that Kubernetes knows these objects and all of their fields. Skips the test if the package is missing."""
    environment = fetch_wheels.environment(fetch_wheels.KUBERNETES)
    ran = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=json.dumps([each for each in objects if each["kind"] not in UNKNOWN]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2_000:]
