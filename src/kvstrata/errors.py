"""The error tree: split by who is wrong, one class per action that the caller can take, each with a stable wire code.

    CallerError   the request cannot be granted as it is: its sender must change it, or send another request first
    ConfigError   the configuration is wrong: the start stops, and the message says what to change
    MediumError   the shared memory, storage or network that should hold or carry the bytes failed
    RemoteError   the process that was asked cannot grant the request now, or refused it; the request was valid
    InternalError our own mistake

A missing key is a result, never an error.  Messages name the field, the value and what to change.  `from_wire` alone
turns the error replies of servers into exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.text import one_line

MAX_FIELD_CHARS = 200


def install(extra: str) -> str:
    """The command that installs an extra. kvstrata is on no package index, so it names the clone or a wheel file."""
    return f"pip install '.[{extra}]' in kvstrata's clone, or pip install 'kvstrata-….whl[{extra}]'"


class KvstrataError(Exception):
    """Base of every error that kvstrata raises on purpose.

    Its message is one line of bounded length, without control characters and credentials (text.py).

    `code` is stable and goes over the wire.  `retryable`: the same request may succeed later, unchanged; then
    `retry_after_ms` says after how long to try again (0: not known).  `field` names the wrong setting, flag or field of
    the request; it is empty if no single one is wrong.
    """

    code: str = "internal"
    retryable: bool = False

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        message = one_line(message)
        super().__init__(message)
        self.message = message
        self.field = one_line(field, MAX_FIELD_CHARS)
        self.retry_after_ms = round(1000 * retry_after_s)

    @property
    def lines(self) -> list[str]:
        """The message as a command prints it: a line for each thing that is wrong."""
        return [self.message]


# --- the caller -----------------------------------------------------------------------------------------------


class CallerError(KvstrataError):
    """The request cannot be granted as it is."""


class BadRequest(CallerError):
    """A message that came from outside breaks the protocol; fix the sender."""

    code = "bad_request"


class WrongVersion(CallerError):
    """The other side speaks another protocol or format version; upgrade one side."""

    code = "wrong_version"


class UnknownIdentity(CallerError):
    """The identity id is not (or no longer) known for this session; identify again, then send again."""

    code = "unknown_identity"
    retryable = True


class NotPermitted(CallerError):
    """The sender may not do this: it has another uid, names a tenant that is not its own, or is not attached."""

    code = "not_permitted"


class LayoutRefused(CallerError):
    """The identity is known with other layout facts; `field` names the first fact that differs."""

    code = "layout_refused"


class Cancelled(CallerError):
    """The session itself cancelled this request; its effects were undone."""

    code = "cancelled"


class NotFound(CallerError):
    """The thing that an admin's request names does not exist; the message lists those that do, where they are few."""

    code = "not_found"


class UnknownInstance(CallerError):
    """The instance is not registered with this controller; register first, then send again."""

    code = "unknown_instance"
    retryable = True


class Superseded(CallerError):
    """Another process has since registered under this instance's name, and lives; give each instance its own name."""

    code = "superseded"
    retryable = True


class InstanceIdTaken(CallerError):
    """An instance with this id serves on another host; give each instance a name of its own."""

    code = "instance_id_taken"
    retryable = True


class UnreachableInstance(CallerError):
    """The controller gets no answer at the control port of the instance that registers; open the way, and try again."""

    code = "unreachable_instance"
    retryable = True


class WrongKey(CallerError):
    """The instance id belongs to another key; give the instance a name of its own, or have the id forgotten."""

    code = "wrong_key"


class TooOld(CallerError):
    """The instance does not know all changes since the follower's cursor; list its chunks anew."""

    code = "too_old"


# --- the configuration ----------------------------------------------------------------------------------------


class ConfigError(KvstrataError):
    """A setting, flag, environment value or file is wrong; the start stops.

    `causes`: the single errors, if this one tells of several.
    """

    code = "bad_config"

    def __init__(self, message: str, *, field: str = "", causes: tuple[ConfigError, ...] = ()) -> None:
        super().__init__(message, field=field)
        self.causes = causes

    @property
    def lines(self) -> list[str]:
        return [one.message for one in self.causes] or super().lines


def together(errors: Iterable[ConfigError]) -> ConfigError:
    """One error that tells of all these. REQUIRES at least one."""
    single = {one.message: one for error in errors for one in (error.causes or (error,))}
    first, *others = single.values()
    if not others:
        return first
    says = f"{len(single)} settings are wrong: {'; '.join(single)}"
    kind = ConfigError
    if all(isinstance(one, MachineLacks) for one in single.values()):
        kind = MachineLacks if all(one.retryable for one in single.values()) else MachineUnfit
    return kind(says, field=first.field, causes=tuple(single.values()))


class AllWrong:
    """Collects what several checks raise, so that one error tells of all that is wrong.

        wrong = AllWrong()
        with wrong:
            port = check_port()
        with wrong:
            host = check_host()
        wrong.tell()

    A ConfigError ends its `with` block, and the code after the block goes on.
    """

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._errors.append(error)
        return True

    def add(self, error: ConfigError) -> None:
        """Collect an error that was not raised."""
        self._errors.append(error)

    def tell(self) -> None:
        """Raise ConfigError if anything was wrong."""
        if self._errors:
            raise together(self._errors)


class MachineLacks(ConfigError):
    """The setting asks for a file, memory, port or device that this machine lacks now; later, or on another one, it may
    be right."""

    retryable = True


class MachineUnfit(MachineLacks):
    """What the machine lacks does not come by waiting: memory, a NUMA node, a card, a package."""

    retryable = False


# --- the medium -----------------------------------------------------------------------------------------------


class MediumError(KvstrataError):
    """The memory, device, storage or network that should hold or carry the bytes failed, or returned wrong bytes."""


class SegmentError(MediumError):
    """The shared-memory segment cannot be created, mapped or adopted."""

    code = "segment"


class StorageError(MediumError):
    """An L2 adapter cannot be opened now, because its storage does not answer; or it broke its contract."""

    code = "storage"


class TransferError(MediumError):
    """A transfer engine could not be opened, or another instance's metadata for it cannot be used."""

    code = "transfer"


# --- the process that was asked -------------------------------------------------------------------------------


class RemoteError(KvstrataError):
    """The request was sound, but the process that was asked cannot grant it now."""


class Refused(RemoteError):
    """The instance has no room, or has reached a limit; try later, or go on without a cache."""

    code = "refused"
    retryable = True


class DeadlineExceeded(RemoteError):
    """The request's deadline passed before its outcome was known; nothing was promised."""

    code = "deadline"
    retryable = True


class Unavailable(RemoteError):
    """The instance, or the part of it that should answer, is absent, starting or stopping."""

    code = "unavailable"
    retryable = True


class NotLeading(RemoteError):
    """This controller does not lead, or cannot be sure that it does; ask the leader."""

    code = "not_leading"
    retryable = True


class ClusterFailure(RemoteError):
    """Another process of the cluster refused a request and did nothing; all fields are those of its answer."""

    def __init__(self, code: str, message: str, *, field: str, retryable: bool, retry_after_ms: int) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_ms / 1000)
        self.code = code
        self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


# --- ourselves ------------------------------------------------------------------------------------------------


class InternalError(KvstrataError):
    """Our own mistake, answered at the RPC boundary; details are in the server's log."""

    code = "internal"


WIRE_ERRORS: dict[str, type[KvstrataError]] = {
    cls.code: cls
    for cls in (
        ConfigError,
        BadRequest,
        WrongVersion,
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
"""Wire code → class of the errors that a server answers to engines and admins."""


def from_wire(code: str, message: str, *, field: str = "") -> KvstrataError:
    """The exception for a server's error reply; an InternalError for a code that this version does not know."""
    return WIRE_ERRORS.get(code, InternalError)(message, field=field)
