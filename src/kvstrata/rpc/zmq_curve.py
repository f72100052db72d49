"""CURVE keys (RFC 26) and their files.

Each line of a key file has a word and a key; lines that begin with `#` are comments.  A file that any user but its
owner can read is refused.

Controllers and instances always speak CURVE, also without key files, because it proves which key a message comes from:
a controller binds each instance id to the key of its instance (controller/instance_keys.py).  Without key files, the
processes of one user share a key (`SharedKey`).  With --insecure a controller uses OPEN_SECRET, which is public. Its
clients cannot distinguish it from another such server, but it can distinguish its clients: a client's proof is valid
for one connection only, so a server that receives it cannot use it elsewhere (docs/decisions/08-peers.md).

A key file is read again when it has changed, so members can be added and removed without a restart.

The key of a cluster without key files lies where all processes of one user on one host find it:

    RUN_DIR/cluster.keys      mode 0600; RUN_DIR is private_dir.shared_run_dirs()

The first process that needs the file makes it, in the format of a member's key file.  Invariants:

1. Controllers listen with its secret.  So instances trust only processes that can read the file.
2. The public key of that secret is kept as secret: no process shows it, and CURVE never sends it in clear.  A client
   seals the first message of each handshake (HELLO) for it, and a controller ends the handshake if the seal is wrong.
   So a controller may accept clients with any key, and distinguish instances by keys of their own.
3. Readers and gateways connect with the secret itself, and peers accept no other client.
4. Each process that uses the file touches it, since cleaners of /tmp remove files that were not touched for days.

An administrator keeps the CURVE keys of a cluster in one folder; processes only read copies of its files.

    controller.keys     for every controller (`security.curve_secret_file`): its secret, and each member's key and ids
    NAME.keys           for one member (`controller.curve_file`): its secret, and the controller's and all members' keys

Each member has a key of its own, and may register only as NAME or NAME-…; the default ids of a host's instances begin
with the host's name.  All files have mode 0600, and no existing key is replaced unless that is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from kvstrata.config.private_dir import check_private_dir, make_private_dir, shared_run_dirs
from kvstrata.config.private_file import read_private_file, write_private_file
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.text import remember_secret

Z85_CHARS = 40
"""Characters of a key in Z85."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}|[A-Za-z0-9._-]{1,62}-\*")
OPEN_PUBLIC = b"rsKOdP%u^YwbX]0@D&+Y)YbRB@QMS{q]s4%c$uOk"
OPEN_SECRET = b"x%H0c8CtzM(A=W0+1k(pWNv{5uM6dY>).VcG.{6<"
"""The key pair of controllers with --insecure; it is no secret."""


class KeyKind(enum.StrEnum):
    """The kind of a cluster key; the server of a request declares which kinds may send it."""

    INSTANCE = "instance"
    GATEWAY = "gateway"
    CONTROLLER = "controller"


class ClusterKeys(NamedTuple):
    """The keys of one process of a cluster, in Z85."""

    secret: bytes
    server: bytes = b""
    """Public key of the processes that it connects to."""
    kinds: Mapping[str, frozenset[KeyKind]] | None = None
    """The kinds of each public key that may connect to it; None: any key may, and has every kind."""
    listed: Mapping[str, tuple[str, ...]] | None = None
    """For a controller: the ids that each of these keys may use (`NAME`, or `NAME-*`; empty: any); None: any."""

    @property
    def clients(self) -> frozenset[bytes] | None:
        """The public keys that may connect; None: any may."""
        return None if self.kinds is None else frozenset(key.encode() for key in self.kinds)

    def kinds_of(self, key: str) -> frozenset[KeyKind]:
        """The kinds of a client's public key; empty: it may not connect."""
        return frozenset(KeyKind) if self.kinds is None else self.kinds.get(key, frozenset())

    def to(self, server: str) -> ClusterKeys:
        """The same keys for connections to the process with this public key (Z85)."""
        return self._replace(server=server.encode())

    def now(self) -> ClusterKeys:
        """These keys; only those of a file can change."""
        return self


OPEN = ClusterKeys(OPEN_SECRET)
"""For a controller with --insecure."""


def new_secret() -> bytes:
    """A new secret key."""
    return zmq.curve_keypair()[1]


def public_of(secret: bytes) -> bytes:
    """The public key that belongs to a secret key. Raises ValueError for anything else."""
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise ValueError(str(error)) from None


def open_keys(secret: bytes = b"") -> ClusterKeys:
    """Keys for a cluster with --insecure, with this secret key or a new one."""
    return ClusterKeys(secret or new_secret(), OPEN_PUBLIC)


def read_controller_keys(path: str, field: str = "security.curve_secret_file") -> ClusterKeys:
    """Read a controller's keys: a line `secret KEY`, and `client KEY [ID …]` or `gateway KEY [NAME …]` for each client.

    Raises ConfigError, which names `field`.
    """
    ids: dict[bytes, tuple[str, ...]] = {}
    keys = _key_lines(path, field, ("secret", "client", "gateway"), ids)
    if not keys["client"]:
        raise ConfigError(
            f"{field}: {path}: has no line `client KEY`, so no client could connect; add clients' public keys",
            field=field,
        )
    kinds = _kinds_of(keys)
    return ClusterKeys(keys["secret"][-1], b"", kinds, {key: ids[key.encode()] for key in kinds})


def _kinds_of(keys: Mapping[str, list[bytes]]) -> dict[str, frozenset[KeyKind]]:
    """The kinds of each key, by the first word of its lines."""
    words = {"client": KeyKind.INSTANCE, "gateway": KeyKind.GATEWAY, "server": KeyKind.CONTROLLER}
    every = {key for word in words for key in keys.get(word, ())}
    return {
        key.decode(): frozenset(kind for word, kind in words.items() if key in keys.get(word, ()))
        for key in every
    }


def read_cluster_keys(path: str, field: str) -> ClusterKeys:
    """Read the keys of a cluster's member: `secret KEY`, and lines `server KEY` (the controllers'), `client KEY` (an
    instance's) and `gateway KEY` for other keys.

    With only `secret KEY` all members share the secret, and each may send any request to every other.  Raises
    ConfigError, which names `field`.
    """
    keys = _key_lines(path, field, ("secret", "server", "client", "gateway"))
    secret = keys["secret"][-1]
    remember_secret(secret.decode())
    try:
        own = public_of(secret)
    except ValueError:
        raise ConfigError(
            f"{field}: {path}: the secret is not a CURVE key; make one with zmq.curve_keypair()", field=field
        ) from None
    if not (keys["server"] or keys["client"] or keys["gateway"]):
        return ClusterKeys(secret, own, {own.decode(): frozenset(KeyKind)})
    keys["server"] = [(keys["server"] or [own])[-1]]
    keys["client"] = keys["client"] or [own]
    return ClusterKeys(secret, keys["server"][0], _kinds_of(keys))


def _key_lines(
    path: str, field: str, words: tuple[str, ...], ids: dict[bytes, tuple[str, ...]] | None = None
) -> dict[str, list[bytes]]:
    """Read the lines of a key file; returns the keys of each word, in order. Raises ConfigError without a `secret`.

    With `ids`, instance ids may follow the keys of clients, and are put there by key.
    """
    keys: dict[str, list[bytes]] = {word: [] for word in words}
    for number, line in enumerate(read_private_file(path, field, mounted=True).splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):  # within a line, # is a character of Z85
            continue
        named = parts[2:] if ids is not None and parts[0] in ("client", "gateway") else []
        wrong = len(parts) != 2 + len(named) or parts[0] not in keys or len(parts[1]) != Z85_CHARS
        if wrong or not all(_ID.fullmatch(one) for one in named):
            shapes = " or ".join(f"`{word} KEY`" for word in words)
            shapes += " (or `client KEY ID …`, with ids as `NAME` or `NAME-*`)" if ids is not None else ""
            raise ConfigError(
                f"{field}: {path}: line {number}: write {shapes} with a Z85 key of {Z85_CHARS} characters",
                field=field,
            )
        keys[parts[0]].append(parts[1].encode())
        if ids is not None and parts[0] != "secret":
            ids[parts[1].encode()] = (*ids.get(parts[1].encode(), ()), *named)
    if not keys["secret"]:
        raise ConfigError(f"{field}: {path}: has no line `secret KEY`", field=field)
    return keys


class KeyFile:
    """The keys of one file. Belongs to the event loop, which also reads a changed file (one line for each member)."""

    def __init__(self, path: str, read: Callable[[str], ClusterKeys]) -> None:
        """`read` raises ConfigError for a wrong file; so does this."""
        self._path = path
        self._read = read
        self._stamp = _stamp(path)
        self._keys = read(path)
        self._log = EventLog("zmq")

    def now(self) -> ClusterKeys:
        """The current keys of the file.

        If the file is missing or wrong, or has another secret, the keys do not change, and that is logged: sockets keep
        the secret with which they were bound.
        """
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return self._keys
        self._stamp = stamp
        try:
            keys = self._read(self._path)
            if keys.secret != self._keys.secret:
                raise ConfigError("its secret has changed; restart to use it")
        except ConfigError as error:
            self._log.repeated(
                logging.WARNING, self._path, "key_file_ignored", path=self._path, why=error.message
            )
        else:
            self._keys = keys
            self._log.info("key_file_read", path=self._path, clients=len(keys.kinds or ()))
        return self._keys


Keys = KeyFile | ClusterKeys
"""Keys, whose `now()` returns their current state."""


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


FILE = "cluster.keys"
TOUCH_S = 5.0
"""Interval at which the file is marked as used, and restored if it is gone."""
ADVICE = "processes of other users or hosts need key files: kvstrata cluster init (docs/cluster.md, Security)"
"""The log's advice for a process that is refused because it does not have the key."""


class SharedKey:
    """The key that all processes of one user share, and its file."""

    def __init__(self, field: str, environment: Mapping[str, str] = os.environ) -> None:
        """Find the file, or make it. Raises ConfigError, which names `field`, the alternative setting of a key file."""
        places = [folder / FILE for folder in shared_run_dirs(environment)]
        self.path = next((path for path in places if _is_there(path)), places[0])
        try:
            make_private_dir(self.path.parent, field)
            self._put(new_secret())
        except OSError as error:
            raise ConfigError(
                f"{field}: no file is given, and the key that this user's processes share cannot be kept in "
                f"{self.path}: {error.strerror}; free space there, or give key files (kvstrata cluster init)",
                field=field,
            ) from None
        try:
            self.keys = read_cluster_keys(str(self.path), field)
        except ConfigError as error:
            raise ConfigError(
                f"{error.message}. It is the key that this user's processes share: you may delete it, and then restart "
                "the controller and all instances, which make another one",
                field=field,
            ) from None
        remember_secret(self.keys.server.decode())

    def touch(self) -> None:
        """Mark the file as used; restore it if it is gone. Raises OSError, ConfigError."""
        try:
            os.utime(self.path, follow_symlinks=False)
        except FileNotFoundError:
            make_private_dir(self.path.parent, FILE)
            self._put(self.keys.secret)

    async def keep(self) -> None:
        """Keep the file until cancelled."""
        loop, log = asyncio.get_running_loop(), EventLog("cluster")
        while True:
            await asyncio.sleep(TOUCH_S)
            try:
                await loop.run_in_executor(None, self.touch)
            except (OSError, ConfigError) as error:
                log.warning("cluster_key_not_kept", path=self.path, reason=error)

    def _put(self, secret: bytes) -> None:
        """Write the file, unless it exists. Raises OSError."""
        if not os.path.lexists(self.path):
            text = f"# shared by the processes of this user; see docs/cluster.md#security\nsecret {secret.decode()}\n"
            with contextlib.suppress(FileExistsError):  # another process was faster
                write_private_file(self.path, text.encode(), overwrite=False)


def _is_there(path: Path) -> bool:
    """Whether the file exists in a folder of ours: another user may have made a folder with this name in /tmp."""
    try:
        check_private_dir(path.parent, FILE)
    except ConfigError:
        return False
    return os.path.lexists(path)


CONTROLLER = "controller"
_FIELD = "FOLDER"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")


class KeyFolder:
    """The key files of one cluster."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.written: list[Path] = []
        """Files written since the object was made."""
        self.missing: list[str] = []
        """Members whose files are not in the folder any more and so were not updated."""

    def make(self, names: Iterable[str], gateways: Iterable[str] = (), *, overwrite: bool) -> None:
        """Make keys for a controller, these instances and these gateways. Raises ConfigError."""
        kinds = _kinds(names, gateways)
        found = [path for path in map(self._path, (CONTROLLER, *kinds)) if path.exists()]
        if found and not overwrite:
            raise ConfigError(
                f"{_FIELD}: {found[0]} exists already; give another folder, use `kvstrata cluster add` for more "
                "members, or replace all keys with --overwrite",
                field=_FIELD,
            )
        make_private_dir(self.folder, _FIELD)
        self._write_all(new_secret(), {name: new_secret() for name in kinds}, {}, kinds)

    def add(self, names: Iterable[str], gateways: Iterable[str] = (), *, overwrite: bool) -> None:
        """Make keys for more members; with `overwrite` also for members that have one. Raises ConfigError."""
        fresh_kinds = _kinds(names, gateways)
        controller, public, kinds = self._read()
        known = [name for name in fresh_kinds if name in public]
        if known and not overwrite:
            raise ConfigError(
                f"NAME: {known[0]} has a key already; give another name, or replace its key with --overwrite",
                field="NAME",
            )
        fresh = {name: new_secret() for name in fresh_kinds}
        kept = {name: key for name, key in public.items() if name not in fresh}
        self._write_all(controller, fresh, kept, kinds | fresh_kinds)

    def remove(self, names: Iterable[str]) -> None:
        """Remove members: delete their keys from all files, and their own files. Raises ConfigError."""
        names = _checked(names)
        controller, public, kinds = self._read()
        for name in names:
            if name not in public:
                raise ConfigError(
                    f"NAME: {name} is not a member; members: {', '.join(sorted(public)) or 'none'}",
                    field="NAME",
                )
        left = {name: key for name, key in public.items() if name not in names}
        if not left:
            raise ConfigError("NAME: no member would be left; delete the folder instead", field="NAME")
        self._write_all(controller, {}, left, kinds)
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def use_of(self, path: Path) -> str:
        """The process that reads a written file, and the setting that names it."""
        if path.stem == CONTROLLER:
            return "lmcache-controller --curve-secret-file"
        is_gateway = self._read()[2].get(path.stem) is KeyKind.GATEWAY
        return (
            "lmcache-gateway controllers.curve_file" if is_gateway else "lmcache-server --cluster-curve-file"
        )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.keys"

    def _read(self) -> tuple[bytes, dict[str, bytes], dict[str, KeyKind]]:
        """The controller's secret, and the members' public keys and kinds. Raises ConfigError."""
        path = self._path(CONTROLLER)
        keys = read_controller_keys(str(path), _FIELD)
        public: dict[str, bytes] = {}
        kinds: dict[str, KeyKind] = {}
        for key, ids in (keys.listed or {}).items():
            if not ids:
                raise ConfigError(
                    f"{_FIELD}: {path}: the line `client {key}` names no member; write the member's name after the key",
                    field=_FIELD,
                )
            name = ids[0].removesuffix("-*")
            public[name] = key.encode()
            kinds[name] = min(keys.kinds_of(key))
        return keys.secret, public, kinds

    def _write_all(
        self,
        controller: bytes,
        fresh: dict[str, bytes],
        kept: dict[str, bytes],
        kinds: Mapping[str, KeyKind],
    ) -> None:
        """Write the files of the controller and the members: `fresh` have new secrets, `kept` these public keys."""
        public = {**kept, **{name: public_of(secret) for name, secret in fresh.items()}}
        words = {name: "gateway" if kinds[name] is KeyKind.GATEWAY else "client" for name in public}
        lines = [f"{words[name]} {key.decode()} {name} {name}-*" for name, key in sorted(public.items())]
        self._write(CONTROLLER, "security.curve_secret_file of a controller", controller, lines)
        others = [f"{words[name]} {key.decode()}" for name, key in sorted(public.items())]
        lines = [f"server {public_of(controller).decode()}", *others]
        for name in sorted(public):
            secret = fresh.get(name)
            if secret is None and not self._path(name).exists():
                self.missing.append(name)
                continue
            if secret is None:
                secret = read_cluster_keys(str(self._path(name)), _FIELD).secret
            setting = "controllers" if kinds[name] is KeyKind.GATEWAY else "controller"
            self._write(name, f"{setting}.curve_file of {name}", secret, lines)

    def _write(self, name: str, use: str, secret: bytes, lines: list[str]) -> None:
        path = self._path(name)
        text = "\n".join((f"# {use}", f"secret {secret.decode()}", *lines, ""))
        try:
            write_private_file(path, text.encode(), overwrite=True)
        except OSError as error:
            raise ConfigError(f"{_FIELD}: {path} cannot be written: {error.strerror}", field=_FIELD) from None
        self.written.append(path)


def _kinds(names: Iterable[str], gateways: Iterable[str]) -> dict[str, KeyKind]:
    """Kinds by checked names. Raises ConfigError."""
    instances, others = _checked(names), _checked(gateways)
    if not instances and not others:
        raise ConfigError("NAME: must name at least one instance's host or --gateway", field="NAME")
    for name in others:
        if name in instances:
            raise ConfigError(
                f"NAME: {name} is both an instance and a gateway; give each its own name", field="NAME"
            )
    return {
        **dict.fromkeys(instances, KeyKind.INSTANCE),
        **dict.fromkeys(others, KeyKind.GATEWAY),
    }


def _checked(names: Iterable[str]) -> list[str]:
    """The names, each once. Raises ConfigError."""
    names = list(dict.fromkeys(names))
    for name in names:
        if not _NAME.fullmatch(name) or name == CONTROLLER:
            raise ConfigError(
                f"NAME: {name!r:.80}: must be 1 to 62 letters, digits, '.', '_' or '-', the first a letter or digit, "
                f"and not {CONTROLLER!r}",
                field="NAME",
            )
    return names
