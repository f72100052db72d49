"""Command-line flags of server, controller and gateway: our own flags, and the treatment of LMCache's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata import __version__
from kvstrata.config.lmcache.fates import Fate, Name, find, hint
from kvstrata.config.lmcache.flags import BUFFER_ONLY, CONTROLLER_FLAGS, FLAG_PREFIXES, SERVER_FLAGS
from kvstrata.config.lmcache.migration import entry_of_ours
from kvstrata.config.load import put
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
    names: dict[str, str]
    """The flag of each setting that has one."""
    wrong: list[ConfigError]
    """What is wrong, besides values: unknown and refused flags, and flags without their value."""


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
    add("--config", metavar="FILE", help="YAML file with any of the settings in docs/configuration.md (none)")
    add("--instance-id", dest="instance_id", help="name of this instance (default: host name and port)")
    add("--port", dest="port", type=_number, help="number after which sockets and pool are named (5555)")
    add(
        "--socket-dir",
        dest="socket_dir",
        metavar="DIR",
        help="directory of the local sockets (below XDG_RUNTIME_DIR, else /tmp)",
    )
    add("--chunk-size", dest="chunk_size", type=_number, metavar="TOKENS", help="tokens in a chunk (256)")
    add(
        "--l1-size-gb",
        dest="l1.size_gb",
        type=_number,
        metavar="GB",
        help="shared memory for KV (4, or what fits)",
    )
    add(
        "--l1-use-hugepages",
        dest="l1.use_hugepages",
        action=argparse.BooleanOptionalAction,
        help="L1 in pages of 2 MiB",
    )
    add("--l1-numa", dest="l1.numa", metavar="NODE",
        help="NUMA nodes of L1: default, interleave, or the number of a node (default)")  # fmt: skip
    add("--no-recut", dest="l1.recut", action="store_false",
        help="use no chunk of engines with other parallel sizes, block sizes or orders of axes")  # fmt: skip
    add("--forget-on-exit", dest="l1.forget_on_exit", action="store_true",
        help="remove the pool from shared memory at a clean exit; otherwise the next server adopts it")  # fmt: skip
    add("--eviction-policy", dest="l1.eviction_policy", metavar="NAME", help="LRU, ARC, S3FIFO or noop (LRU)")
    add("--eviction-trigger-watermark", dest="l1.eviction_trigger_watermark", type=_number, metavar="SHARE",
        help="occupancy above which eviction starts ahead of need (0.8)")  # fmt: skip
    add("--eviction-ratio", dest="l1.eviction_ratio", type=_number, metavar="SHARE",
        help="share of the pool that one such eviction frees (0.2)")  # fmt: skip
    add("--l2-adapter", dest="l2_adapters", action="append", metavar="JSON",
        help='an L2 adapter, nearest first, repeatable: \'{"type": "disk", "base_path": "/data/kv", '
        '"capacity_gb": 200}\'; `none` for no L2 (a disk tier in the cache folder)')  # fmt: skip
    add("--http-host", dest="http.host", help="address of the admin HTTP port (127.0.0.1), or unix:PATH")
    add("--http-port", dest="http.port", type=_number, help="admin HTTP port (8080)")
    add("--no-http", dest="http.enabled", action="store_false", help="no admin HTTP port")
    add("--controller-url", dest="controller.url", metavar="URL",
        help="reply port of the cluster's controller, as tcp://HOST:8400 (no cluster)")  # fmt: skip
    add("--cluster-curve-file", dest="controller.curve_file", metavar="FILE",
        help="CURVE keys of a member of the cluster (none)")  # fmt: skip
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
    add("--p2p-tcp", dest="p2p.tcp", action="store_true",
        help="let UCX use tcp; whoever reaches its ports can read and write this process's memory")  # fmt: skip
    add("--p2p-mac", dest="p2p.mac", action="store_true",
        help="read from peers only records with their MAC; all instances must use the flag")  # fmt: skip
    add("--zone", dest="p2p.zone", metavar="NAME", help="instances of one zone are near each other (none)")
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
    add("--config", metavar="FILE", help="YAML file with any of the settings in docs/configuration.md (none)")
    add("--name", dest="name", help="name of this controller (default: host name and reply port)")
    add(
        *("--host", "--http-host"),
        dest="http.host",
        help="address of all ports (localhost); unix:PATH puts the HTTP port on a unix socket, and leaves the others "
        "at --monitor-host",
    )
    add("--port", dest="http.port", type=_number, help="HTTP port (9000)")
    add("--monitor-host", dest="monitor_host", help="address of the ZMQ ports (that of --host)")
    add("--monitor-ports", dest="monitor_ports", type=_json_object, metavar="JSON",
        help='ZMQ ports: \'{"pull": 8300, "reply": 8400, "heartbeat": 8082}\' (these)')  # fmt: skip
    add(
        "--heartbeat-s",
        dest="heartbeat_s",
        type=_number,
        metavar="S",
        help="time between two heartbeats (10)",
    )
    add("--dead-after-s", dest="dead_after_s", type=_number, metavar="S",
        help="silence after which an instance is dead (30)")  # fmt: skip
    add("--snapshot-dir", dest="directory.snapshot_dir", metavar="DIR",
        help="folder of the directory's snapshot; `none`: without one (below the user's state folder)")  # fmt: skip
    add(
        "--token-file",
        dest="http.token_file",
        metavar="FILE",
        help="file with the bearer token of the HTTP port (one that the process makes)",
    )
    add("--curve-secret-file", dest="security.curve_secret_file", metavar="FILE",
        help="file with the CURVE key of the ZMQ ports (none)")  # fmt: skip
    add("--etcd", dest="etcd.endpoints", action="append", metavar="HOST:PORT",
        help="an etcd server, with https:// before it for TLS; repeatable (none)")  # fmt: skip
    add("--advertise-url", dest="etcd.advertise_url", metavar="URL",
        help="URL at which other controllers and users reach this controller's HTTP API (none)")  # fmt: skip
    _add_common(parser)
    return parser


def gateway_parser() -> argparse.ArgumentParser:
    """The parser of the gateway's flags. A flag that is not given is absent from the namespace."""
    parser = _Parser(
        prog="lmcache-gateway",
        description="An OpenAI-compatible proxy that sends each request to one of several engines.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file with any of the settings in docs/configuration.md (none)")
    add("--engine", dest="engines", action="append", metavar="URL",
        help="an engine: http://HOST:PORT; dns+http://NAME:PORT: all of NAME; repeatable (this host's)")  # fmt: skip
    add("--host", dest="http.host", help="address to listen on (127.0.0.1), or unix:PATH")
    add("--port", dest="http.port", type=_number, help="port (8090)")
    add("--policy", dest="policy", metavar="NAME",
        help="how an engine is chosen: ttft, least_loaded, round_robin or session (least_loaded)")  # fmt: skip
    add("--token-file", dest="http.token_file", metavar="FILE",
        help="file with the bearer token of operators (one that the process makes)")  # fmt: skip
    add("--picker", dest="picker.enabled", action="store_true",
        help="answer Envoy's questions for an engine on a gRPC port as well")  # fmt: skip
    add("--picker-port", dest="picker.port", type=_number, help="that port (9002)")
    add("--drain-s", dest="drain_s", type=_number, metavar="S", help="time for requests at a stop (30)")
    add("--insecure", dest="insecure", action="store_true",
        help="serve clients without keys on addresses that other machines reach")  # fmt: skip
    _add_process(parser)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Flags that the server and the controller share."""
    add = parser.add_argument
    add(
        "--insecure",
        dest="security.insecure",
        action="store_true",
        help="open ports that lack a key or token to everybody",
    )
    _add_process(parser)


def _add_process(parser: argparse.ArgumentParser) -> None:
    """Flags that all long-running processes share."""
    add = parser.add_argument
    add("--log-level", dest="log_level", help="debug, info, warning or error (info)")
    add("--log-format", dest="log_format", help="text, or json for one object a line (text)")
    add("--check", action="store_true", help="check the settings, print them and exit")
    add("--no-supervise", dest="no_supervise", action="store_true",
        help="run without the parent process that restarts this one, as for systemd")  # fmt: skip
    add(
        "--version",
        action="version",
        version=f"{parser.prog} {__version__}",
        help="print the version and exit",
    )
    add("--ready-fd", type=int, metavar="FD", help="write one line to this descriptor when ready (none)")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}: {text!r:.200}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {text!r:.200}")
    return value


def _number(text: str) -> int | float | str:
    """The number, or else the text itself, about which the setting complains together with all others."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parse_server_flags(arguments: Sequence[str]) -> Flags:
    """Parse the server's command line. Raises nothing: `wrong` of the answer is for `load`."""
    flags = _parse(server_parser(), arguments, SERVER_FLAGS, FLAG_PREFIXES)
    l1 = flags.settings.get("l1", {})
    policy = str(l1.get("eviction_policy")).lower()
    if policy == "isolatedlru":
        l1["eviction_policy"] = "LRU"
        flags.notes.append(
            "--eviction-policy IsolatedLRU is taken as LRU: `kvstrata ctl quota` and quotas_gb say how much of L1 a "
            "tenant may have; a tenant without a quota shares L1 with all others, where LMCache keeps nothing of it"
        )
    elif policy == "noop" and any(word.rpartition("=")[2] == BUFFER_ONLY for word in arguments):
        l1["eviction_policy"] = "LRU"
        flags.notes.append(
            f"--eviction-policy noop with --l2-store-policy {BUFFER_ONLY} is taken as LRU: nothing is put to L2 twice, "
            "and stores are never refused because L1 is full of chunks that are in L2"
        )
    return flags


def parse_controller_flags(arguments: Sequence[str]) -> Flags:
    """Parse the controller's command line. Raises nothing: `wrong` of the answer is for `load`."""
    return _parse(controller_parser(), arguments, CONTROLLER_FLAGS, {})


def parse_gateway_flags(arguments: Sequence[str]) -> Flags:
    """Parse the gateway's command line. Raises nothing: `wrong` of the answer is for `load`."""
    flags = _parse(gateway_parser(), arguments, {}, {})
    if "engines" in flags.settings:
        flags.settings["engines"] = [{"url": url} for url in flags.settings["engines"]]
    return flags


def _parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    theirs: Mapping[str, Name],
    prefixes: Mapping[str, Name],
) -> Flags:
    found = _sort_out(arguments, parser, theirs, prefixes)
    wrong = found.wrong
    try:
        parsed = vars(parser.parse_args(found.ours))
    except ConfigError as error:
        wrong.append(error)
        parsed = {}
    settings: dict[str, Any] = {}
    exposed: list[str] = []
    for name, value in found.settings.items():
        put(settings, name, value)
    for name, value in parsed.items():
        if name == "l2_adapters":
            try:
                entries = [entry_of_ours(one) for one in adapters_from_json(value)]
            except ConfigError as error:
                wrong.append(error)
                continue
            settings[name] = [entry for entry, _ in entries]
            found.notes.extend(f"--l2-adapter: {note}" for _, note in entries if note)
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
        found.notes,
        parsed.get("check", False),
        parsed.get("ready_fd", -1),
        exposed,
        found.names | {one.dest: one.option_strings[0] for one in parser._actions if one.dest in parsed},
        wrong,
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


class _Sorted(NamedTuple):
    """A command line without LMCache's flags."""

    ours: list[str]
    notes: list[str]
    wrong: list[ConfigError]
    settings: dict[str, Any]
    """Dotted settings that LMCache's flags stand for."""
    names: dict[str, str]
    """LMCache's flags of these settings."""


def _sort_out(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    theirs: Mapping[str, Name],
    prefixes: Mapping[str, Name],
) -> _Sorted:
    """Split LMCache's flags, and unknown ones, off the command line."""
    takes_value = {one: action.nargs != 0 for action in parser._actions for one in action.option_strings}
    found = _Sorted([], [], [], {}, {})
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        if not name.startswith("--") or name in takes_value:
            found.ours.append(argument)
            if takes_value.get(name) and not equals and rest:
                found.ours.append(rest.pop(0))
            continue
        words = [text] if equals else []
        # No command has arguments besides flags, so the words up to the next flag are this one's.
        while not equals and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        entry = find(name, theirs, prefixes)
        if entry is None:
            # A negation is suggested only in place of a negation.
            negations = (
                [] if name.startswith("--no-") else [one for one in takes_value if one.startswith("--no-")]
            )
            says = f"unknown flag{hint(name, takes_value, theirs, negations)}"
            found.wrong.append(ConfigError(f"command line: {name}: {says}", field=name))
        elif entry.fate is Fate.TRANSLATED:
            _take(name, entry, words, found)
        elif entry.asks(" ".join(words) if words else True):
            found.wrong.append(ConfigError(f"command line: {name}: {entry.say}", field=name))
        else:
            found.notes.append(f"{name} has no effect: {entry.say}")
    return found


def _take(name: str, entry: Name, words: list[str], found: _Sorted) -> None:
    """Set what a flag of LMCache stands for."""
    if len(words) != 1:
        found.wrong.append(ConfigError(f"command line: {name}: needs one value", field=name))
        return
    if not words[0]:
        found.notes.append(f"{name} has no effect: it is empty")
        return
    value: int | float | str = words[0]
    if entry.factor and not isinstance(number := _number(words[0]), str):
        scaled = number * entry.factor
        value = int(scaled) if float(scaled).is_integer() else scaled
    found.settings[entry.target] = value
    found.names[entry.target] = name
    if entry.also:
        found.settings.setdefault(entry.also, value)
        found.names.setdefault(entry.also, name)
    found.notes.append(f"{name} is taken as {entry.target}: {entry.say}")
