"""What the parts of `kvstrata doctor` share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Finding(NamedTuple):
    """One line of the report. `state` is ok, warn or fail; `advice` says what to change."""

    check: str
    state: str
    found: str
    advice: str = ""


def cgroup_limit_bytes() -> int:
    """What this process's memory cgroup allows; 0: as much as there is."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 50:
            return int(text)
    return 0
