"""Classifies obstore's errors: a short reason, advice, and a text without anything that may be a credential."""

from __future__ import annotations

import re

from kvstrata.config.secrets import scrubbed
from kvstrata.tiers.reasons import FULL

try:
    from obstore import exceptions
except ImportError:  # config.py then refuses the type and says what to install, so this module is not used
    pass

SLOW_DOWN = "slow_down"
LATER = (SLOW_DOWN, FULL)
"""Reasons for which a later try may succeed."""
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
RANGE = re.compile(r"non-2xx status code: 416|InvalidRange|range was invalid", re.IGNORECASE)
_BY_CODE = {
    "RequestTimeTooSkewed": "clock",
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"), "token"
    ),
    "NotImplemented": "conditional_put",
    "NoSuchBucket": "no_bucket",
}
"""Reasons by the code in the store's answer."""
_FULL = re.compile(r"<Code>\w*(?:Quota|InsufficientStorage|StorageFull|CapacityExceeded)\w*</Code>")
_INSTANCE_METADATA = "://169.254.169.254"
"""URL at which the library looks for credentials if none are configured."""
_QUERY = re.compile(r"\?\S*")
_USER = re.compile(r"(?<=://)[^/@\s]*@")


def reason_of(error: Exception) -> str:
    """The short reason for an exception of the library."""
    text = str(error)
    code = _CODE.search(text)
    if code and code[1] in _BY_CODE:
        return _BY_CODE[code[1]]
    if _INSTANCE_METADATA in text:
        return "no_credentials"
    if "certificate" in text.lower():
        return "certificate"
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return FULL if _FULL.search(text) else "denied"
    if status := _STATUS.search(text):
        if status[1] == "507" or _FULL.search(text):
            return FULL
        return {"503": SLOW_DOWN, "429": SLOW_DOWN}.get(status[1], "io")
    for kind, word in (("Timeout", "timeout"), ("Connect", "unreachable")):
        if f"kind: {kind}" in text:
            return word
    return "io"


def is_wrong(error: Exception) -> bool:
    """Whether the store answers, but cannot be used until a setting or the store is changed."""
    status = _STATUS.search(str(error))
    return (
        isinstance(error, ValueError)
        or reason_of(error) in ("denied", "no_bucket")
        or (status is not None and status[1][0] == "4" and status[1] not in ("408", "429"))
    )


def plain(error: Exception) -> str:
    """The error's text without bodies, queries and everything else that may hold credentials."""
    text = str(error).partition("\n\nDebug source")[0]
    code = _CODE.search(text)
    text = _USER.sub("", _QUERY.sub("", text.partition("<")[0])).strip()
    return f"{scrubbed(text)}{' ' + code[1] if code else ''}"


def advice(error: Exception) -> str:
    """The problem with the URL according to this error, and the remedy: a sentence without its subject, the URL."""
    return _ADVICE.get(reason_of(error), "cannot be used")


_ADVICE = {
    "no_bucket": "names a bucket that does not exist; create it",
    "denied": "denies these credentials; they must allow getting, putting, deleting and listing",
    "clock": "rejects this machine's time; set its clock (timedatectl, chrony)",
    "token": "refuses the session token, which is wrong or has expired; give a new one and restart the server",
    "no_credentials": "needs credentials, and none were given: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. "
    "Profiles (AWS_PROFILE, ~/.aws) are not read: `aws configure export-credentials --format env` prints their keys",
    "certificate": "has a certificate that this machine does not trust; name the file of its CA in SSL_CERT_FILE in "
    "the server's environment",
    "conditional_put": 'does not support conditional puts; set "conditional_put": "disabled" in this entry',
    "unreachable": "cannot be reached; check the address and the server",
    "timeout": "does not answer in time; check the address",
    FULL: "is full",
    SLOW_DOWN: "throttles requests",
}
