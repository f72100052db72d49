"""A connection to one etcd server: gRPC over TCP or TLS, with or without a user.

The messages are the generated ones of the package aetcd, whose own client opens only insecure channels.

Every call ends within `call_s`, or LOGIN_S later if it has to log in first, since etcd hashes passwords slowly on
purpose.  A call raises EtcdFailed if etcd refused it, and also if its outcome is unknown: etcd may have carried it out.
Certificates are read again for each connection, so renewed files need no restart.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import grpc
    from aetcd import rpc
except ModuleNotFoundError:
    # Without the extra `etcd`, settings that need this module are refused (controller/process.py, `check_etcd`).
    pass

from kvstrata.config.controller_model import EtcdSettings
from kvstrata.config.private_file import read_private_file
from kvstrata.errors import ConfigError
from kvstrata.patience import patience
from kvstrata.text import remember_secret

LOGIN_S = 5.0
_STALE_LOGIN = ("invalid auth token", "revision of auth store is old")
"""etcd's words when the user has to log in again, which is not an error."""
_REFUSALS = (
    "PERMISSION_DENIED",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED",
)
"""Names of the gRPC status codes with which etcd refuses a call."""


class EtcdFailed(Exception):
    """etcd did not answer, or refused; the message says why."""

    def __init__(self, message: str, *, refused: bool = False, lease_lost: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """etcd answered with a refusal, so another connection would not help."""
        self.lease_lost = lease_lost
        """The lease that the call names has ended."""


class Endpoint(NamedTuple):
    """Address of one etcd server."""

    host: str
    port: int
    tls: bool

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Row(NamedTuple):
    """A key that exists, with its value."""

    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


class Answer(NamedTuple):
    """Outcome of a transaction."""

    succeeded: bool
    """The comparisons held."""
    revision: int
    """etcd's revision when it carried the transaction out."""
    rows: dict[bytes, Row]
    """The keys that the transaction read, without those that do not exist."""


class Etcd:
    """One connection, opened by the first call."""

    def __init__(self, endpoint: Endpoint, settings: EtcdSettings, call_s: float) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._call_s = call_s
        self._channel: grpc.aio.Channel | None = None
        self._login: tuple[tuple[str, str], ...] | None = None
        self._closed = False

    async def transact(
        self, compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any] = ()
    ) -> Answer:
        """Carry out one transaction, made of the comparisons and operations below. Raises EtcdFailed."""
        request = rpc.TxnRequest(compare=compare, success=success, failure=failure)
        told = await self._ask(lambda channel, login: rpc.KVStub(channel).Txn(request, metadata=login))
        rows = {
            bytes(row.key): Row(bytes(row.value), row.create_revision, row.mod_revision, row.lease)
            for one in told.responses
            for row in one.response_range.kvs
        }
        return Answer(told.succeeded, told.header.revision, rows)

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Make a lease; returns it and its time to live in seconds. Raises EtcdFailed."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        told = await self._ask(
            lambda channel, login: rpc.LeaseStub(channel).LeaseGrant(request, metadata=login)
        )
        return told.ID, told.TTL

    async def keep_alive(self, lease: int) -> int:
        """Refresh a lease; returns its time to live from now in seconds, 0 if it has ended. Raises EtcdFailed."""
        request = rpc.LeaseKeepAliveRequest(ID=lease)

        async def one(channel: grpc.aio.Channel, login: Any) -> Any:
            call = rpc.LeaseStub(channel).LeaseKeepAlive(metadata=login)
            try:
                await call.write(request)
                return await call.read()
            finally:
                call.cancel()

        told = await self._ask(one)
        if told is grpc.aio.EOF:
            raise EtcdFailed("etcd ended the stream that keeps the lease")
        ttl_s: int = told.TTL
        return max(0, ttl_s)

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it the keys that it owns. Raises EtcdFailed."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._ask(lambda channel, login: rpc.LeaseStub(channel).LeaseRevoke(request, metadata=login))

    async def close(self) -> None:
        """Close the connection; calls under way fail. Idempotent."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _ask(self, call: Any) -> Any:
        """Make `call(channel, login)`, after another login if etcd asks for one; returns its answer."""
        if self._closed:
            raise EtcdFailed("the connection was closed")
        try:
            channel = await self._open()
            try:
                return await self._within_bounds(call, channel)
            except grpc.aio.AioRpcError as error:
                if not self._login or not any(words in (error.details() or "") for words in _STALE_LOGIN):
                    raise
            self._login = None
            return await self._within_bounds(call, channel)
        except grpc.aio.AioRpcError as error:
            details = error.details() or error.code().name
            raise EtcdFailed(
                details.removeprefix("etcdserver: "),
                refused=error.code().name in _REFUSALS,
                lease_lost="lease not found" in details,
            ) from None
        except TimeoutError:
            raise EtcdFailed(f"{self._endpoint.target} did not answer in time") from None
        except (ConfigError, OSError, grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise EtcdFailed(str(error) or type(error).__name__) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC cancels this call when another one finds etcd away and closes the shared connection.
            raise EtcdFailed("the connection was closed") from None

    async def _within_bounds(self, call: Any, channel: grpc.aio.Channel) -> Any:
        if self._login is None:
            async with asyncio.timeout(patience(LOGIN_S)):
                self._login = await self._log_in(channel)
        async with asyncio.timeout(self._call_s):
            return await call(channel, self._login)

    async def _log_in(self, channel: grpc.aio.Channel) -> tuple[tuple[str, str], ...]:
        """Log in; returns the metadata for each call."""
        if not self._settings.user:
            return ()
        password = await asyncio.to_thread(read_password, self._settings)
        request = rpc.AuthenticateRequest(name=self._settings.user, password=password)
        told = await rpc.AuthStub(channel).Authenticate(request)
        return (("token", told.token),)

    async def _open(self) -> grpc.aio.Channel:
        files: Mapping[str, bytes | None] = {}
        if self._channel is None and self._endpoint.tls:
            files = await asyncio.to_thread(_read_certificates, self._settings)
        if self._closed:
            raise EtcdFailed("the connection was closed")
        if self._channel is None:  # another call may have opened it meanwhile
            # Its own pool of subchannels: otherwise a new channel inherits the back-off of the one that failed.
            options = (("grpc.use_local_subchannel_pool", 1),)
            if self._endpoint.tls:
                made = grpc.ssl_channel_credentials(**files)
                self._channel = grpc.aio.secure_channel(self._endpoint.target, made, options)
            else:
                self._channel = grpc.aio.insecure_channel(self._endpoint.target, options)
        return self._channel


# --- parts of transactions --------------------------------------------------------------------------------------


def created(key: bytes, revision: int) -> Any:
    """Compare: the key was created at this revision; 0: the key is absent."""
    return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision)


def modified(key: bytes, revision: int) -> Any:
    """Compare: the key was last written at this revision; 0: the key is absent."""
    return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision)


def owned(key: bytes, lease: int) -> Any:
    """Compare: the key is bound to this lease."""
    return rpc.Compare(key=key, target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, lease=lease)


def read(key: bytes) -> Any:
    """Read one key."""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def read_all(prefix: bytes) -> Any:
    """Read all keys that begin with `prefix`, whose last byte must not be 255."""
    end = prefix[:-1] + bytes([prefix[-1] + 1])
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=prefix, range_end=end))


def put(key: bytes, value: bytes, lease: int = 0) -> Any:
    """Write a key, bound to the lease if one is named."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> Any:
    """Remove a key."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


# --- settings ---------------------------------------------------------------------------------------------------


def read_endpoint(endpoint: str) -> Endpoint:
    """Parse `HOST:PORT`, `http://HOST:PORT` or `https://HOST:PORT`. Raises ConfigError."""
    field = "etcd.endpoints"
    tls = endpoint.startswith("https://")
    host, colon, port = endpoint.removeprefix("https://" if tls else "http://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"{field}: must be HOST:PORT, such as 127.0.0.1:2379, or https://HOST:PORT for TLS, found {endpoint!r}",
            field=field,
        )
    return Endpoint(host.strip("[]"), int(port), tls)


def check_credentials(settings: EtcdSettings) -> None:
    """Raise ConfigError for a user, password or certificates that cannot be used."""
    if bool(settings.user) != bool(settings.password_file):
        missing = "password_file" if settings.user else "user"
        raise ConfigError(
            f"etcd.{missing}: is missing; etcd.user and etcd.password_file belong together, give both or none",
            field=f"etcd.{missing}",
        )
    if settings.user and not read_password(settings):
        raise ConfigError(
            f"etcd.password_file: {settings.password_file} is empty; write the password of {settings.user} into it",
            field="etcd.password_file",
        )
    if bool(settings.cert_file) != bool(settings.key_file):
        missing = "key_file" if settings.cert_file else "cert_file"
        raise ConfigError(
            f"etcd.{missing}: is missing; etcd.cert_file and etcd.key_file belong together, give both or none",
            field=f"etcd.{missing}",
        )
    plain = [endpoint for endpoint in settings.endpoints if not read_endpoint(endpoint).tls]
    given = [name for name in ("ca_file", "cert_file") if getattr(settings, name)]
    if given and plain:
        raise ConfigError(
            f"etcd.endpoints: {plain[0]!r}: etcd.{given[0]} is given, but this endpoint does not use TLS; write "
            "https:// before it",
            field="etcd.endpoints",
        )
    _read_certificates(settings)
    _check_certificates(settings)


def read_password(settings: EtcdSettings) -> str:
    """The password in `password_file`. Raises ConfigError."""
    password = read_private_file(settings.password_file, "etcd.password_file").strip()
    remember_secret(password)
    return password


def _read_certificates(settings: EtcdSettings) -> Mapping[str, bytes | None]:
    """The certificates as gRPC takes them. Raises ConfigError."""
    key = read_private_file(settings.key_file, "etcd.key_file").encode() if settings.key_file else None
    return {
        "root_certificates": _read(settings.ca_file, "etcd.ca_file"),
        "private_key": key,
        "certificate_chain": _read(settings.cert_file, "etcd.cert_file"),
    }


def _read(path: str, field: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: {path}: cannot be read: {error}", field=field) from None


def _check_certificates(settings: EtcdSettings) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if settings.ca_file:
        try:
            context.load_verify_locations(settings.ca_file)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"etcd.ca_file: {settings.ca_file}: has no certificates in PEM format: {error}",
                field="etcd.ca_file",
            ) from None
    if settings.cert_file:
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"etcd.cert_file: {settings.cert_file} and etcd.key_file: {settings.key_file}: must be a certificate "
                f"in PEM and its key, without a passphrase: {error}",
                field="etcd.cert_file",
            ) from None
