"""process/http_login.py: codes are taken once and in time, sessions need both secrets, and there are bounds."""

from __future__ import annotations

import pytest

from kvstrata.config.common_model import ListenSettings
from kvstrata.process.http_gate import Access
from kvstrata.process.http_login import CODE_S, MAX_SESSIONS, PAGE_KEY, SESSION_S, Logins, Session


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logins(clock: Clock) -> Logins:
    return Logins(9000, clock)


def headers(session: Session, name: str = "kvstrata-9000") -> dict[bytes, bytes]:
    cookie = f"theme=dark; {name}={session.cookie};other"
    return {b"cookie": cookie.encode(), PAGE_KEY: session.page_key.encode()}


@pytest.mark.parametrize("code", ["", "x", "ü" * 32, "\ud800"])
def test_an_unknown_code_is_refused_and_uses_no_other_one_up(logins, code):
    right = logins.new_code()
    assert not logins.take(code) and not logins.take(right[:-1])
    assert logins.take(right)


def test_a_code_expires(logins, clock):
    early, late = logins.new_code(), logins.new_code()
    clock.now_s += CODE_S - 0.01
    assert logins.take(early)
    clock.now_s += 0.01
    assert not logins.take(late)


def test_a_session_needs_the_cookie_and_the_page_key_of_one_session(logins):
    one, other = logins.begin(), logins.begin()
    assert len({*one, *other}) == 4
    assert logins.proven(headers(one)) and logins.proven(headers(other))
    for crossed in (
        Session(one.cookie, other.page_key),
        Session(one.cookie, one.cookie),
        Session(one.page_key, one.page_key),
        Session(one.cookie, ""),
        Session("", one.page_key),
        Session("", ""),
    ):
        assert not logins.proven(headers(crossed))
    assert not logins.proven(headers(one, "kvstrata-9001"))
    assert not logins.proven({PAGE_KEY: one.page_key.encode()})
    assert not logins.proven({b"cookie": headers(one)[b"cookie"]})


def test_a_session_ends_with_its_time_and_at_the_bound_the_oldest_ends(logins, clock):
    sessions = [logins.begin() for _ in range(MAX_SESSIONS + 2)]
    assert [logins.proven(headers(one)) for one in sessions] == [False] * 2 + [True] * MAX_SESSIONS
    clock.now_s += SESSION_S
    assert not any(logins.proven(headers(one)) for one in sessions)


def test_another_token_ends_the_sessions_that_the_last_one_opened(logins):
    access = Access(ListenSettings(), "an-old-token-0123456789", logins=logins)
    session, code = headers(logins.begin()), logins.new_code()
    assert access.proven(session)
    access.set_token("a-new-token-0123456789")
    assert not access.proven(session) and not logins.take(code)
    assert access.proven({b"authorization": b"Bearer a-new-token-0123456789"})
