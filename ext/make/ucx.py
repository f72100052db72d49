"""Finds the headers of UCX."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from make.steps import BuildFailed

OLDEST_UCX = [1, 16]


def find_ucx() -> Path | None:
    """The folder of UCX's headers: in the package `libucx` of the Python that builds, or the system's. If there is none
    of UCX 1.16 or newer, prints a line that says so and returns None; with KVSTRATA_UCX=require, raises BuildFailed.
    """
    wish = os.environ.get("KVSTRATA_UCX", "auto")
    if wish not in ("auto", "require", "off"):
        raise BuildFailed(f"KVSTRATA_UCX={wish}: use auto, require or off")
    if wish == "off":
        return None
    package = importlib.util.find_spec("libucx")
    folders = [Path(place) / "include" for place in (package and package.submodule_search_locations) or ()]
    folders += [Path("/usr/local/include"), Path("/usr/include")]
    for folder in folders:
        version = folder / "ucp" / "api" / "ucp_version.h"
        numbers = re.findall(r"#define UCP_API_M\w+ +(\d+)", version.read_text()) if version.exists() else []
        if [int(number) for number in numbers] >= OLDEST_UCX:
            return folder
    if wish == "require":
        what = f"no headers of UCX {OLDEST_UCX[0]}.{OLDEST_UCX[1]} or newer"
        raise BuildFailed(f"KVSTRATA_UCX=require: {what}; pip install libucx-cu13, or install libucx-dev")
    print("ucx: no headers found, the UCX transfer engine is left out (see docs/p2p.md)")
    return None
