"""Our library's lines reach the log of an engine, whether vLLM configures logging or leaves it to its user."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvstrata.connectors.vllm.logs import log_like_vllm

NAMES = ("", "vllm", "kvstrata")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Loggers as a new process has them; at the end as they were."""
    loggers = [logging.getLogger(name or None) for name in NAMES]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.parametrize("configured", ["vllm", ""], ids=["by vLLM", "at the root"])
def test_lines_of_the_client_go_where_vllms_go_once(configured: str) -> None:
    lines = Lines()
    logger = logging.getLogger(configured or None)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logging.getLogger("vllm").propagate = not configured
    for _ in range(2):  # the scheduler's side and the worker's may be in one process
        log_like_vllm()
    for name in ("vllm.kvstrata", "kvstrata.client.link"):
        logging.getLogger(name).info("from %s", name)
        logging.getLogger(name).debug("a detail")
    assert lines.texts == ["from vllm.kvstrata", "from kvstrata.client.link"]
