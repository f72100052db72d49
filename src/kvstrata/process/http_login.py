"""Logs browsers in to an HTTP port: a one-time code becomes a session (no I/O).

    code ──(once, within CODE_S)──▶ session ──(SESSION_S, a logout, or a later session in its place)──▶ ended

1. A session is proven by two secrets together: a cookie, which scripts cannot read, and a page key, which the page's
   scripts keep and send in the header PAGE_KEY.  Browsers send a cookie to all ports of a host, so another user's
   server on another port can learn it; the page key stays with this port's own pages.  A page of another site can
   send neither.
2. Only digests of codes and secrets are kept, and compared in constant time.
3. At most MAX_CODES codes and MAX_SESSIONS sessions exist; a further one ends the oldest.  All end with the process.
4. One thread changes them; others may ask `proven`, since each list is replaced, never changed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

CODE_S = 300.0
MAX_CODES = 8
SESSION_S = 12 * 3600
MAX_SESSIONS = 32
PAGE_KEY = b"kvstrata-page-key"
"""The header with the page key."""


class Session(NamedTuple):
    """The two secrets of a new session."""

    cookie: str
    page_key: str


class _Kept(NamedTuple):
    """The digests of a session's secrets, and the time at which it ends."""

    cookie: bytes
    page_key: bytes
    ends_s: float


class Logins:
    """The codes and sessions of one port."""

    def __init__(self, port: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.cookie_name = f"kvstrata-{port}"
        """Ports of one host share their cookies, so each has a name of its own."""
        self._clock_s = clock_s
        self._codes: list[tuple[bytes, float]] = []
        """(digest, end) of each code, oldest first."""
        self._sessions: list[_Kept] = []
        """Oldest first."""

    def new_code(self) -> str:
        """A code that `take` takes once, within CODE_S."""
        code = secrets.token_urlsafe(24)
        self._codes = [*self._codes, (_digest(code.encode()), self._clock_s() + CODE_S)][-MAX_CODES:]
        return code

    def take(self, code: str) -> bool:
        """Use up a code; False if it is unknown, used or too old."""
        digest, now_s = _digest(code.encode("utf-8", "replace")), self._clock_s()
        before = self._codes
        self._codes = [one for one in before if not hmac.compare_digest(one[0], digest)]
        return any(now_s < ends_s for one, ends_s in before if hmac.compare_digest(one, digest))

    def begin(self) -> Session:
        """A new session."""
        made = Session(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        cookie, page_key = _digest(made.cookie.encode()), _digest(made.page_key.encode())
        kept = _Kept(cookie, page_key, self._clock_s() + SESSION_S)
        self._sessions = [*self._sessions, kept][-MAX_SESSIONS:]
        return made

    def proven(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request carries both secrets of a session."""
        return self._of(headers) is not None

    def end(self, headers: Mapping[bytes, bytes]) -> None:
        """End the session whose secrets a request carries, if it does."""
        if (session := self._of(headers)) is not None:
            self._sessions = [one for one in self._sessions if one is not session]

    def end_all(self) -> None:
        """End all sessions, and forget all codes."""
        self._codes, self._sessions = [], []

    def _of(self, headers: Mapping[bytes, bytes]) -> _Kept | None:
        """The session of a request; None without one."""
        cookie, page_key = _digest(self._cookie(headers)), _digest(headers.get(PAGE_KEY, b""))
        now_s, found = self._clock_s(), None
        for one in self._sessions:
            same_cookie = hmac.compare_digest(one.cookie, cookie)
            same_page_key = hmac.compare_digest(one.page_key, page_key)
            if same_cookie and same_page_key and now_s < one.ends_s:
                found = one
        return found

    def _cookie(self, headers: Mapping[bytes, bytes]) -> bytes:
        """This port's cookie out of a request; empty without one."""
        for pair in headers.get(b"cookie", b"").split(b";"):
            name, _, value = pair.strip().partition(b"=")
            if name == self.cookie_name.encode():
                return value
        return b""


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
