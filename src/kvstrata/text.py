"""Makes external texts safe for errors, logs and pages: short, on one line, without credentials.

Secrets are found in two ways.  Texts that this process knows to be secrets, because it read them from a setting for a
secret, are replaced wherever they occur.  Other credentials are found by their form: in a URL, after `Bearer`, as a
block of PEM.  config/secrets.py has the rule for fields with names.
"""

from __future__ import annotations

import os
import re
import traceback

LEFT_OUT = "*** left out ***"
MAX_LINE_CHARS = 2_000
MAX_WORD_CHARS = 300
"""Longer words are cut; an error of another library may quote a whole value."""
MIN_SECRET_CHARS = 6
"""A shorter secret is not looked for, since it would also be found inside harmless words."""
MAX_SECRETS = 512

MIN_TOKEN_CHARS = 20
"""A user name in a URL is taken for a token if it has at least this many characters."""

# Every pattern takes time in proportion to the text, whoever wrote it.
_URL = re.compile(r"[^\s'\"]+")
_BEARER = re.compile(r"(?<=bearer )(?=\S*\d)\S{8,}", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|$)", re.DOTALL)
_QUERY = re.compile(
    r"([?&][\w.-]{0,40}(?:signature|sig|token|credential|password|secret|key)[\w.-]{0,40}=)[^&\s'\"]+",
    re.IGNORECASE,
)
_WORD = re.compile(r"\S+")

_known: tuple[str, ...] = ()


def remember_secret(secret: str) -> None:
    """Leave this text out of every error and log line from now on. Thread-safe; bounded."""
    global _known
    secret = secret.strip()
    if len(secret) < MIN_SECRET_CHARS or secret in _known:
        return
    # Longest first, so that a secret that contains another one is replaced as a whole.
    newest = (secret, *_known)[:MAX_SECRETS]
    _known = tuple(sorted(newest, key=len, reverse=True))


def without_credentials(text: str) -> str:
    """The text without the secrets that this process knows, and without credentials of a known form."""
    for secret in _known:
        if secret in text:
            text = text.replace(secret, LEFT_OUT)
    if "://" in text:
        text = _URL.sub(_without_user, text) if "@" in text else text
        text = _QUERY.sub(rf"\1{LEFT_OUT}", text)
    text = _BEARER.sub(LEFT_OUT, text)
    return _PEM.sub(LEFT_OUT, text) if "-----BEGIN" in text else text


def type_and_place(error: BaseException) -> str:
    """What a log tells of a defect: not the error's text, which may hold a piece of a request."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {os.path.basename(place.filename)}:{place.lineno}"


def one_line(text: str, most_chars: int = MAX_LINE_CHARS) -> str:
    """The text in one line of bounded length, control characters escaped, without credentials."""
    text = without_credentials(text[: 4 * MAX_LINE_CHARS])
    if len(text) > MAX_WORD_CHARS:
        text = _WORD.sub(_cut, text)
    text = printable(text)
    return text if len(text) <= most_chars else text[: most_chars - 1] + "…"


def _without_user(word: re.Match[str]) -> str:
    """A word without the password, or the token, in front of a URL's host; everything up to the last @ is left out."""
    scheme, separator, rest = word[0].partition("://")
    user, at, host = rest.rpartition("@")
    is_secret = ":" in user.partition("/")[0] or ("/" not in user and len(user) >= MIN_TOKEN_CHARS)
    return f"{scheme}{separator}{LEFT_OUT}{at}{host}" if at and is_secret else word[0]


def _cut(word: re.Match[str]) -> str:
    return word[0] if len(word[0]) < MAX_WORD_CHARS else f"{word[0][: MAX_WORD_CHARS // 2]}…"


def printable(text: str) -> str:
    """The text with every unprintable character escaped, since a terminal might obey it."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
