"""Real Redis servers on free ports: alone, as a cluster, watched by a sentinel, or behind TLS.

The program is the one on PATH, or Debian's, unpacked into the cache folder. The caller owns the servers' folders.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.harness.daemon import Daemon
from tests.tools import fetch_debian

CLUSTER_S = 120.0
PACKAGES = ("redis-server", "redis-tools")
"""redis-server's program is a link into redis-tools, so both are fetched. A machine may have redis-tools alone."""
SLOTS = 1 << 14


def ensure() -> tuple[str, dict[str, str]]:
    """Return the program and the environment variables it needs. Raises Unavailable."""
    return fetch_debian.program("redis-server", PACKAGES)


class RedisServer(Daemon):
    """One server, whose ports stay the same over restarts; it writes no data to disk unless `flags` say so.

    With `tls`, a folder of `certificates`, the port speaks TLS only.
    """

    def __init__(self, folder: Path, *flags: str, tls: Path | None = None, password: str = "") -> None:
        self.folder = folder
        self.tls = tls
        self.password = password
        self._flags = flags
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "redis.log", 2)

    @property
    def bus_port(self) -> int:
        """The port for the other nodes of a cluster."""
        return self.ports[1]

    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        program, environment = ensure()
        return [program, *self._arguments()], environment

    def _arguments(self) -> list[str]:
        command = [
            *("--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""),
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

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        return True

    def client(self) -> redis.Redis:
        tls = {} if self.tls is None else {"ssl": True, "ssl_ca_certs": str(self.tls / "ca.crt")}
        # No retries: `start` asks again by itself.
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        return redis.Redis(
            "127.0.0.1",
            self.port,
            password=self.password or None,
            socket_timeout=self.ready_s,
            retry=retry,
            **tls,
        )

    def entry(self, **more: Any) -> dict[str, Any]:
        tls = {} if self.tls is None else {"tls_enable": True, "tls_ca_file": str(self.tls / "ca.crt")}
        password = {"password": self.password} if self.password else {}
        return {"type": "resp", "host": "127.0.0.1", "port": self.port, **tls, **password, **more}


class Sentinel(RedisServer):
    """A sentinel that watches `master` under the name `mymaster`; its vote alone decides a failover."""

    def __init__(self, folder: Path, master: RedisServer, password: str) -> None:
        self._master = master
        super().__init__(folder, password=password)

    def _arguments(self) -> list[str]:
        configuration = self.folder / "sentinel.conf"
        configuration.write_text(
            f"bind 127.0.0.1\nport {self.port}\ndir {self.folder}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self._master.port} 1\n"
            "sentinel down-after-milliseconds mymaster 300\nsentinel failover-timeout mymaster 2000\n"
            f"sentinel auth-pass mymaster {self._master.password}\nrequirepass {self.password}\n"
        )
        return [str(configuration), "--sentinel"]


@contextlib.contextmanager
def cluster(folder: Path, count: int = 3) -> Iterator[list[RedisServer]]:
    """Run a cluster of `count` masters without replicas until the end of the block."""
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
        deadline_s = time.monotonic() + CLUSTER_S
        while not all(_is_whole(client, count) for client in clients):
            assert time.monotonic() < deadline_s, "the cluster's nodes do not agree on its slots"
            time.sleep(0.02)
        yield nodes


def _is_whole(client: redis.Redis, count: int) -> bool:
    state = client.execute_command("CLUSTER INFO")
    return state["cluster_state"] == "ok" and int(state["cluster_size"]) == count


def certificates(folder: Path) -> Path:
    """Write a new ca.crt, and server.crt and server.key for 127.0.0.1, into `folder`; return the folder."""
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
