"""The folder in which an administrator keeps the CURVE keys of a cluster; processes only read copies of its files.

    controller.keys     for every controller (`security.curve_secret_file`): its secret, and each member's key and ids
    NAME.keys           for one member (`controller.curve_file`): its secret, and the controller's and all members' keys

Each member has a key of its own, and may register only as NAME or NAME-…, as the default ids of its instances begin if
NAME is its host's name.  All files have mode 0600, and no existing key is replaced unless that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvstrata.config.private_dir import make_private_dir
from kvstrata.config.private_file import write_private_file
from kvstrata.errors import ConfigError
from kvstrata.rpc.zmq_curve import new_secret, public_of, read_cluster_keys, read_controller_keys

CONTROLLER = "controller"
_FIELD = "FOLDER"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")


class KeyFolder:
    """The key files of one cluster."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.written: list[Path] = []
        """Files that were written since the object was made."""
        self.missing: list[str] = []
        """Members whose files are not in the folder any more, and so were not brought up to date."""

    def make(self, names: Iterable[str], *, overwrite: bool) -> None:
        """Make keys for a controller and these members. Raises ConfigError."""
        names = _checked(names)
        found = [path for path in map(self._path, (CONTROLLER, *names)) if path.exists()]
        if found and not overwrite:
            raise ConfigError(
                f"{_FIELD}: {found[0]} exists already; give another folder, use `kvstrata cluster add` for more "
                "members, or replace all keys with --overwrite",
                field=_FIELD,
            )
        make_private_dir(self.folder, _FIELD)
        self._write_all(new_secret(), {name: new_secret() for name in names}, {})

    def add(self, names: Iterable[str], *, overwrite: bool) -> None:
        """Make keys for more members; with `overwrite` also for members that have one. Raises ConfigError."""
        names = _checked(names)
        controller, public = self._read()
        known = [name for name in names if name in public]
        if known and not overwrite:
            raise ConfigError(
                f"NAME: {known[0]} has a key already; give another name, or replace its key with --overwrite",
                field="NAME",
            )
        fresh = {name: new_secret() for name in names}
        self._write_all(controller, fresh, {name: key for name, key in public.items() if name not in fresh})

    def remove(self, names: Iterable[str]) -> None:
        """Shut members out: their keys leave all files, and their own files are deleted. Raises ConfigError."""
        names = _checked(names)
        controller, public = self._read()
        for name in names:
            if name not in public:
                raise ConfigError(
                    f"NAME: {name} is no member; members are {', '.join(sorted(public)) or 'none'}",
                    field="NAME",
                )
        left = {name: key for name, key in public.items() if name not in names}
        if not left:
            raise ConfigError("NAME: no member would be left; delete the folder instead", field="NAME")
        self._write_all(controller, {}, left)
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.keys"

    def _read(self) -> tuple[bytes, dict[str, bytes]]:
        """The controller's secret, and the members' public keys. Raises ConfigError."""
        path = self._path(CONTROLLER)
        keys = read_controller_keys(str(path), _FIELD)
        public: dict[str, bytes] = {}
        for key, ids in keys.listed.items():
            if not ids:
                raise ConfigError(
                    f"{_FIELD}: {path}: the line `client {key}` names no member; write the member's name after the key",
                    field=_FIELD,
                )
            public[ids[0].removesuffix("-*")] = key.encode()
        return keys.curve.secret, public

    def _write_all(self, controller: bytes, fresh: dict[str, bytes], kept: dict[str, bytes]) -> None:
        """Write the controller's file, and the members': `fresh` by new secrets, `kept` have these public keys."""
        public = {**kept, **{name: public_of(secret) for name, secret in fresh.items()}}
        lines = [f"client {key.decode()} {name} {name}-*" for name, key in sorted(public.items())]
        self._write(CONTROLLER, "security.curve_secret_file of a controller", controller, lines)
        others = [f"client {key.decode()}" for _, key in sorted(public.items())]
        lines = [f"server {public_of(controller).decode()}", *others]
        for name in sorted(public):
            secret = fresh.get(name)
            if secret is None and not self._path(name).exists():
                self.missing.append(name)
                continue
            if secret is None:
                secret = read_cluster_keys(str(self._path(name)), _FIELD).secret
            self._write(name, f"controller.curve_file of {name}", secret, lines)

    def _write(self, name: str, use: str, secret: bytes, lines: list[str]) -> None:
        path = self._path(name)
        text = "\n".join((f"# {use}", f"secret {secret.decode()}", *lines, ""))
        try:
            write_private_file(path, text.encode(), overwrite=True)
        except OSError as error:
            raise ConfigError(f"{_FIELD}: {path} cannot be written: {error.strerror}", field=_FIELD) from None
        self.written.append(path)


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
