"""Real Redis servers on free ports: alone, as a cluster, watched by a sentinel, or behind TLS.

Debian's `redis-server`, unpacked into the cache folder, or the one in PATH. The caller owns the folders they live in.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.harness import fetch_debian

READY_S = 30.0
PORT_ATTEMPTS = 5
PACKAGE = "redis-server"
SLOTS = 1 << 14


class Unavailable(Exception):
    """There is no Redis here; the message says why and which line installs it."""


def ensure() -> tuple[str, dict[str, str]]:
    """The program and the variables it needs. Raises Unavailable."""
    try:
        root = fetch_debian.ensure([PACKAGE])
        return str(root / "usr/bin/redis-server"), fetch_debian.environment(root)
    except fetch_debian.Unavailable as error:
        installed = shutil.which("redis-server")
        if installed is None:
            raise Unavailable(str(error)) from None
        return installed, dict(os.environ)


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One server, whose ports stay the same over restarts; it keeps nothing unless `flags` say so.

    `tls`: a folder of `certificates`; then the port speaks TLS only.
    """

    def __init__(self, folder: Path, *flags: str, tls: Path | None = None, password: str = "") -> None:
        self.folder = folder
        self.log = folder / "redis.log"
        self.tls = tls
        self.password = password
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(PORT_ATTEMPTS):
            self.port, self.bus_port = free_port(), free_port()
            try:
                self.start()
                return
            except Unavailable:  # somebody else took a port meanwhile
                if attempt == PORT_ATTEMPTS - 1:
                    raise

    def _command(self, program: str) -> list[str]:
        command = [
            *(program, "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""),
            *("--cluster-port", str(self.bus_port), "--repl-diskless-sync-delay", "0"),
        ]
        if self.password:
            command += ["--requirepass", self.password, "--masterauth", self.password]
        if self.tls is None:
            return [*command, "--port", str(self.port), *self._flags]
        return [
            *(*command, "--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"),
            *(
                "--tls-cert-file",
                str(self.tls / "server.crt"),
                "--tls-key-file",
                str(self.tls / "server.key"),
            ),
            *("--tls-ca-cert-file", str(self.tls / "ca.crt"), *self._flags),
        ]

    def start(self) -> None:
        """Start it (again) and wait until it answers. Raises Unavailable when it ends instead."""
        program, environment = ensure()
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command(program),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError), self.client() as client:
                client.ping()
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise Unavailable(
                    f"redis-server did not start:\n{self.log.read_text(errors='replace')[-4000:]}"
                )
            time.sleep(0.01)

    def client(self) -> redis.Redis:
        """Another client than ours. The caller closes it."""
        tls = {} if self.tls is None else {"ssl": True, "ssl_ca_certs": str(self.tls / "ca.crt")}
        # Without retries: `start` is in a hurry.
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        return redis.Redis(
            "127.0.0.1",
            self.port,
            password=self.password or None,
            socket_timeout=READY_S,
            retry=retry,
            **tls,
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def entry(self, **more: Any) -> dict[str, Any]:
        """An adapter's entry for it."""
        tls = {} if self.tls is None else {"tls_enable": True, "tls_ca_file": str(self.tls / "ca.crt")}
        password = {"password": self.password} if self.password else {}
        return {"type": "resp", "host": "127.0.0.1", "port": self.port, **tls, **password, **more}

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Idempotent."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Sentinel(RedisServer):
    """A sentinel that watches `master` under the name `mymaster` and decides alone."""

    def __init__(self, folder: Path, master: RedisServer) -> None:
        self._master = master
        super().__init__(folder)

    def _command(self, program: str) -> list[str]:
        configuration = self.folder / "sentinel.conf"
        configuration.write_text(
            f"bind 127.0.0.1\nport {self.port}\ndir {self.folder}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self._master.port} 1\n"
            "sentinel down-after-milliseconds mymaster 300\nsentinel failover-timeout mymaster 2000\n"
        )
        return [program, str(configuration), "--sentinel"]


@contextlib.contextmanager
def cluster(folder: Path, count: int = 3) -> Iterator[list[RedisServer]]:
    """Masters that share the slots, without replicas."""
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(RedisServer(folder / f"node{i}", *flags)) for i in range(count)]
        clients = [stack.enter_context(node.client()) for node in nodes]
        for i, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            first, end = SLOTS * i // count, SLOTS * (i + 1) // count
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node in nodes[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)
        deadline_s = time.monotonic() + READY_S
        while not all(_is_whole(client, count) for client in clients):
            assert time.monotonic() < deadline_s, "the cluster does not come together"
            time.sleep(0.02)
        yield nodes


def _is_whole(client: redis.Redis, count: int) -> bool:
    state = client.execute_command("CLUSTER INFO")
    return state["cluster_state"] == "ok" and int(state["cluster_size"]) == count


def certificates(folder: Path) -> Path:
    """`folder` with ca.crt, and server.crt and server.key for 127.0.0.1, made anew."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        subject, issuer = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, who)]) for who in (name, "test CA")
        )
        builder = x509.CertificateBuilder(
            issuer, subject, key.public_key(), x509.random_serial_number(),
            now - datetime.timedelta(days=1), now + datetime.timedelta(days=1),
        )  # fmt: skip
        signed = builder.add_extension(extension, critical=False).sign(ca_key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / "ca.crt").write_bytes(
        certificate("test CA", ca_key, x509.BasicConstraints(ca=True, path_length=None))
    )
    (folder / "server.crt").write_bytes(certificate("server", server_key, address))
    (folder / "server.key").write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return folder
