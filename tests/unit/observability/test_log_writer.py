"""observability/log_writer.py: nobody who logs waits, lines keep their order, and dropped ones are counted."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from kvstrata.observability.log_writer import LogWriter

LINE_BYTES = 100


class Scene:
    """A logger that writes into a pipe."""

    def __init__(self, max_lines: int) -> None:
        self.reader, self.fd = os.pipe()
        self.writer = LogWriter(self.fd, max_lines)
        self.logger = logging.Logger("scene")
        self.logger.addHandler(self.writer)

    def block(self) -> int:
        """Fill the pipe, and log line 0, which is then being written; returns the bytes that fill the pipe."""
        os.set_blocking(self.fd, False)
        taken = 0
        try:
            while True:
                taken += os.write(self.fd, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(self.fd, True)
        self.log(0, 1)
        while self.writer.queue.qsize():
            os.sched_yield()
        return taken

    def log(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.logger.warning("%0*d", LINE_BYTES - 1, number)

    def read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            found += os.read(self.reader, count - len(found))
        return found

    def lines(self) -> list[str]:
        """All lines, once none waits any more."""
        os.set_blocking(self.reader, False)
        found = b""
        while True:
            ended = self.writer.flush_within(0.01)
            try:
                found += os.read(self.reader, 1 << 20)
            except BlockingIOError:
                if ended:
                    return found.decode().splitlines()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(getattr(request, "param", 4096))
    yield made
    os.close(made.reader)  # a thread that waits in a write gets EPIPE
    assert made.writer.flush_within(60)
    # The thread never ends, so the descriptor stays its own.


def line(number: int) -> str:
    return f"{number:0{LINE_BYTES - 1}}"


def numbers(lines: list[str]) -> list[int]:
    return [int(line) for line in lines if line.isdigit()]


def test_lines_come_in_order_and_a_flush_waits_for_them(scene: Scene) -> None:
    scene.log(0, 500)
    assert scene.writer.flush_within(60)
    assert numbers(scene.read(500 * LINE_BYTES).decode().splitlines()) == list(range(500))
    assert scene.writer.dropped_lines == 0


@pytest.mark.parametrize("scene", [20], indirect=True)
def test_a_reader_that_stops_delays_nobody_and_is_told_later_what_it_missed(scene: Scene) -> None:
    full = scene.block()
    scene.log(1, 1001)
    assert scene.writer.dropped_lines == 980
    assert not scene.writer.flush_within(0.05), "it waits for the reader, but not for ever"
    scene.read(full)
    assert scene.lines() == [line(0), "980 log lines were dropped", *map(line, range(1, 21))]
    scene.log(1001, 1002)
    assert scene.lines() == [line(1001)]


def test_lines_that_nobody_can_read_any_more_are_counted() -> None:
    scene = Scene(4096)
    os.close(scene.reader)
    scene.log(0, 3)
    assert scene.writer.flush_within(60)
    assert scene.writer.dropped_lines == 3


def test_a_descriptor_that_others_made_non_blocking_loses_nothing(scene: Scene) -> None:
    os.set_blocking(scene.fd, False)
    scene.log(0, 2000)
    assert numbers(scene.read(2000 * LINE_BYTES).decode().splitlines()) == list(range(2000))
    assert scene.writer.dropped_lines == 0


def test_a_line_that_cannot_be_formatted_fails_nobody(scene: Scene) -> None:
    scene.logger.warning("%d", "no number")
    [only] = scene.lines()
    assert only.startswith("scene: log line cannot be formatted: TypeError(")
