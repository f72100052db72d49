"""The guard around the methods that vLLM calls."""

from __future__ import annotations

import pytest

from kvstrata.connectors.boundary import errors, guarded


class Called:
    recovered = 0

    @guarded("neutral")
    def plain(self, error=None):
        if error is not None:
            raise error
        return "answer"

    def _recover(self, error):
        Called.recovered += 1
        if isinstance(error, KeyError):
            raise error
        return "recovered"

    @guarded("neutral", lambda self, error: self._recover(error))
    def with_recovery(self, error):
        raise error


def test_a_guard_passes_answers_on_and_answers_for_errors():
    before = errors.total
    assert Called().plain() == "answer"
    assert errors.total == before
    assert Called().plain(ValueError("x")) == "neutral"
    assert Called().with_recovery(ValueError("x")) == "recovered"
    assert Called().with_recovery(KeyError("x")) == "neutral"
    assert errors.total == before + 4, "the recovery's error counts too"
    errors.take_count()
    assert errors.take_count() == 0


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_exceptions_that_end_a_process_pass_the_guard(stop):
    with pytest.raises(stop):
        Called().plain(stop())


def test_repeated_errors_of_one_kind_are_logged_ever_more_rarely(caplog):
    class Rare(Exception):
        pass

    for _ in range(120):
        Called().plain(Rare("planted"))
    lines = [record for record in caplog.records if "error in the connector's plain" in record.message]
    assert [line.message.partition("(")[2].partition(")")[0] for line in lines] == [
        "seen 1 times",
        "seen 10 times",
        "seen 100 times",
    ]
    assert all(line.exc_info for line in lines)
