"""SGLang's published wheel with the few packages that its hierarchical cache imports, in the cache folder.

It goes onto PYTHONPATH in front of the environment of `vllm_env.py`, which has torch for the CPU and most of what
SGLang imports.  None of SGLang's kernels is there: its host pools, storages and the storage threads of its cache
controller run, a model does not.

    python tests/tools/sglang_python.py     fetch it, unless it is there, and print its folder
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import fetch_wheels
from tests.tools.fetch_wheels import Unavailable

VERSION = fetch_wheels.SGLANG[0].partition("==")[2]


def find() -> Path | None:
    """The folder, None if it was not fetched."""
    return fetch_wheels.find(fetch_wheels.SGLANG)


def ensure() -> Path:
    """The folder, fetched on the first call. Raises Unavailable. Several processes may call this at once."""
    return fetch_wheels.ensure(fetch_wheels.SGLANG)


if __name__ == "__main__":
    try:
        print(ensure())
    except Unavailable as unavailable:
        sys.exit(str(unavailable))
