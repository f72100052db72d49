"""How the process that serves has its keeper hold a pool."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from kvstrata.process import keeper
from kvstrata.process.keeper import Restarts, hold_pool

HIGH_FD = 1_500
"""More than `select` takes, which a process has whose parent leaves many files open to it."""


@pytest.fixture
def high_fds() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= HIGH_FD:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * HIGH_FD), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("earlier", [b"", b".."])
def test_a_pool_is_held_once_the_keeper_answers_this_call_by_any_descriptor(
    high_fds: None, monkeypatch: pytest.MonkeyPatch, earlier: bytes
) -> None:
    named, to_keeper = os.pipe()
    low, answer_writer = os.pipe()
    answers = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    os.write(answer_writer, earlier)
    told: list[bytes] = []

    def keeper_is_told(pid: int, number: int) -> None:
        assert (pid, number) == (os.getppid(), keeper._POOL_NAMED)
        told.append(os.read(named, 100))
        os.write(answer_writer, b"!")

    monkeypatch.setattr(os, "kill", keeper_is_told)
    assert hold_pool(Restarts(keeper_fd=to_keeper, answers_fd=answers), ["/a", "/b"])
    assert (told, os.read(answers, 10)) == ([b"/a\0/b\0\0"], b"!")
    for fd in (named, to_keeper, low, answers, answer_writer):
        os.close(fd)
