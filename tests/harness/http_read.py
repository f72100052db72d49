"""One HTTP request."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def read(url: str, *, body: Any = None, method: str = "", token: str = "") -> bytes:
    """What the answer holds; a body goes as JSON. Raises urllib.error.HTTPError."""
    request = urllib.request.Request(url, method=method or ("GET" if body is None else "POST"))
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as reply:
        content: bytes = reply.read()
        return content
