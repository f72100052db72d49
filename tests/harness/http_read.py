"""One blocking HTTP request, for tests."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from kvstrata.process.http_local import find_token


def read(
    url: str, *, body: Any = None, method: str = "", token: str | None = None, timeout_s: float = 120.0
) -> bytes:
    """Return the answer's body; `body` is sent as JSON. Raises urllib.error.HTTPError.

    Without `token`, the request finds the token of a server on this host as `kvstrata ctl` does.
    """
    request = urllib.request.Request(url, method=method or ("GET" if body is None else "POST"))
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if token := find_token(url) if token is None else token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        content: bytes = reply.read()
        return content
