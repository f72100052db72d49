"""rpc/session.py: the bounds of what one session may have running and hold; the rest is stated by tests/model/rpc."""

from __future__ import annotations

import pytest

from kvstrata.errors import KvstrataError, Refused
from kvstrata.rpc.session import Call, Effect, Limits, Sessions, Verdict

NAME = b"s" * 16


class Line:
    """A connection that nobody reads."""

    def send(self, message: bytes) -> None:
        pass


def sessions(limits: Limits) -> Sessions:
    def encode_error(seq: int, error: KvstrataError) -> bytes:
        return f"{error.code} {seq}".encode()

    core = Sessions(encode_error, limits)
    core.open(NAME)
    return core


def ask(core: Sessions, seq: int) -> tuple[Verdict, Call]:
    receipt = core.request(NAME, seq, "lookup", Line(), wanted_by_ping=True)
    core.validate()
    return receipt.verdict, receipt.call


def test_too_many_running_requests_are_refused_and_the_refused_one_may_come_again() -> None:
    core = sessions(Limits(max_running=2))
    _, first = ask(core, 1)
    ask(core, 2)
    with pytest.raises(Refused):
        ask(core, 3)
    core.finish(first, b"x")
    assert ask(core, 3)[0] is Verdict.RUN


def test_too_many_held_effects_refuse_new_requests() -> None:
    core = sessions(Limits(max_effects=2))
    for seq in (1, 2):
        core.finish(ask(core, seq)[1], b"x", Effect(wanted_by_ping=True))
    with pytest.raises(Refused):
        ask(core, 3)
    giving_back = core.request(NAME, 4, "release", Line(), takes=False)
    assert giving_back.verdict is Verdict.RUN
    core.settle(NAME, 1)
    assert ask(core, 5)[0] is Verdict.RUN
