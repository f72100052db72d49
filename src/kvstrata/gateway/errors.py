"""The gateway's own error responses, in the format that clients of the API expect.

OpenAI     {"error": {"message", "type", "param", "code"}}
Anthropic  {"type": "error", "error": {"type", "message"}}      (paths below /v1/messages)
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvstrata.text import one_line

OPENAI_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"} | {
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = OPENAI_TYPES | {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class Failure(NamedTuple):
    """An error response of the gateway or of an engine."""

    status: int
    code: str
    """Machine-readable error code, also the label `outcome` in metrics."""
    message: str
    param: str = ""
    retry_after_s: int = 0
    """Value of the header Retry-After; 0: the response has none."""


MAX_BODY_BYTES = 64 << 20
TOO_LARGE = Failure(413, "body_too_large", f"body: larger than {MAX_BODY_BYTES} bytes; send less")


def error_body(failure: Failure, path: str) -> bytes:
    """The JSON body of an error response on this path."""
    message = one_line(failure.message)
    if is_anthropic(path):
        kind = ANTHROPIC_TYPES.get(failure.status, "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    error = {
        "message": message,
        "type": OPENAI_TYPES.get(failure.status, "server_error"),
        "param": failure.param or None,
        "code": failure.code,
    }
    return msgspec.json.encode({"error": error})


def is_anthropic(path: str) -> bool:
    """Whether clients of this path expect Anthropic's format."""
    return path.startswith("/v1/messages")
