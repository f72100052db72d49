"""Sends commands' requests to the admin port of a server or controller: finds address and token, checks the reply."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata.config.common_model import ListenSettings
from kvstrata.config.private_file import bearer_token, read_bearer_token
from kvstrata.errors import BadRequest, ConfigError, Unavailable
from kvstrata.patience import patience
from kvstrata.process.http_gate import is_loopback
from kvstrata.process.http_local import find_token

TIMEOUT_S = 30
ALIVE_S = 3
"""Time in which a process that runs answers `/healthz`."""


class Ask(NamedTuple):
    """One request to the admin port."""

    path: str
    body: Mapping[str, Any] | None = None
    method: str = ""
    """Empty: GET without a body, POST with one."""
    timeout_s: float = TIMEOUT_S


def _check_answers(url: str, base: str, flag: str) -> None:
    """Raise Unavailable if the process behind this URL does not answer a probe within ALIVE_S.

    A request may take longer, but a process that is stopped or hangs should cost nobody more.
    """
    try:
        with opener(url).open(f"{base}/healthz", timeout=patience(ALIVE_S)):
            return
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            here = is_loopback(urllib.parse.urlsplit(url).hostname or "")
            raise Unavailable(
                f"{flag}: {url} has not answered for {ALIVE_S} s: its process is stopped or hangs"
                f"{'; see `kvstrata ctl pool list`' if here else ', or its host is not reachable'}"
            ) from None
        # The request itself reports any other failure.


def ask(url: str, asked: Ask, *, token: str = "", flag: str = "--url") -> Any:
    """Ask the admin port, or another port that the user has named by `flag`; returns its JSON.

    Raises ConfigError for a wrong URL, BadRequest for an HTTP error, Unavailable without an answer.

    If `token` is empty, the token that a local server has published is used, if any (process/http_local.py).
    """
    body = asked.body
    method = asked.method or ("GET" if body is None else "POST")
    _check_url(url, flag)
    base = url.rstrip("/")
    _check_answers(url, base, flag)
    request = urllib.request.Request(base + asked.path, method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if token := token or find_token(url):
        # An unredirected header is not sent to another port to which an answer redirects.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with opener(url).open(request, timeout=asked.timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise BadRequest(f"{flag}: {url}: " * (flag != "--url") + _message(error)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"{flag}: {url} does not answer ({reason}); is a server running there?") from None


def _check_url(url: str, flag: str) -> None:
    """Raise ConfigError unless this is the URL of a port."""
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or not url.isprintable() or " " in url:
        raise ConfigError(f"{flag}: {url!a:.200} must be http://HOST:PORT or https://HOST:PORT", field=flag)


def usual_url(http: ListenSettings) -> str:
    """URL of a process on this host with default settings."""
    return f"http://{http.host}:{http.port}"


def read_token(flag: str, path: str) -> str:
    """The bearer token of an admin port in this file, or on standard input for `-`; empty without a path.

    Raises ConfigError.
    """
    if not path:
        return ""
    if path == "-":
        return bearer_token(read_text(path), "standard input", flag)
    return read_bearer_token(path, flag)


def read_text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        body = json.load(error)
        body = body.get("error", body)  # a gateway's errors have the shape of its engines' ones
        return str(body.get("message") or body.get("why") or body)
    except (ValueError, AttributeError):
        return f"HTTP {error.code} {error.reason}"


def opener(url: str) -> urllib.request.OpenerDirector:
    """Opens requests to `url` as urllib does, but to this machine without a proxy."""
    here = is_loopback(urllib.parse.urlsplit(url).hostname or "")
    return urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * here)
