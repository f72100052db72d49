"""A control group of our own with a memory limit, in which tests run out of memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """The beginning of a command that runs in a new group with this limit. Skips where no group can be made."""
    mount, limit = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    group = mount / f"kvstrata-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        with contextlib.suppress(OSError):  # without swap
            (group / ("memory.memsw.limit_in_bytes" if mount is V1 else "memory.swap.max")).write_text(
                str(limit_bytes if mount is V1 else 0)
            )
        yield "/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    finally:
        group.rmdir()
