"""Command-line flags of `lmcache-server` and `lmcache-controller`: our own flags, and the treatment of LMCache's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.config.lmcache_names import FLAG_PREFIXES, SERVER_FLAGS, Fate, Name, find
from kvstrata.config.load import put
from kvstrata.config.nearest import nearest
from kvstrata.config.secrets import secrets_in
from kvstrata.errors import ConfigError


class Flags(NamedTuple):
    """A parsed command line: `settings` nested as in the file, `notes` for the log."""

    config_file: str
    settings: dict[str, Any]
    notes: list[str]
    check: bool
    ready_fd: int
    exposed: list[str]
    """Settings with secrets that were given on the command line, where every user of the machine can read them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"command line: {message}")


def server_parser() -> argparse.ArgumentParser:
    """The parser of our own flags and the kept flags of LMCache. A flag that is not given is not in the namespace."""
    parser = _Parser(
        prog="lmcache-server",
        description="KV-cache server for LLM inference. Without flags it runs on embedded defaults.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file with any of the settings in docs/configuration.md")
    add("--instance-id", dest="instance_id", help="name of this instance (default: host name and port)")
    add(
        "--host",
        dest="host",
        help="address of the RPC port (localhost); if neither --host nor --port is given, RPC uses no tcp port",
    )
    add("--port", dest="port", type=int, help="RPC port (5555)")
    add("--socket-dir", dest="socket_dir", metavar="DIR", help="directory of the local sockets")
    add("--chunk-size", dest="chunk_size", type=int, metavar="TOKENS", help="tokens in a chunk (256)")
    add(
        "--l1-size-gb",
        dest="l1.size_gb",
        type=float,
        metavar="GB",
        help="shared memory for KV (4, or what fits)",
    )
    add("--l1-use-hugepages", dest="l1.use_hugepages", action="store_true", help="L1 in pages of 2 MiB")
    add("--l1-numa", dest="l1.numa", metavar="NODES",
        help="NUMA nodes of L1: default, interleave, gpu, or a list like 0,2 or 0-1 (default)")  # fmt: skip
    add("--eviction-policy", dest="l1.eviction_policy", metavar="NAME", help="LRU, ARC, S3FIFO or noop (LRU)")
    add("--eviction-trigger-watermark", dest="l1.eviction_trigger_watermark", type=float, metavar="SHARE",
        help="occupancy above which eviction starts ahead of need (0.8)")  # fmt: skip
    add("--eviction-ratio", dest="l1.eviction_ratio", type=float, metavar="SHARE",
        help="share of the pool that one such eviction frees (0.2)")  # fmt: skip
    add("--l2-adapter", dest="l2_adapters", action="append", metavar="JSON",
        help='an L2 adapter, nearest first, repeatable: \'{"type": "disk", "base_path": "/data/kv", '
        '"capacity_gb": 200}\'; `none` for no L2')  # fmt: skip
    add("--l2-prefetch-max-in-flight", dest="l2.prefetch_max_in_flight", type=int, metavar="COUNT",
        help="lookups that may load from one L2 adapter at the same time (8)")  # fmt: skip
    add("--http-host", dest="http.host", help="address of the admin HTTP port (127.0.0.1), or unix:PATH")
    add("--http-port", dest="http.port", type=int, help="admin HTTP port (8080)")
    add("--no-http", dest="http.enabled", action="store_false", help="no admin HTTP port")
    add("--controller-url", dest="controller.url", metavar="URL",
        help="reply port of the cluster's controller, as tcp://HOST:8400")  # fmt: skip
    add("--cluster-curve-file", dest="controller.curve_file", metavar="FILE",
        help="CURVE keys of a member of the cluster")  # fmt: skip
    add("--p2p-engine", dest="p2p.engine", metavar="NAME", help="auto, ucx, nixl or off (auto)")
    add(
        "--p2p-listen",
        dest="p2p.listen",
        metavar="HOST:PORT",
        help="address on which peers are answered (localhost:0)",
    )
    add(
        "--p2p-advertise",
        dest="p2p.advertise",
        metavar="HOST[:PORT]",
        help="address at which peers reach --p2p-listen (the same)",
    )
    add("--zone", dest="p2p.zone", metavar="NAME", help="instances of one zone are near each other")
    _add_common(parser)
    return parser


def controller_parser() -> argparse.ArgumentParser:
    """The parser of the controller's flags. A flag that is not given is absent from the namespace."""
    parser = _Parser(
        prog="lmcache-controller",
        description="Knows which instance of a cluster holds which chunk. Without flags it listens on this host only.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file with any of the settings in docs/configuration.md")
    add("--name", dest="name", help="name of this controller (default: host name and reply port)")
    add(
        *("--host", "--http-host"),
        dest="http.host",
        help="address of all ports (localhost); unix:PATH puts the HTTP port on a unix socket, and leaves the others "
        "at --monitor-host",
    )
    add("--port", dest="http.port", type=int, help="HTTP port (9000)")
    add("--monitor-host", dest="monitor_host", help="address of the ZMQ ports (that of --host)")
    add("--monitor-ports", dest="monitor_ports", type=_json_object, metavar="JSON",
        help='ZMQ ports: \'{"pull": 8300, "reply": 8400, "heartbeat": 8082}\'')  # fmt: skip
    add("--heartbeat-s", dest="heartbeat_s", type=float, metavar="S", help="time between two heartbeats (10)")
    add("--dead-after-s", dest="dead_after_s", type=float, metavar="S",
        help="silence after which an instance is dead (30)")  # fmt: skip
    add("--snapshot-dir", dest="directory.snapshot_dir", metavar="DIR",
        help="folder of the directory's snapshot; `none`: take no snapshots")  # fmt: skip
    add(
        "--token-file",
        dest="http.token_file",
        metavar="FILE",
        help="file with the bearer token of the HTTP port",
    )
    add("--etcd", dest="etcd.endpoints", action="append", metavar="HOST:PORT",
        help="an etcd server, with https:// before it for TLS; repeatable")  # fmt: skip
    add("--advertise-url", dest="etcd.advertise_url", metavar="URL",
        help="URL at which other controllers and users reach this controller's HTTP API")  # fmt: skip
    _add_common(parser)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Flags that the server and the controller share."""
    add = parser.add_argument
    add("--curve-secret-file", dest="security.curve_secret_file", metavar="FILE",
        help="file with the CURVE key of the ZMQ ports")  # fmt: skip
    add(
        "--insecure",
        dest="security.insecure",
        action="store_true",
        help="open ports that lack a key or token to everybody",
    )
    add("--log-level", dest="log_level", help="debug, info, warning or error (info)")
    add("--log-format", dest="log_format", help="text, or json for one object a line (text)")
    add("--check", action="store_true", help="check the settings, print them and exit")
    add("--no-supervise", dest="no_supervise", action="store_true",
        help="run without the parent process that restarts the server, as for systemd")  # fmt: skip
    add("--ready-fd", type=int, metavar="FD", help="write one line to this descriptor when ready")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}: {text!r:.200}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {text!r:.200}")
    return value


def parse_server_flags(arguments: Sequence[str]) -> Flags:
    """Parse the server's command line. Raises ConfigError for unknown, refused and malformed flags."""
    return _parse(server_parser(), arguments, SERVER_FLAGS, FLAG_PREFIXES)


def parse_controller_flags(arguments: Sequence[str]) -> Flags:
    """Parse the controller's command line. Raises ConfigError for unknown and malformed flags."""
    return _parse(controller_parser(), arguments, {}, {})


def _parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    theirs: Mapping[str, Name],
    prefixes: Mapping[str, Name],
) -> Flags:
    known = {option for action in parser._actions for option in action.option_strings}
    ours, notes = _sort_out(arguments, known, theirs, prefixes)
    parsed = vars(parser.parse_args(ours))
    settings: dict[str, Any] = {}
    exposed: list[str] = []
    for name, value in parsed.items():
        if name == "l2_adapters":
            settings[name] = adapters_from_json(value)
            exposed = [
                f"l2_adapters[{i}].{field}"
                for i, adapter in enumerate(settings[name])
                for field in secrets_in(adapter)
            ]
        elif name not in ("config", "check", "ready_fd", "no_supervise"):
            put(settings, name, value)
    return Flags(
        parsed.get("config", ""),
        settings,
        notes,
        parsed.get("check", False),
        parsed.get("ready_fd", -1),
        exposed,
    )


def adapters_from_json(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The adapters of repeated --l2-adapter flags; the single word `none` is an empty list. Raises ConfigError."""
    if list(texts) == ["none"]:
        return []
    adapters = []
    for index, text in enumerate(texts):
        where = f"l2_adapters[{index}]"
        try:
            adapter = json.loads(text)
        except json.JSONDecodeError as error:
            # The text itself is not shown: it may hold a password.
            raise ConfigError(f"--l2-adapter: {where}: not JSON: {error}", field=where) from None
        if not isinstance(adapter, dict):
            raise ConfigError(
                f'--l2-adapter: {where}: must be a JSON object with a "type", found {type(adapter).__name__}',
                field=where,
            )
        adapters.append(adapter)
    return adapters


def _sort_out(
    arguments: Sequence[str], known: set[str], theirs: Mapping[str, Name], prefixes: Mapping[str, Name]
) -> tuple[list[str], list[str]]:
    """Split LMCache's flags off the command line; returns our own arguments, and notes for flags without effect.

    Raises ConfigError for LMCache's other flags, and for unknown flags.
    """
    ours: list[str] = []
    notes: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.partition("=")
        if not name.startswith("--") or name in known:
            ours.append(argument)
            if name in known and not equals and rest and name not in _SWITCHES:
                ours.append(rest.pop(0))
            continue
        entry = find(name, theirs, prefixes)
        if entry is None:
            raise ConfigError(
                f"command line: {name}: unknown flag{nearest(name, [*known, *theirs])}", field=name
            )
        if entry.fate is Fate.REFUSED:
            raise ConfigError(f"command line: {name}: {entry.say}", field=name)
        if entry.fate is Fate.REPLACED:
            new = f" (set {entry.target})" if entry.target else ""
            raise ConfigError(f"command line: {name}: {entry.say}{new}", field=name)
        notes.append(f"{name} has no effect: {entry.say}")
        if not equals and rest and not rest[0].startswith("--"):
            rest.pop(0)
    return ours, notes


_SWITCHES = {"--check", "--insecure", "--l1-use-hugepages", "--no-http", "--no-supervise", "--help", "-h"}
