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
