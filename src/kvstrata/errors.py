"""The error tree: one class per action the caller can take, each with a stable wire code.

A missing key is a result, never an error.  Messages name the field, the value and what to change.
"""

from __future__ import annotations

from typing import ClassVar


class KvstrataError(Exception):
    """Base of every error that kvstrata raises on purpose.

    `code` is stable and goes over the wire; `retryable` says whether the same request may succeed later
    without the caller changing anything; `field` names what was wrong where one thing was.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class ConfigError(KvstrataError):
    """A setting, flag, environment value or file is wrong; the start stops."""

    code = "bad_config"


class BadRequest(KvstrataError):
    """A message that came from outside breaks the protocol; fix the sender."""

    code = "bad_request"


class WrongVersion(KvstrataError):
    """The peer speaks another protocol or format version; upgrade one side."""

    code = "wrong_version"


class UnknownSession(KvstrataError):
    """The session is not attached to this instance (it restarted, or never attached); attach again."""

    code = "unknown_session"
    retryable = True


class UnknownIdentity(KvstrataError):
    """The identity id is not (or no longer) known for this session; identify again, then send again."""

    code = "unknown_identity"
    retryable = True


class NotPermitted(KvstrataError):
    """The peer may not do this (other uid, tenant not its own, operation needs an attached session)."""

    code = "not_permitted"


class LayoutRefused(KvstrataError):
    """Same identity with other layout facts; `field` names the first fact that differs."""

    code = "layout_refused"


class Refused(KvstrataError):
    """The instance has no room or a limit is reached now; try later or go on without a cache."""

    code = "refused"
    retryable = True


class DeadlineExceeded(KvstrataError):
    """No outcome before the request's deadline; nothing was promised."""

    code = "deadline"
    retryable = True


class Cancelled(KvstrataError):
    """The session cancelled this request itself; whatever it did was undone."""

    code = "cancelled"


class Unavailable(KvstrataError):
    """The instance or a part of it is absent, starting or stopping."""

    code = "unavailable"
    retryable = True


class NotLeading(KvstrataError):
    """This controller does not lead, or cannot be sure that it does; ask the one that leads."""

    code = "not_leading"
    retryable = True


class SegmentError(KvstrataError):
    """The shared-memory segment cannot be made, mapped or adopted."""

    code = "segment"


class StorageError(KvstrataError):
    """An L2 adapter could not be opened or broke its contract."""

    code = "storage"


class TransferError(KvstrataError):
    """A transfer engine could not be opened, or another instance's metadata for it cannot be used."""

    code = "transfer"


class InternalError(KvstrataError):
    """Our own mistake, answered at the RPC boundary; details are in the server's log."""

    code = "internal"


WIRE_ERRORS: dict[str, type[KvstrataError]] = {
    cls.code: cls
    for cls in (
        ConfigError,
        BadRequest,
        WrongVersion,
        UnknownSession,
        UnknownIdentity,
        NotPermitted,
        LayoutRefused,
        Refused,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
        NotLeading,
        SegmentError,
        StorageError,
        TransferError,
        InternalError,
    )
}
"""Wire code → class, for clients that turn an error reply back into an exception."""
